"""The process that tries grammars out: what it refuses, what it is killed for, how it ends."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine.core.grammar_compiler import Compiled, GrammarCompiler, GrammarKey
from engine.types.grammar_messages import choice_grammar
from engine.types.structured_outputs import StructuredOutputsParams

from engine.core import grammar_compiler
from instrumentation import GrammarOutcome
from tests.waiting import PATIENCE_S, wait_until

KWARGS = {
    "model": None,
    "revision": None,
    "download_dir": None,
    "tokenizer": None,
    "vocab_size": 49152,
    "stop_token_ids": [2],
}
SLOW = "".join(f"([^{one}]{{0,9000}}{one}){{0,9000}}" for one in "abcdefghijklmnopqrstuvwxyz")
"""Compiles for a minute."""
DEAR = "[a-z]{1,500}"
"""Compiles for a good part of a second."""
AMBIGUOUS = 'root ::= s\ns ::= s s s | "a" | ""'
"""Compiles at once, and takes longer with each token."""


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(KWARGS, timeout_s=2.5)
    yield made
    made.close()


def key_of(**form: object) -> GrammarKey:
    """Of a regular expression, as it stands: it is parsed when it is compiled."""
    if "regex" in form:
        return ("regex", str(form["regex"]), False)
    return StructuredOutputsParams(**form).key


def result_of(compiler: GrammarCompiler, key: GrammarKey) -> Compiled:
    """The constraint's result; those of others that come meanwhile are dropped."""
    return results_until(compiler, key)[-1]


def results_until(compiler: GrammarCompiler, key: GrammarKey) -> list[Compiled]:
    """The same, and before it the results that come first."""
    compiler.submit(key)
    found: list[Compiled] = []

    def is_there() -> bool:
        for result in compiler.take():
            if not found or found[-1].key != key:
                found.append(result)
        compiler.wait(0.1)
        return bool(found) and found[-1].key == key

    wait_until(is_there, "no result")
    return found


def children_of(pid: int | None) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False  # dead; where it is a zombie, whoever adopted it has not looked yet


def accepts(result: Compiled, text: str) -> bool:
    from xgrammar import GrammarMatcher

    assert result.outcome is GrammarOutcome.COMPILED, result.error
    matcher = GrammarMatcher(result.grammar)
    return bool(matcher.accept_string(text)) and bool(matcher.is_completed())


def test_each_kind_compiles_to_what_it_says(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f"],
            "tags": [
                {
                    "begin": "<f>",
                    "content": {"type": "json_schema", "json_schema": schema},
                    "end": "</f>",
                }
            ],
        },
    }
    cases = [
        (key_of(json=schema), ['{"a": 1}', '{\n  "a" : 1\n}'], ['{"b": 1}', "1"]),
        (key_of(json=schema, disable_any_whitespace=True), ['{"a": 1}'], ['{"a":\n1}']),
        (key_of(json_object=True), ["{}", '{"x": [1, {}]}'], ["[1]"]),
        (key_of(regex="[ab]{2}"), ["ab"], ["a", "abc"]),
        (key_of(choice=['a"\\\n', "é☃𝄞"]), ['a"\\\n', "é☃𝄞"], ["a"]),
        (key_of(grammar='root ::= "x" root | "y"'), ["xxy"], ["xx"]),
        (key_of(structural_tag=tag), ['say <f>{"a": 1}</f> so'], ["say <f>{}"]),
    ]
    for key, good, bad in cases:
        result = result_of(compiler, key)
        assert all(accepts(result, text) for text in good), key
        assert not any(accepts(result, text) for text in bad), key
        assert result.num_bytes > 0
        assert result.duration_ns > 0


def test_what_cannot_be_right_is_refused_with_its_reason(compiler: GrammarCompiler) -> None:
    cases = [
        (key_of(regex="[a-z"), "the class has no end"),
        (key_of(regex=r"(a)\1"), "backreferences"),
        (("json", '{"type": "nonsense"}', False), "nonsense"),
        (("json", '{"$ref": "#/$defs/none"}', False), "defs"),
        (key_of(grammar="root ::= missing"), "missing"),
        (key_of(grammar='other ::= "a"'), "root"),
        (key_of(grammar="root ::= root"), "no text but the empty one"),
        (key_of(structural_tag={"type": "nonsense"}), "structural"),
    ]
    pid = None
    for key, reason in cases:
        result = result_of(compiler, key)
        assert result.outcome is GrammarOutcome.INVALID, (key, result)
        assert reason in result.error
        assert ".cc:" not in result.error, "a place in the library's source tells users nothing"
        pid = pid or compiler.process_id
    assert compiler.process_id == pid


