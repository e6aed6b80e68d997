"""What goes wrong says what was wrong, what is allowed, and what to do."""

from engine import LLM, ConfigError, PromptError, SamplingParams, SamplingParamsError

try:
    LLM(max_num_seq=8)
except ConfigError as error:
    print("ConfigError:", error)

try:
    SamplingParams(n=2, temperature=0)
except SamplingParamsError as error:
    print("SamplingParamsError:", error)

with LLM(log_level="warning", max_model_len=64) as llm:
    try:
        llm.generate(["fine", "word " * 100], use_tqdm=False)
    except PromptError as error:
        print("PromptError:", error)
    # Nothing of the refused call was sent; the engine is as it was.
    (output,) = llm.generate(["fine"], SamplingParams(max_tokens=2), use_tqdm=False)
    print("still serving:", len(output.outputs[0].token_ids), "tokens")
