"""Offline figures of this engine: boot, decode at batch 1, 16 and 64, prefill.

    python benchmarks/offline.py [MODEL]      # without MODEL: the embedded one

The last line of stdout is one JSON document. Prompts, token counts and order are those of the
comparison with vLLM (`benchmarks/against_vllm.py`).
"""

import time

BEGAN = time.perf_counter()  # the import is part of the boot

import argparse  # noqa: E402
import json  # noqa: E402

from engine import LLM, SamplingParams  # noqa: E402

BATCHES = (1, 16, 64)
NUM_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="checkpoint folder, .gguf file or hub name")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--trace-dir", help="record the run")
    parser.add_argument("--disable-log-stats", action="store_true")
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=4096,
        log_level="warning",
        trace_dir=arguments.trace_dir,
        disable_log_stats=arguments.disable_log_stats,
    )
    result: dict[str, float] = {"boot_s": round(time.perf_counter() - BEGAN, 2)}
    print(f"boot          {result['boot_s']:8.2f} s")
    prompts = [f"Write a short story about a robot number {i} who" for i in range(max(BATCHES))]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    llm.generate(prompts[:1], params, use_tqdm=False)
    for batch in BATCHES:
        start = time.perf_counter()
        llm.generate(prompts[:batch], params, use_tqdm=False)
        rate = batch * NUM_TOKENS / (time.perf_counter() - start)
        result[f"decode_{batch}_tok_s"] = round(rate, 1)
        print(f"decode {batch:4}   {rate:8.1f} tokens/s")
    text = " ".join(f"word{i}" for i in range(400))
    long = [f"{i} {text}" for i in range(8)]
    start = time.perf_counter()
    outputs = llm.generate(long, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
    elapsed = time.perf_counter() - start
    rate = sum(len(output.prompt_token_ids) for output in outputs) / elapsed
    result["prefill_tok_s"] = round(rate, 1)
    print(f"prefill       {rate:8.1f} tokens/s")
    llm.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
