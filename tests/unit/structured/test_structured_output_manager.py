"""Grammars for requests: shared, kept, refused, given up; and how far each output has got."""

import fcntl
import os
import resource
import select
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from engine.core import grammar_compiler
from engine.core.grammar import Grammar, bits_of, end_mask_of
from engine.core.grammar_compiler import Compiled, GrammarCompiler, GrammarKey
from engine.core.request import Request, RequestStatus
from engine.core.structured_output import StructuredOutputManager
from engine.types.grammar_messages import (
    QUICK_NS,
    CompileRequest,
    CompileResult,
    MatchTime,
    Vocabulary,
)
from engine.types.messages import ErrorKind
from instrumentation import Event, GrammarOutcome, GrammarTotals, Metrics
from instrumentation.testing import Recorder
from tests.fakes import make_request, sampling_params
from tests.waiting import PATIENCE_S, wait_until

VOCAB_SIZE = 70
END = 2


class ScriptedMatcher:
    """Matches one sequence of sets of tokens; an end token may come behind it."""

    padding = 0
    """Bits behind the vocabulary, which say nothing."""

    def __init__(self, script: list[set[int]]) -> None:
        self.script = script
        self.position = 0
        self.num_fills = 0
        self.ended = False

    def accept_token(self, token_id: int) -> bool:
        if self.position == len(self.script):
            self.ended = token_id == END
            return self.ended
        accepted = token_id in self.script[self.position]
        self.position += accepted
        return accepted

    def fill_next_token_bitmask(self, mask: Any) -> bool:
        self.num_fills += 1
        rest = self.script[self.position :]
        # A step that may be skipped has the end token among its tokens.
        mask[0] = bits_of(sorted(rest[0]) if rest else [END], VOCAB_SIZE)
        mask[0, -1] |= self.padding
        return True

    def is_completed(self) -> bool:
        rest = self.script[self.position :]
        return not rest or END in rest[0]

    def is_terminated(self) -> bool:
        return self.ended


class FakeCompiler(GrammarCompiler):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__({}, timeout_s=1.0)
        self.submitted: list[GrammarKey] = []
        self.withdrawn: list[GrammarKey] = []
        self.results: list[Compiled] = []

    def submit(self, key: GrammarKey) -> None:
        self.submitted.append(key)

    def withdraw(self, key: GrammarKey) -> None:
        self.withdrawn.append(key)

    def take(self) -> list[Compiled]:
        results, self.results = self.results, []
        return results

    def answer(
        self, regex: str, outcome: GrammarOutcome = GrammarOutcome.COMPILED, **more: Any
    ) -> None:
        self.results.append(Compiled(key_of(regex), outcome, grammar=regex, **more))


def key_of(regex: str) -> GrammarKey:
    return ("regex", regex, False)


def request(num: int, regex: str | None, **more: Any) -> Request:
    form = None if regex is None else {"regex": regex}
    params = sampling_params(structured_outputs=form, **more)
    return make_request(f"r{num}", [1, 2, 3], num=num, params=params)


def make_manager(*, cache_bytes: int = 100, obs: Any = None) -> tuple[Any, FakeCompiler]:
    compiler = FakeCompiler()
    manager = StructuredOutputManager(
        compiler,
        vocab_size=VOCAB_SIZE,
        end_token_ids=[END],
        cache_bytes=cache_bytes,
        obs=obs or Recorder(),
        make_matcher=lambda regex: ScriptedMatcher([{ord(letter) % 64} for letter in regex]),
    )
    return manager, compiler


# -- the manager -----------------------------------------------------------------------------------


def test_requests_without_a_constraint_are_left_alone() -> None:
    manager, compiler = make_manager()
    free = request(0, None)
    manager.begin(free)
    assert (free.grammar, free.status) == (None, RequestStatus.WAITING)
    assert not manager.has_pending
    assert manager.totals is None
    assert compiler.submitted == []


