"""Every example and every code block of the README and of the guide runs."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.documentation import PYTHON_BLOCKS, ROOT, SHELL_BLOCKS
from tests.support.server_process import free_port
from tests.waiting import PATIENCE_S

EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("[0-9]*.py"))
IN_SHORT = {"04_trace_a_run.py", "08_logits_processor.py", "09_errors.py"}
"""Examples that `make test` runs, beside the first block; `make test-slow` runs the others."""


def run(command: list[str], cwd: Path, *, stdin: str | None = None) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        input=stdin or "",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.slow) for name in EXAMPLES],
)
def test_example_runs(name: str, tmp_path: Path) -> None:
    assert run([sys.executable, str(ROOT / "examples" / name)], tmp_path).strip()


def first_is_short(blocks: list[str]) -> list[Any]:
    """The first block for `make test`, the others for `make test-slow`."""
    later = [pytest.param(block, marks=pytest.mark.slow) for block in blocks[1:]]
    return [blocks[0], *later]


@pytest.mark.parametrize("block", first_is_short(PYTHON_BLOCKS), ids=range(len(PYTHON_BLOCKS)))
def test_readme_python_block_runs(block: str, tmp_path: Path) -> None:
    """From standard input, as a reader would paste it: no file, no `__main__` guard."""
    run([sys.executable, "-"], tmp_path, stdin=block)


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=range(len(SHELL_BLOCKS)))
def test_readme_shell_block_runs(block: str, tmp_path: Path) -> None:
    """Blocks of `isinglass` commands run as written; `make` targets must exist."""
    targets = re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no make target {target}"
    script = "\n".join(line for line in block.splitlines() if not line.startswith(("make", "git")))
    if script.strip():
        binaries = Path(sys.executable).parent
        script = script.replace("8000", str(free_port()))  # that of `isinglass serve`
        # What a block has started ends with it, also when one of its commands fails.
        prologue = f'export PATH="{binaries}:$PATH"; trap "kill %1 2>/dev/null || true" EXIT'
        run(["bash", "-euc", f"{prologue}\n{script}"], tmp_path)


def test_readme_has_something_to_run() -> None:
    assert PYTHON_BLOCKS
    assert SHELL_BLOCKS
    assert len(EXAMPLES) >= 10


@pytest.mark.slow
def test_benchmarks_end_with_one_json_document(tmp_path: Path) -> None:
    """The benchmark of overhead on a very short run: the other ones share its shape."""
    import json

    command = [sys.executable, str(ROOT / "benchmarks" / "overhead.py")]
    out = run([*command, "--rounds", "2", "--batches", "1", "--tokens", "3"], tmp_path)
    document = json.loads(out.strip().splitlines()[-1])
    assert document["batch_1"]["prometheus_ratio"] > 0
    assert document["batch_1"]["everything_ratio"] > 0
    assert document["in_line_us_per_step"] > 0
