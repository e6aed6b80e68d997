"""Talk to the model through its chat template, two conversations at once."""

from engine import LLM, SamplingParams

conversations = [
    [{"role": "user", "content": "Name one river in Egypt."}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What colour is the sky?"},
    ],
]

with LLM(log_level="warning") as llm:
    for output in llm.chat(conversations, SamplingParams(temperature=0, max_tokens=24)):
        print(output.outputs[0].text.strip())
        print("  tokens:", len(output.outputs[0].token_ids), output.outputs[0].finish_reason)