def test_a_constraint_is_compiled_once_for_all_that_wait_and_kept() -> None:
    manager, compiler = make_manager()
    first, second, other = request(0, "a"), request(1, "a"), request(2, "b")
    for one in (first, second, other):
        manager.begin(one)
        assert one.status is RequestStatus.WAITING_FOR_GRAMMAR
    assert compiler.submitted == [key_of("a"), key_of("b")]
    assert manager.take() == []
    compiler.answer("a", num_bytes=40, duration_ns=7)
    assert manager.take() == [(first, None), (second, None)]
    assert first.grammar is not None
    assert first.grammar is not second.grammar, "each output has its own place in the grammar"
    later = request(3, "a")
    manager.begin(later)
    assert later.grammar is not None
    assert later.status is RequestStatus.WAITING
    assert manager.has_pending, "the other one still waits"
    totals = manager.totals
    assert (totals.num_hits, totals.num_misses, totals.compile_ns) == (1, 3, 7)
    assert (totals.num_cached, totals.num_bytes_cached) == (1, 40)


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    manager, compiler = make_manager(cache_bytes=100)

    def use(regex: str, num_bytes: int = 40) -> bool:
        """Whether it had to be compiled."""
        before = len(compiler.submitted)
        manager.begin(request(len(compiler.submitted) + 100, regex))
        if len(compiler.submitted) == before:
            return False
        compiler.answer(regex, num_bytes=num_bytes)
        ((_, failure),) = manager.take()
        assert failure is None
        return True

    assert use("a")
    assert use("b")
    assert not use("a")
    assert use("c")  # b goes
    assert not use("a")
    assert use("b")
    assert use("huge", num_bytes=101), "it serves its request"
    assert use("huge", num_bytes=101), "but is not kept"
    assert manager.totals.num_bytes_cached <= 100


@pytest.mark.parametrize(
    ("outcome", "kind", "is_kept"),
    [
        (GrammarOutcome.INVALID, ErrorKind.INPUT, True),
        (GrammarOutcome.TIMED_OUT, ErrorKind.INPUT, True),
        (GrammarOutcome.CRASHED, ErrorKind.INPUT, True),
        (GrammarOutcome.UNAVAILABLE, ErrorKind.ENGINE, False),
    ],
)
def test_a_failure_is_told_to_those_who_wait_and_to_later_ones(
    outcome: GrammarOutcome, kind: ErrorKind, is_kept: bool
) -> None:
    recorder = Recorder()
    manager, compiler = make_manager(obs=recorder)
    first, second = request(0, "z"), request(1, "z")
    manager.begin(first)
    manager.begin(second)
    compiler.answer("z", outcome, error="no good", duration_ns=5)
    told = manager.take()
    assert [one for one, _ in told] == [first, second]
    for _, failure in told:
        assert failure.kind is kind
        assert failure.error == "structured_outputs.regex cannot be used: no good"
    (event,) = [event for event in recorder.events if event.kind is Event.GRAMMAR_FAILED]
    assert (event.request_id, event.value) == ("r0", 5)
    assert event.detail.startswith(outcome.label)
    assert manager.totals.outcomes[outcome] == 1
    later = request(2, "z")
    manager.begin(later)
    assert (len(compiler.submitted) == 1) is is_kept, "a bad constraint must not cost time again"
    assert manager.has_pending
    assert bool(manager.take()) is is_kept


def test_who_is_aborted_while_waiting_hears_nothing_more() -> None:
    manager, compiler = make_manager()
    first, second = request(0, "a"), request(1, "a")
    for one in (first, second):
        manager.begin(one)
    first.status = RequestStatus.FINISHED
    manager.forget(first)
    assert compiler.withdrawn == []
    second.status = RequestStatus.FINISHED
    manager.forget(second)
    assert compiler.withdrawn == [key_of("a")], "nobody wants it any more"
    assert not manager.has_pending
    assert manager.totals.outcomes[GrammarOutcome.WITHDRAWN] == 1
    third = request(2, "a")
    manager.begin(third)
    assert compiler.submitted == [key_of("a")] * 2, "it is not remembered as a failure"
    compiler.answer("a")
    assert manager.take() == [(third, None)]
    assert sum(manager.totals.outcomes) == 2, "each asking has one outcome"


