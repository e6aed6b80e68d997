"""This engine and vLLM in turns on the same checkpoint, as ratios.

    python benchmarks/against_vllm.py --vllm-python VENV/bin/python --vllm-script bench_vllm.py \\
        --checkpoint FOLDER [--rounds 3]

`--vllm-script CHECKPOINT` must print one JSON document with the keys of `benchmarks/offline.py`
as its last line. Each round runs both, one behind the other, so that a slow spell of the machine
hits both; the ratio of a round is ours over theirs, and the median over the rounds is the result.
The last line of stdout is one JSON document.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


def run(command: list[str]) -> dict[str, float]:
    """The JSON document on the last line of a command's output."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", required=True, help="interpreter that has vLLM")
    parser.add_argument("--vllm-script", required=True, help="its benchmark script")
    parser.add_argument("--checkpoint", required=True, help="Transformers checkpoint folder")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ours_command = [sys.executable, str(HERE / "offline.py"), arguments.checkpoint]
    theirs_command = [arguments.vllm_python, arguments.vllm_script, arguments.checkpoint]
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(arguments.rounds):
        ours.append(run(ours_command))
        theirs.append(run(theirs_command))
        print(f"round {number + 1}: ours {ours[-1]}\n         vLLM {theirs[-1]}", flush=True)
    table = Table(title=f"medians of {arguments.rounds} rounds")
    for column in ("figure", "ours", "vLLM", "ratio", "ratios of the rounds"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    result: dict[str, float] = {}
    for key in ours[0]:
        ratios = [a[key] / b[key] for a, b in zip(ours, theirs, strict=True)]
        result[f"{key}_ratio"] = round(statistics.median(ratios), 3)
        table.add_row(
            key,
            f"{statistics.median(a[key] for a in ours):g}",
            f"{statistics.median(b[key] for b in theirs):g}",
            f"{statistics.median(ratios):.2f}",
            ", ".join(f"{ratio:.2f}" for ratio in ratios),
        )
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
