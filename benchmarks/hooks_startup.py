"""What the hooks' folder on PYTHONPATH adds to the start of a Python that has no gate set.

Usage: python benchmarks/hooks_startup.py [--pairs N]. Runs pairs of interpreters, without and with
the folder: the median of the time that Python itself reports for importing our `sitecustomize`, and
the shortest whole processes, since other load only ever adds to those. Bytecode is cached, as pip
leaves it when it installs. The last line is one JSON document, in microseconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "instrumentation" / "hooks" / "site"


_LEFT_OUT = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")


def environment(path: str | None) -> dict[str, str]:
    """Ours, without any hook; with that folder on the path, or none."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LEFT_OUT and not name.startswith("ISINGLASS_")
    }
    return kept if path is None else kept | {"PYTHONPATH": path}


def import_us(path: str) -> float:
    """Microseconds for importing `sitecustomize` from that folder, by Python's own account."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "pass"],
        env=environment(path),
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in done.stderr.splitlines() if line.endswith(" sitecustomize")]
    return float(line.split("|")[1])


def process_us(path: str | None) -> float:
    """Microseconds from start to end of an interpreter that does nothing."""
    begin_ns = time.perf_counter_ns()
    subprocess.run([sys.executable, "-c", "pass"], env=environment(path), check=True)
    return (time.perf_counter_ns() - begin_ns) / 1000


def measure(num_pairs: int) -> dict[str, float | int]:
    """The figures, after one pair that fills the caches."""
    site = str(SITE)
    process_us(None), process_us(site), import_us(site)
    imports, without, with_folder = [], [], []
    for _ in range(num_pairs):
        imports.append(import_us(site))
        without.append(process_us(None))
        with_folder.append(process_us(site))
    return {
        "pairs": num_pairs,
        "sitecustomize_import_us": round(statistics.median(imports), 1),
        "process_without_us": round(min(without), 1),
        "process_with_us": round(min(with_folder), 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="pairs of interpreters (default: 40)")
    num_pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        print(json.dumps(measure(num_pairs)))


if __name__ == "__main__":
    main()
