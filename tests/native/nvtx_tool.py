"""Builds the NVTX tool of this folder, and reads what it has written down.

Knows the form of its lines. Does not know which ranges there should be.
"""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

_SOURCE = Path(__file__).with_name("nvtx_injection.c")


class Line(NamedTuple):
    """One thing that the tool was told."""

    what: str
    thread_id: int
    time_ns: int
    domain: str
    name: str


class Range(NamedTuple):
    """A range that was opened and closed."""

    name: str
    depth: int
    begin_ns: int
    end_ns: int


def build_tool(folder: Path) -> Path:
    """Compile the tool; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the NVTX tool of the tests needs a C compiler (cc)")
    library = folder / "nvtx_injection.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", library, _SOURCE], check=True)
    return library


def environment_of(library: Path, output: Path) -> dict[str, str]:
    """The variables under which a process and its children are watched."""
    return {"NVTX_INJECTION64_PATH": str(library), "NVTX_TEST_OUTPUT": str(output)}


def read_lines(output: Path) -> dict[int, list[Line]]:
    """All lines, by process id."""
    lines = {}
    for path in output.parent.glob(f"{output.name}.*"):
        rows = [row.split("\t") for row in path.read_text().splitlines()]
        lines[int(path.suffix[1:])] = [
            Line(what, int(thread_id), int(time_ns), domain, name)
            for what, thread_id, time_ns, domain, name in rows
        ]
    return lines


def ranges_by_thread(lines: list[Line]) -> dict[int, list[Range]]:
    """The ranges of each thread by begin; asserts that every push has its pop."""
    opened: dict[int, list[Line]] = {}
    found: dict[int, list[Range]] = {}
    for line in lines:
        stack = opened.setdefault(line.thread_id, [])
        if line.what == "push":
            stack.append(line)
        elif line.what == "pop":
            begin = stack.pop()
            one = Range(begin.name, len(stack), begin.time_ns, line.time_ns)
            found.setdefault(line.thread_id, []).append(one)
    assert not any(opened.values()), "pushed but never popped"
    return {thread: sorted(some, key=lambda one: one.begin_ns) for thread, some in found.items()}