def test_what_is_done_before_it_could_be_withdrawn_is_kept_and_counted_once() -> None:
    manager, compiler = make_manager()
    gone, other, later = request(0, "a"), request(1, "b"), request(2, "a")
    manager.begin(gone)
    manager.begin(other)
    compiler.answer("a", num_bytes=5)
    gone.status = RequestStatus.FINISHED
    manager.forget(gone)
    assert manager.take() == []
    manager.begin(later)
    assert later.grammar is not None
    outcomes = manager.totals.outcomes
    assert (outcomes[GrammarOutcome.WITHDRAWN], outcomes[GrammarOutcome.COMPILED]) == (1, 0)


def test_a_steps_bitmask_has_a_row_for_each_request_that_is_still_there() -> None:
    manager, compiler = make_manager()
    requests = [request(num, regex) for num, regex in enumerate(("ab", "cd"))]
    for one, regex in zip(requests, ("ab", "cd"), strict=True):
        manager.begin(one)
        compiler.answer(regex)
    manager.take()
    output = manager.grammar_output([requests[0], None, requests[1]])
    assert output.req_ids == ["r0", "r1"]
    expected = [bits_of([ord(letter) % 64], VOCAB_SIZE) for letter in "ac"]
    np.testing.assert_array_equal(output.bitmask, expected)
    assert manager.grammar_output([None, None]) is None


# -- one output's way ------------------------------------------------------------------------------


def make_grammar(script: list[set[int]], **more: Any) -> tuple[Grammar, ScriptedMatcher]:
    matcher = ScriptedMatcher(script)
    return Grammar(matcher, end_mask_of([END], VOCAB_SIZE), **more), matcher


def mask_of(grammar: Grammar) -> set[int]:
    row = np.zeros(3, dtype=np.int32)
    grammar.write_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_it_is_over_when_only_an_end_may_come() -> None:
    grammar, matcher = make_grammar([{5}, {6, END}, {7}])
    assert mask_of(grammar) == {5}
    assert not grammar.is_over
    assert grammar.accept([5]) is None
    assert not grammar.is_over, "it may end here, and may go on"
    assert mask_of(grammar) == {6, END}
    assert matcher.num_fills == 2, "the mask that was made to find out serves the step"
    assert grammar.accept([6, 7]) is None
    assert grammar.is_over
    assert mask_of(grammar) == {END}


def test_with_ignore_eos_no_end_is_allowed_while_something_else_is() -> None:
    grammar, _ = make_grammar([{5}, {6, END}], ignore_eos=True)
    grammar.accept([5])
    assert mask_of(grammar) == {6}
    grammar.accept([6])
    assert grammar.is_over
    assert mask_of(grammar) == {END}


def test_bits_behind_the_vocabulary_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedMatcher, "padding", -1 << (VOCAB_SIZE % 32))
    grammar, _ = make_grammar([{5}])
    grammar.accept([5])
    assert grammar.is_over


@pytest.mark.parametrize("name", ["accept_token", "fill_next_token_bitmask"])
def test_what_the_library_raises_ends_this_request_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ScriptedMatcher, argument: Any) -> bool:
        raise RuntimeError("inside")

    monkeypatch.setattr(ScriptedMatcher, name, fail)
    grammar, _ = make_grammar([{5}, {6}])
    allowed = mask_of(grammar)
    assert allowed == ({5} if name == "accept_token" else set())
    assert "failed: inside" in str(grammar.accept([9 if not allowed else 5]))


def test_an_end_token_ends_it() -> None:
    grammar, matcher = make_grammar([{5}])
    grammar.accept([5])
    matcher.accept_token(END)
    assert grammar.is_over


def test_a_token_that_is_not_allowed_is_reported() -> None:
    grammar, _ = make_grammar([{5}])
    assert "token 9 was sampled" in str(grammar.accept([9]))


def test_a_grammar_that_takes_too_long_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, _ = make_grammar([{5}] * 9)
    monkeypatch.setattr(MatchTime, "is_too_long", property(lambda self: True))
    assert "too many ways" in str(grammar.accept([5]))


# -- the compiler, with a process that is none -----------------------------------------------------