def test_slow_ones_are_in_nobodys_way_and_end_when_nobody_wants_them(
    compiler: GrammarCompiler,
) -> None:
    result_of(compiler, key_of(regex="a"))  # there is a process
    slow = [key_of(regex=SLOW + str(num)) for num in range(5)]
    for key in slow:
        compiler.submit(key)
    (result,) = results_until(compiler, key_of(regex="[12]b"))  # before any of the others
    assert accepts(result, "1b")
    assert len(children_of(compiler.process_id)) <= 4, "two at work, two in reserve"
    for key in slow:
        compiler.withdraw(key)
    assert accepts(result_of(compiler, key_of(regex="[34]b")), "3b")
    wait_until(lambda: len(children_of(compiler.process_id)) <= 2, "they have not ended")
    compiler.wait(0.5)
    assert compiler.take() == [], "what is withdrawn has no result"
    # It is no failure that would be remembered: whoever wants it next has it tried out.
    assert result_of(compiler, slow[0]).outcome is GrammarOutcome.TIMED_OUT


@pytest.mark.slow
def test_what_takes_too_long_is_given_up_and_the_next_one_is_served(
    compiler: GrammarCompiler,
) -> None:
    result_of(compiler, key_of(regex="a"))
    pid = compiler.process_id
    result = result_of(compiler, key_of(regex=SLOW))
    assert result.outcome is GrammarOutcome.TIMED_OUT
    assert accepts(result_of(compiler, key_of(regex="ab")), "ab")
    # Found by walking text through it, whether in time or not.
    result = result_of(compiler, key_of(grammar=AMBIGUOUS))
    assert result.outcome in (GrammarOutcome.INVALID, GrammarOutcome.TIMED_OUT)
    assert compiler.process_id == pid, "only children were killed"


def test_what_was_dear_to_compile_is_not_compiled_again_but_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_compiler, "compile_constraint", None)
    with contextlib.closing(GrammarCompiler(KWARGS, timeout_s=PATIENCE_S)) as compiler:
        result = result_of(compiler, key_of(regex=DEAR))
    assert accepts(result, "a" * 500)
    assert result.grammar.memory_size_bytes == result.num_bytes
    from xgrammar import GrammarMatcher

    assert not GrammarMatcher(result.grammar).accept_string("a" * 501)


def test_sigkill_costs_only_a_second_try(compiler: GrammarCompiler) -> None:
    result_of(compiler, key_of(regex="a"))
    pid = compiler.process_id
    assert pid is not None
    for child in children_of(pid):
        os.kill(child, signal.SIGKILL)
    assert accepts(result_of(compiler, key_of(regex="ef")), "ef")
    assert compiler.process_id == pid
    os.kill(pid, signal.SIGSTOP)  # so that it dies with the question unanswered
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    assert accepts(result_of(compiler, key_of(regex="cd")), "cd")
    assert compiler.process_id != pid
    killer.join()


@pytest.mark.slow
def test_it_dies_with_its_parent_in_the_middle_of_compiling() -> None:
    program = (
        "from tests.integration.test_grammar_process import *\n"
        "compiler = GrammarCompiler(KWARGS, timeout_s=100.0)\n"
        "result_of(compiler, key_of(regex='a'))\n"
        "compiler.submit(key_of(regex=SLOW))\n"
        "wait_until(lambda: len(children_of(compiler.process_id)) >= 2)\n"
        "print(compiler.process_id, *children_of(compiler.process_id), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 3, "the process, a child at work and one in reserve"
    wait_until(lambda: not any(map(is_running, pids)), "an orphan spins")


def test_literals_are_escaped_whatever_they_hold() -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(1, 0x2FF, 5))) for _ in range(20)]
    grammar = choice_grammar(texts)
    assert grammar.isascii()
    assert grammar.startswith('root ::= "')
    assert grammar.count('" | "') == 19
