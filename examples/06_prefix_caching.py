"""Prompts that begin alike share KV blocks; a cache_salt keeps tenants apart."""

from engine import LLM, SamplingParams

document = " ".join(f"Paragraph {i} says that the lamp was lit at dusk." for i in range(20))
params = SamplingParams(temperature=0, max_tokens=4)

with LLM(log_level="warning") as llm:
    (first,) = llm.generate([document + " Who lit the lamp?"], params, use_tqdm=False)
    (again,) = llm.generate([document + " When was it lit?"], params, use_tqdm=False)
    salted = {"prompt": document + " When was it lit?", "cache_salt": "another tenant"}
    (apart,) = llm.generate([salted], params, use_tqdm=False)

for name, output in (("first", first), ("again", again), ("salted", apart)):
    print(f"{name:7} {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} cached")
assert first.num_cached_tokens == apart.num_cached_tokens == 0 < again.num_cached_tokens
