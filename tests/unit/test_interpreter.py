"""The first code of an interpreter of ours: what it gets, and that it leaves without a word."""

import subprocess

import pytest

from engine.interpreter import READ_BOOT, boot_line, command
from tests.waiting import PATIENCE_S

PROGRAM = READ_BOOT + "print(boot['answer'], end='')"


def run(given: bytes) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(command(PROGRAM), input=given, capture_output=True, timeout=PATIENCE_S)


def test_the_facts_are_there() -> None:
    ended = run(boot_line(answer=42))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"42", b"")


@pytest.mark.parametrize("num_bytes", [0, 20, -1])
def test_it_ends_quietly_where_whoever_started_it_has_gone(num_bytes: int) -> None:
    ended = run(boot_line(answer=42)[:num_bytes])
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")