class FakeProcess:
    """Stands for the other process; what a text says is what happens to it."""

    started: ClassVar[list["FakeProcess"]] = []
    vocabulary: ClassVar[Vocabulary | None] = Vocabulary(info="{}")
    """None for one that never comes up."""
    pid = 1

    def __init__(self, kwargs: dict[str, Any], *, wake: int) -> None:
        self.kwargs = kwargs
        self.wake = wake
        self.requests: list[tuple[int, str | None]] = []
        self.said: list[Vocabulary | CompileResult] = (
            [] if self.vocabulary is None else [self.vocabulary]
        )
        self.is_dead = False
        FakeProcess.started.append(self)

    def send(self, request: CompileRequest) -> None:
        text = None if request.key is None else request.key[1]
        self.requests.append((request.number, text))
        if text in ("die", "die once"):
            self.is_dead = text == "die" or len(FakeProcess.started) == 1
        if text == "bad":
            self.said.append(CompileResult(request.number, GrammarOutcome.INVALID, "no good", 3))
        elif text not in (None, "slow") and not self.is_dead:
            self.said.append(CompileResult(request.number, GrammarOutcome.COMPILED, "", 5, 10))

    def wait(self, timeout_s: float | None) -> Iterator[Vocabulary | CompileResult]:
        if self.is_dead:
            raise EOFError
        if not self.said:
            poller = select.poll()
            poller.register(self.wake, select.POLLIN)
            poller.poll(None if timeout_s is None else 1e3 * timeout_s)
            if self.is_dead:
                raise EOFError
        while self.said:
            yield self.said.pop(0)

    def interrupt(self) -> None:
        self.is_dead = True

    kill = interrupt

    def answer(self, number: int, **more: Any) -> None:
        """From the test's thread."""
        self.said.append(CompileResult(number, GrammarOutcome.COMPILED, **more))
        os.eventfd_write(self.wake, 1)

    def die(self) -> None:
        """At no constraint's hands."""
        self.is_dead = True
        os.eventfd_write(self.wake, 1)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCompiler]:
    FakeProcess.started = []
    monkeypatch.setattr(grammar_compiler, "GrammarProcess", FakeProcess)
    monkeypatch.setattr(
        grammar_compiler, "compile_constraint", lambda compiler, kind, text, **more: text.upper()
    )
    library = ModuleType("xgrammar")
    library.GrammarCompiler = lambda info, **more: object()  # type: ignore[attr-defined]
    library.CompiledGrammar = SimpleNamespace(  # type: ignore[attr-defined]
        deserialize_json=lambda text, info: text.removeprefix("written ")
    )
    monkeypatch.setitem(sys.modules, "xgrammar", library)
    made = GrammarCompiler({}, timeout_s=0.5)
    made._info = object()
    yield made
    made.close()
    assert all(one.is_dead for one in FakeProcess.started)


def results(compiler: GrammarCompiler, num: int) -> list[Compiled]:
    found: list[Compiled] = []

    def are_there() -> bool:
        found.extend(compiler.take())
        if len(found) < num:
            compiler.wait(0.1)
        return len(found) >= num

    wait_until(are_there, f"not {num} results")
    return found


def test_results_are_what_the_process_says_with_the_grammar_made_here(
    compiler: GrammarCompiler,
) -> None:
    for text in ("good", "bad"):
        compiler.submit(key_of(text))
    good, bad = results(compiler, 2)
    assert (good.key, good.outcome, good.grammar) == (
        key_of("good"),
        GrammarOutcome.COMPILED,
        "GOOD",
    )
    assert good.duration_ns > 5
    assert (bad.outcome, bad.error, bad.grammar) == (GrammarOutcome.INVALID, "no good", None)
    (process,) = FakeProcess.started
    assert process.kwargs == {"timeout_s": 0.5, "is_background": False}


