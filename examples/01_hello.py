"""Generate for a list of prompts with the embedded model."""

from engine import LLM, SamplingParams

with LLM(log_level="warning") as llm:
    prompts = ["The capital of France is", "Water boils at"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
