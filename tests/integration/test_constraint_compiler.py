"""Compiling beside the steps, and the process that tries out what caps do not bound."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.structured import compiler as module
from engine.structured.compiler import Compiled, ConstraintCompiler
from engine.structured.constraint import ConstraintKey
from engine.structured.forms.params import MAX_BYTES, StructuredOutputsParams
from engine.structured.vocabulary import Vocabulary
from instrumentation import GrammarOutcome
from tests.support.grammar_walks import lets_begin
from tests.waiting import PATIENCE_S, wait_until

SLOW = (
    "root ::= r0\n" + "".join(f'r{n} ::= r{n + 1} | "a"\n' for n in range(9000)) + 'r9000 ::= "b"'
)
"""Takes tens of seconds to be brought into Lark."""


def load() -> tuple[Vocabulary, Callable[[str], list[int]]]:
    """A vocabulary of single bytes and an end."""
    pieces = [bytes([value]) for value in range(256)] + [b""]
    return Vocabulary(pieces, 257, [256]), lambda text: list(text.encode())


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(load, timeout_s=1.0)
    yield made
    made.close()


def key_of(**form: object) -> ConstraintKey:
    return StructuredOutputsParams(**form).key


def slow(number: int) -> ConstraintKey:
    """One of several constraints that are slow."""
    return "grammar", SLOW.replace('"b"', f'"{number}"'), False


def result_of(compiler: ConstraintCompiler, key: ConstraintKey) -> Compiled:
    """The constraint's result; those of others that come meanwhile are dropped."""
    return results_until(compiler, key)[-1]


def results_until(compiler: ConstraintCompiler, key: ConstraintKey) -> list[Compiled]:
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


def accepts(result: Compiled, text: str) -> bool:
    assert result.outcome is GrammarOutcome.COMPILED, result.error
    matcher = result.grammar.deep_copy()
    return lets_begin(matcher, text) and matcher.is_accepting()


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False  # dead; where it is a zombie, whoever adopted it has not looked yet