def test_what_takes_long_to_take_over_is_in_nobodys_way(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def compile_slowly(compiler: Any, kind: str, text: str, **more: Any) -> str:
        assert text != "slow" or gate.wait(PATIENCE_S)
        return text.upper()

    monkeypatch.setattr(grammar_compiler, "compile_constraint", compile_slowly)
    for kind in ("regex", "grammar"):
        compiler.submit((kind, "slow", False))
    compiler.submit(key_of("good"))
    wait_until(lambda: bool(FakeProcess.started) and len(FakeProcess.started[0].requests) == 3)
    process = FakeProcess.started[0]
    assert [one.grammar for one in results(compiler, 1)] == ["GOOD"]
    process.answer(1, compile_ns=QUICK_NS + 1)
    process.answer(2, compile_ns=QUICK_NS + 1, grammar="written slow")
    compiler.submit(key_of("quick"))
    assert [one.grammar for one in results(compiler, 1)] == ["QUICK"]
    gate.set()
    assert [one.grammar for one in results(compiler, 2)] == ["SLOW", "slow"]


def test_a_process_that_dies_is_started_again_and_once(compiler: GrammarCompiler) -> None:
    compiler.submit(key_of("die once"))
    compiler.submit(key_of("good"))
    assert {one.outcome for one in results(compiler, 2)} == {GrammarOutcome.COMPILED}
    assert len(FakeProcess.started) == 2
    compiler.submit(key_of("die"))
    (result,) = results(compiler, 1)
    assert result.outcome is GrammarOutcome.UNAVAILABLE, "a child tries it out: it is not to blame"
    assert "their process died" in result.error
    assert len(FakeProcess.started) == 3
    compiler.submit(key_of("good"))
    assert results(compiler, 1)[0].outcome is GrammarOutcome.COMPILED


def test_a_second_death_costs_only_those_their_grammar_that_have_had_two_tries(
    compiler: GrammarCompiler,
) -> None:
    started = FakeProcess.started
    compiler.submit(("regex", "slow", False))
    wait_until(lambda: bool(started) and len(started[0].requests) == 1)
    started[0].die()
    wait_until(lambda: len(started) == 2 and len(started[1].requests) == 1)
    compiler.submit(("grammar", "slow", False))
    wait_until(lambda: len(started[1].requests) == 2)
    started[1].die()
    (given_up,) = results(compiler, 1)
    assert (given_up.key[0], given_up.outcome) == ("regex", GrammarOutcome.UNAVAILABLE)
    wait_until(lambda: len(started) == 3 and started[2].requests == [(2, "slow")])
    started[2].answer(2)
    (result,) = results(compiler, 1)
    assert (result.key[0], result.outcome) == ("grammar", GrammarOutcome.COMPILED)
    assert not compiler._wanted
    assert not compiler._numbers


def test_a_compiler_that_cannot_be_made_leaves_no_large_grammar_waiting(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(info: Any, **more: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(sys.modules["xgrammar"], "GrammarCompiler", fail)
    for number, kind in enumerate(("regex", "grammar"), 1):
        compiler.submit((kind, "slow", False))
        wait_until(lambda n=number: bool(FakeProcess.started) and compiler._last_number == n)
        wait_until(lambda n=number: len(FakeProcess.started[0].requests) == n)
        FakeProcess.started[0].answer(number, compile_ns=QUICK_NS + 1)
        (result,) = results(compiler, 1)
        assert (result.outcome, result.error) == (GrammarOutcome.UNAVAILABLE, "MemoryError()")


def test_a_process_with_thousands_of_open_files_gets_its_grammars(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("no process may have that many here")
    eventfd = os.eventfd

    def high_eventfd(*arguments: int) -> int:
        low = eventfd(*arguments)
        try:
            return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1500)
        finally:
            os.close(low)

    monkeypatch.setattr(os, "eventfd", high_eventfd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        for text in ("good", "better"):
            compiler.submit(key_of(text))
            assert results(compiler, 1)[0].outcome is GrammarOutcome.COMPILED
        assert compiler._wake >= 1500
        assert len(FakeProcess.started) == 1, "it did not have to start again"
        compiler.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_says_nothing_is_given_up(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler._silence_s = 0.05
    compiler.submit(key_of("slow"))
    (result,) = results(compiler, 1)
    assert result.outcome is GrammarOutcome.UNAVAILABLE
    assert len(FakeProcess.started) == 2, "one that merely hung may do better the second time"
    monkeypatch.setattr(FakeProcess, "vocabulary", None)
    monkeypatch.setattr(grammar_compiler, "_START_TIMEOUT_S", 0.05)
    compiler.submit(key_of("good"))
    assert "did not start" in results(compiler, 1)[0].error
    assert len(FakeProcess.started) == 3


def test_what_is_withdrawn_is_told_to_the_process_and_compiled_when_it_is_wanted_again(
    compiler: GrammarCompiler,
) -> None:
    compiler.submit(key_of("slow"))
    wait_until(lambda: bool(FakeProcess.started and FakeProcess.started[0].requests))
    process = FakeProcess.started[0]
    compiler.withdraw(key_of("slow"))
    compiler.withdraw(key_of("never wanted"))
    compiler.submit(key_of("slow"))
    wait_until(lambda: len(process.requests) == 3)
    assert process.requests == [(1, "slow"), (1, None), (2, "slow")]
    process.answer(1)  # it was on its way when it was withdrawn
    process.answer(2)
    assert [one.outcome for one in results(compiler, 1)] == [GrammarOutcome.COMPILED]
    compiler.submit(key_of("last"))
    assert [one.key for one in results(compiler, 1)] == [key_of("last")]
    assert not compiler._wanted
    assert not compiler._numbers
    assert len(FakeProcess.started) == 1


def test_what_is_withdrawn_before_the_process_is_up_is_never_asked(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProcess, "vocabulary", None)
    for text in ("unwanted", "wanted"):
        compiler.submit(key_of(text))
    compiler.withdraw(key_of("unwanted"))
    wait_until(lambda: compiler._last_number == 2 and len(compiler._wanted) == 1)
    (process,) = FakeProcess.started
    process.said.append(Vocabulary(info="{}"))
    os.eventfd_write(process.wake, 1)
    assert [one.key[1] for one in results(compiler, 1)] == ["wanted"]
    assert process.requests == [(2, "wanted")]


def test_warming_up_starts_a_process_in_the_background_that_the_first_constraint_finds(
    compiler: GrammarCompiler,
) -> None:
    compiler.warm_up()
    wait_until(lambda: bool(FakeProcess.started))
    wait_until(lambda: compiler._is_ready)
    compiler.warm_up()
    compiler.submit(key_of("good"))
    assert results(compiler, 1)[0].outcome is GrammarOutcome.COMPILED
    (process,) = FakeProcess.started
    assert process.kwargs["is_background"] is True


def test_an_unusable_tokenizer_is_the_engines_fault(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProcess, "vocabulary", Vocabulary(failure="TokenizerError: none"))
    compiler.submit(key_of("good"))
    (result,) = results(compiler, 1)
    assert result.outcome is GrammarOutcome.UNAVAILABLE
    assert "structured outputs are not available: TokenizerError: none" in result.error


def test_a_failure_of_the_thread_leaves_nobody_waiting(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(kwargs: dict[str, Any], *, wake: int) -> FakeProcess:
        raise OSError("no memory")

    monkeypatch.setattr(grammar_compiler, "GrammarProcess", fail)
    compiler.submit(key_of("good"))
    (result,) = results(compiler, 1)
    assert result.outcome is GrammarOutcome.UNAVAILABLE
    assert "not available: OSError('no memory')" in result.error
    monkeypatch.setattr(grammar_compiler, "GrammarProcess", FakeProcess)
    compiler.submit(key_of("good"))
    assert results(compiler, 1)[0].outcome is GrammarOutcome.COMPILED


def test_totals_that_lack_an_outcome_are_not_shown_as_if_they_were_all() -> None:
    metrics = Metrics()
    metrics.structured_outputs.observe_totals(GrammarTotals(0, 1, 0, (1,), 1, 7))
    with pytest.raises(ValueError, match="zip"):
        metrics.snapshot()


def test_counts_are_made_anew_only_when_one_has_changed() -> None:
    manager, compiler = make_manager()
    manager.begin(request(0, "a"))
    first = manager.totals
    assert manager.totals is first
    assert first.num_misses == 1
    compiler.answer("a", num_bytes=7)
    manager.take()
    settled = manager.totals
    assert (settled.num_cached, settled.num_bytes_cached) == (1, 7)
    assert manager.totals is settled
    manager.begin(request(1, "a"))
    assert manager.totals.num_hits == 1
