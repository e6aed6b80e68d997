"""Logprobs of prompt and output; the tokens' text is decoded only when it is read."""

from engine import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=3, logprobs=3, prompt_logprobs=0)

with LLM(log_level="warning") as llm:
    (output,) = llm.generate(["The opposite of hot is"], params, use_tqdm=False)

for token_id, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
    entry = position[token_id]
    print(f"prompt {entry.decoded_token!r:12} {entry.logprob:8.3f}  rank {entry.rank}")
for position in output.outputs[0].logprobs:
    print("output", {entry.decoded_token: round(entry.logprob, 3) for entry in position.values()})