def test_each_kind_compiles_to_what_it_says(compiler: ConstraintCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    content = {"type": "json_schema", "json_schema": schema}
    tags = [{"begin": "<f>", "content": content, "end": "</f>"}]
    tag = {"format": {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}}
    older = {
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f"],
    }
    said = (['say <f>{"a": 1}</f> so', "no"], ["say <f>{}</f>", "say <f"])
    cases = [
        (key_of(json=schema), ['{"a": 1}', '{\n  "a" : 1\n}'], ['{"b": 1}', "1"]),
        (key_of(json=schema, disable_any_whitespace=True), ['{"a": 1}'], ['{"a":\n1}', '{"a":1}']),
        (key_of(json={"type": "string", "pattern": "a"}), ['"bab"'], ['"b"']),
        (key_of(json_object=True), ["{}", '{"x": [1, {}]}'], ["[1]"]),
        (key_of(regex="[ab]{2}"), ["ab"], ["a", "abc"]),
        (key_of(regex="^a/b$"), ["a/b"], ["a"]),
        (key_of(choice=['a"\\\n', "é☃𝄞", "a"]), ['a"\\\n', "é☃𝄞", "a"], ["", "b"]),
        (key_of(grammar='root ::= "x" root | "y"'), ["xxy"], ["xx"]),
        (key_of(grammar='// ::=\nstart: "x" start | "y"'), ["xxy"], ["xx"]),
        (key_of(structural_tag=tag), *said),
        (key_of(structural_tag=older), *said),
    ]
    for key, good, bad in cases:
        result = result_of(compiler, key)
        assert all(accepts(result, text) for text in good), key
        assert not any(accepts(result, text) for text in bad), key
        assert result.num_bytes > 0
        assert result.duration_ns > 0


def test_what_cannot_be_right_is_refused_with_its_reason(compiler: ConstraintCompiler) -> None:
    cases = [
        (key_of(regex="[a-z"), "unclosed character class"),
        (key_of(regex="(a"), "unclosed group"),
        (key_of(regex="a$b"), "lookarounds not supported"),
        (key_of(regex="^$"), "no text but the empty one"),
        (key_of(json={"allOf": [{"type": "string"}, {"type": "integer"}]}), "nsatisfiable"),
        (key_of(json={"type": "string", "pattern": "a^b"}), "lookarounds"),
        (key_of(grammar="root ::= missing"), "missing"),
        (key_of(grammar='other ::= "a"'), "root"),
        (key_of(grammar="start: missing"), "missing"),
        (key_of(grammar="root ::= root"), "no text but the empty one"),
        (key_of(grammar='start: "" | start'), "no text but the empty one"),
    ]
    for key, reason in cases:
        result = result_of(compiler, key)
        assert result.outcome is GrammarOutcome.INVALID, (key, result)
        assert reason in result.error
        assert "\n" not in result.error
        assert "limits." not in result.error, "the library's settings tell users nothing"


def test_the_longest_chains_of_rules_overflow_no_stack(compiler: ConstraintCompiler) -> None:
    rules = [f"r{n}: r{n + 1}" for n in range(14_000)]
    text = "\n".join(["start: r0", *rules, 'r14000: "b"'])
    assert len(text) < MAX_BYTES
    assert accepts(result_of(compiler, key_of(grammar=text)), "b")
    terminals = [f'T{n}: "a" T{n + 1} | "b"' for n in range(9_000)]
    text = "\n".join(["start: T0", *terminals, 'T9000: "b"'])
    assert accepts(result_of(compiler, key_of(grammar=text)), "aab")


def test_slow_ones_do_not_delay_schemas_and_end_when_nobody_wants_them(
    compiler: ConstraintCompiler,
) -> None:
    for number in range(5):
        compiler.submit(slow(number))
    (result,) = results_until(compiler, key_of(json={"const": "a"}))  # before any of the others
    assert accepts(result, '"a"')
    for number in range(5):
        compiler.withdraw(slow(number))
    (result,) = results_until(compiler, key_of(regex="[34]b"))  # what is withdrawn has no result
    assert accepts(result, "3b")
    assert compiler.take() == []
    # It is no failure that would be remembered: whoever wants it next has it tried out.
    result = result_of(compiler, slow(0))
    assert result.outcome is GrammarOutcome.TIMED_OUT
    assert "more than 1 s of processor time" in result.error
    assert accepts(result_of(compiler, key_of(regex="ab")), "ab")


def test_a_process_that_dies_costs_a_second_try(compiler: ConstraintCompiler) -> None:
    result_of(compiler, key_of(regex="a"))
    pid = compiler.process_id
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert accepts(result_of(compiler, key_of(regex="ef")), "ef")
    pid = compiler.process_id
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # so that it dies with the question unanswered
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    assert accepts(result_of(compiler, key_of(regex="cd")), "cd")
    assert compiler.process_id != pid
    killer.join()


def test_what_kills_its_process_twice_is_refused(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    result_of(compiler, key_of(regex="a"))
    trial = compiler._trial
    assert trial is not None
    send = trial._send

    def send_and_kill(data: bytes) -> None:
        if b"deadly" in data:
            trial.interrupt()
        send(data)

    monkeypatch.setattr(trial, "_send", send_and_kill)
    result = result_of(compiler, key_of(regex="deadly"))
    assert result.outcome is GrammarOutcome.CRASHED
    assert "ended the process that tried it out, twice" in result.error
    assert accepts(result_of(compiler, key_of(regex="gh")), "gh")


def test_without_a_vocabulary_or_a_process_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> tuple[Vocabulary, Callable[[str], list[int]]]:
        raise OSError("no tokenizer")

    with contextlib.closing(ConstraintCompiler(fail, timeout_s=1.0)) as compiler:
        result = result_of(compiler, key_of(json_object=True))
        assert result.outcome is GrammarOutcome.UNAVAILABLE
        assert "structured outputs are not available: OSError('no tokenizer')" in result.error
    monkeypatch.setattr("engine.structured.trial._PROGRAM", "raise SystemExit(3)")
    with contextlib.closing(ConstraintCompiler(load, timeout_s=1.0)) as compiler:
        result = result_of(compiler, key_of(regex="a"))
        assert result.outcome is GrammarOutcome.UNAVAILABLE
        assert "did not start" in result.error
        assert accepts(result_of(compiler, key_of(json_object=True)), "{}"), "it needs no trial"


def test_a_failure_of_the_library_is_one_constraints(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("inside")

    monkeypatch.setattr(module, "compiled", fail)
    result = result_of(compiler, key_of(choice=["a"]))
    assert result.outcome is GrammarOutcome.UNAVAILABLE
    monkeypatch.undo()
    assert accepts(result_of(compiler, key_of(choice=["a"])), "a")


def test_it_is_closed_at_once_whatever_it_does() -> None:
    compiler = ConstraintCompiler(load, timeout_s=PATIENCE_S)
    compiler.submit(slow(0))
    wait_until(lambda: compiler._at_trial is not None and compiler.process_id is not None)
    pid = compiler.process_id
    assert pid is not None
    compiler.close()
    wait_until(lambda: not is_running(pid))


@pytest.mark.slow
def test_it_dies_with_its_parent_in_the_middle_of_compiling() -> None:
    program = (
        "from tests.integration.test_constraint_compiler import *\n"
        "compiler = ConstraintCompiler(load, timeout_s=100.0)\n"
        "result_of(compiler, key_of(regex='a'))\n"
        "compiler.submit(slow(0))\n"
        "wait_until(lambda: compiler._at_trial is not None)\n"
        "print(compiler.process_id, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    wait_until(lambda: not is_running(pid), "an orphan spins")
