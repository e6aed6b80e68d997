"""A run of stock vLLM, started by its own interpreter. Usage: vllm_run.py CHECKPOINT.

Knows vLLM's offline API. Does not know hooks. The last line of stdout is one JSON document: the
tokens of each request. Few KV blocks and a small budget make it chunk prompts and preempt.
"""

import json
import os
import random
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
NUM_REQUESTS = 12


def main() -> None:
    """Generate and print."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        block_size=32,
        num_gpu_blocks_override=18,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=True,
    )
    # This and no other seed, so that both runs have the same prompts; the first 40 are shared.
    source = random.Random(0)
    shared = [source.randrange(3, 120) for _ in range(40)]
    prompts = [
        {"prompt_token_ids": shared + [source.randrange(3, 120) for _ in range(1 + 7 * number)]}
        for number in range(NUM_REQUESTS)
    ]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    outputs += llm.generate(prompts[:2], params, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)


if __name__ == "__main__":
    main()
