"""The process that tries grammars out: what it refuses, what it is killed for, how it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.core.grammar_compiler import Compiled, GrammarCompiler, GrammarKey
from engine.types.grammar_messages import choice_grammar
from engine.types.structured_outputs import StructuredOutputsParams
from instrumentation import GrammarOutcome

KWARGS = {
    "model": None,
    "revision": None,
    "download_dir": None,
    "tokenizer": None,
    "vocab_size": 49152,
    "stop_token_ids": [2],
}
SLOW = "(.{0,2000}x){0,2000}"
"""Compiles for a minute."""
AMBIGUOUS = 'root ::= s\ns ::= s s s | "a" | ""'
"""Compiles at once, and takes longer with each token."""


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(KWARGS, timeout_s=2.5)
    yield made
    made.close()


def key_of(**form: object) -> GrammarKey:
    return StructuredOutputsParams(**form).key


def result_of(compiler: GrammarCompiler, key: GrammarKey) -> Compiled:
    compiler.submit(key)
    for _ in range(600):
        if found := compiler.take():
            return found[0]
        compiler.wait(0.1)
    raise AssertionError("no result in 60 s")


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
        (key_of(regex="[a-z"), "Unclosed"),
        (key_of(regex=r"(a)\1"), "Backreference"),
        (key_of(json={"type": "nonsense"}), "nonsense"),
        (key_of(json={"$ref": "#/$defs/none"}), "defs"),
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


@pytest.mark.slow
def test_what_takes_too_long_is_given_up_and_the_next_one_is_served(
    compiler: GrammarCompiler,
) -> None:
    result_of(compiler, key_of(regex="a"))  # there is a process
    pid = compiler.process_id
    assert pid is not None
    began = time.monotonic()
    result = result_of(compiler, key_of(regex=SLOW))
    assert result.outcome is GrammarOutcome.TIMED_OUT
    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert accepts(result_of(compiler, key_of(regex="ab")), "ab")
    # Found by walking text through it, whether in time or not.
    result = result_of(compiler, key_of(grammar=AMBIGUOUS))
    assert result.outcome in (GrammarOutcome.INVALID, GrammarOutcome.TIMED_OUT)


def test_sigkill_costs_only_a_second_try(compiler: GrammarCompiler) -> None:
    result_of(compiler, key_of(regex="a"))
    pid = compiler.process_id
    assert pid is not None
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
        "print(compiler.process_id, flush=True)\n"
        "compiler.submit(key_of(regex=SLOW))\n"
        "time.sleep(0.3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return  # dead; whoever adopted it has not looked yet
        time.sleep(0.05)
    raise AssertionError("an orphan spins")


def test_literals_are_escaped_whatever_they_hold() -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(1, 0x2FF, 5))) for _ in range(20)]
    grammar = choice_grammar(texts)
    assert grammar.isascii()
    assert grammar.startswith('root ::= "')
    assert grammar.count('" | "') == 19
