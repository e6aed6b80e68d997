"""What the vllm hook costs a vLLM engine, in pairs within one engine.

Usage: isinglass hooks run vllm -- /path/to/vllm/bin/python benchmarks/vllm_hook_cost.py CHECKPOINT
[--pairs N]. The engine core runs in this process, so that the hook's patches, which are attributes
of its objects, can be taken off and put back between two generations. The ratio is the median over
pairs of the time with them to the time without. The last line is one JSON document.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# One thread: with more, a machine that does anything else makes steps many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
NUM_TOKENS = 24
BATCH_SIZES = (1, 16)


class Switch:
    """Takes the hook's patches off an engine core, and puts them back."""

    def __init__(self, core: Any) -> None:
        owners = (core, core.scheduler, core.model_executor)
        owners += (core.scheduler.kv_cache_manager.block_pool,)
        self._patches = [
            (owner, name, value)
            for owner in owners
            for name, value in vars(owner).items()
            if hasattr(value, "__wrapped__")
        ]
        assert len(self._patches) > 5, "the vllm hook is not active; start this by `hooks run`"

    def set(self, *, is_on: bool) -> None:
        """Between two steps."""
        for owner, name, value in self._patches:
            setattr(owner, name, value if is_on else value.__wrapped__)


def measure(llm: Any, switch: Switch, batch_size: int, num_pairs: int) -> dict[str, float | int]:
    """Pairs of generations, in turns which comes first."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    prompts = [f"Write a short story about a robot number {n} who" for n in range(batch_size)]

    def time_s(*, is_on: bool) -> float:
        switch.set(is_on=is_on)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    time_s(is_on=True), time_s(is_on=False)
    ratios, without_s, with_s = [], [], []
    for pair in range(num_pairs):
        times_s = {is_on: time_s(is_on=is_on) for is_on in (pair % 2 == 0, pair % 2 == 1)}
        with_s.append(times_s[True])
        without_s.append(times_s[False])
        ratios.append(times_s[True] / times_s[False])
    return {
        "pairs": num_pairs,
        "ratio_of_medians": round(statistics.median(with_s) / statistics.median(without_s), 4),
        "median_ratio": round(statistics.median(ratios), 4),
        "ratio_of_fastest": round(min(with_s) / min(without_s), 4),
        "step_ms_without": round(1000 * statistics.median(without_s) / NUM_TOKENS, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--pairs", type=int, default=10)
    arguments = parser.parse_args()
    from vllm import LLM

    llm = LLM(
        model=arguments.checkpoint,
        max_model_len=1024,
        dtype="bfloat16",
        enforce_eager=True,
        disable_log_stats=True,
    )
    switch = Switch(llm.llm_engine.engine_core.engine_core)
    result = {f"batch_{size}": measure(llm, switch, size, arguments.pairs) for size in BATCH_SIZES}
    print(json.dumps(result), flush=True)
    os._exit(0)  # vLLM's shutdown would write to stdout


if __name__ == "__main__":
    main()
