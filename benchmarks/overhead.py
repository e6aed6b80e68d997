"""What recording costs: everything on against everything off, in turns.

    python benchmarks/tracing_cost.py [--pairs 12] [--batches 1 64]

Two engines live side by side, one with journals and metrics, one with neither; only one works at a
time. A pair is the same generation on both, in alternating order, so that a slow spell of the
machine hits both. The ratio of a pair is time on over time off; the median is the result. The
last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
import tempfile
import time

from engine import LLM, SamplingParams


def seconds(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    """Time of one generation."""
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of one generation")
    arguments = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    result = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(log_level="warning", trace_dir=folder) as on,
        LLM(log_level="warning", disable_log_stats=True) as off,
    ):
        for batch in arguments.batches:
            prompts = [f"Write a short story about a robot number {i} who" for i in range(batch)]
            for llm in (on, off):
                seconds(llm, prompts, params)
            ratios = []
            for pair in range(arguments.pairs):
                if pair % 2:
                    time_on, time_off = seconds(on, prompts, params), seconds(off, prompts, params)
                else:
                    time_off, time_on = seconds(off, prompts, params), seconds(on, prompts, params)
                ratios.append(time_on / time_off)
            low, _, high = statistics.quantiles(ratios, n=4)
            median = statistics.median(ratios)
            print(f"batch {batch:3}: on/off {median:.4f} (quartiles {low:.4f} to {high:.4f})")
            result[f"batch_{batch}"] = {"everything_ratio": round(median, 4)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
