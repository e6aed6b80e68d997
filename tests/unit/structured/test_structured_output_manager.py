"""Grammars for requests: shared, kept, refused, given up; and how far each output has got."""

import ctypes
from typing import Any

import numpy as np
import pytest

from engine.core.request import Request, RequestStatus
from engine.structured.compiler import Compiled, ConstraintCompiler
from engine.structured.constraint import ConstraintKey
from engine.structured.manager import StructuredOutputManager
from engine.structured.matching import Grammar, MatchTime, bits_of, end_mask_of
from engine.types.messages import ErrorKind
from instrumentation import Event, GrammarOutcome, GrammarTotals, Metrics
from instrumentation.testing import Recorder
from tests.fakes import make_request, sampling_params

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

    def consume_token(self, token_id: int) -> bool:
        if self.position == len(self.script):
            self.ended = token_id == END
            return self.ended
        accepted = token_id in self.script[self.position]
        self.position += accepted
        return accepted

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self.num_fills += 1
        rest = self.script[self.position :]
        # A step that may be skipped has the end token among its tokens.
        mask = bits_of(sorted(rest[0]) if rest else [END], VOCAB_SIZE)
        mask[-1] |= self.padding
        ctypes.memmove(address, mask.ctypes.data, num_bytes)

    def compute_ff_bytes(self) -> bytes:
        rest = self.script[self.position :]
        return b"x" if rest and len(rest[0]) == 1 else b""

    def is_error(self) -> bool:
        return False

    def deep_copy(self) -> "ScriptedMatcher":
        return ScriptedMatcher(self.script)

    def is_accepting(self) -> bool:
        rest = self.script[self.position :]
        return not rest or END in rest[0]

    def is_stopped(self) -> bool:
        return self.ended


class FakeCompiler(ConstraintCompiler):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda: None, timeout_s=1.0)  # type: ignore[arg-type,return-value]
        self.submitted: list[ConstraintKey] = []
        self.withdrawn: list[ConstraintKey] = []
        self.results: list[Compiled] = []

    def submit(self, key: ConstraintKey) -> None:
        self.submitted.append(key)

    def withdraw(self, key: ConstraintKey) -> None:
        self.withdrawn.append(key)

    def take(self) -> list[Compiled]:
        results, self.results = self.results, []
        return results

    def answer(
        self, regex: str, outcome: GrammarOutcome = GrammarOutcome.COMPILED, **more: Any
    ) -> None:
        self.results.append(Compiled(key_of(regex), outcome, matcher_of(regex), **more))


def matcher_of(regex: str) -> ScriptedMatcher:
    return ScriptedMatcher([{ord(letter) % 64} for letter in regex])


def key_of(regex: str) -> ConstraintKey:
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
    )
    return manager, compiler


# -- the manager -----------------------------------------------------------------------------------


def test_requests_without_a_constraint_are_left_alone() -> None:
    manager, compiler = make_manager()
    free = request(0, None)
    assert manager.begin(free)
    assert (free.grammar, free.status) == (None, RequestStatus.WAITING)
    assert not manager.has_pending
    assert manager.totals is None
    assert compiler.submitted == []


def test_a_constraint_is_compiled_once_for_all_that_wait_and_kept() -> None:
    manager, compiler = make_manager()
    first, second, other = request(0, "a"), request(1, "a"), request(2, "b")
    for one in (first, second, other):
        assert not manager.begin(one), "it has to wait"
    assert compiler.submitted == [key_of("a"), key_of("b")]
    assert manager.take() == []
    compiler.answer("a", num_bytes=40, duration_ns=7)
    assert manager.take() == [(first, None), (second, None)]
    assert first.grammar is not None
    assert first.grammar is not second.grammar, "each output has its own place in the grammar"
    later = request(3, "a")
    manager.begin(later)
    assert later.grammar is not None
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


@pytest.mark.parametrize("name", ["consume_token", "unsafe_compute_mask_ptr"])
def test_what_the_library_raises_ends_this_request_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ScriptedMatcher, *arguments: Any) -> bool:
        raise RuntimeError("inside")

    monkeypatch.setattr(ScriptedMatcher, name, fail)
    grammar, _ = make_grammar([{5}, {6}])
    allowed = mask_of(grammar)
    assert allowed == ({5} if name == "consume_token" else set())
    assert "failed: inside" in str(grammar.accept([9 if not allowed else 5]))


def test_an_end_token_ends_it() -> None:
    grammar, matcher = make_grammar([{5}])
    grammar.accept([5])
    matcher.consume_token(END)
    assert grammar.is_over


def test_a_token_that_is_not_allowed_is_reported() -> None:
    grammar, _ = make_grammar([{5}])
    assert "token 9 was sampled" in str(grammar.accept([9]))


def test_a_grammar_that_takes_too_long_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, _ = make_grammar([{5}] * 9)
    monkeypatch.setattr(MatchTime, "is_too_long", property(lambda self: True))
    assert "too many ways" in str(grammar.accept([5]))


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


def test_forced_tokens_are_counted_where_a_step_samples_them() -> None:
    manager, _ = make_manager()
    free, forced = request(0, "ab"), request(1, "cd")
    for one, script in ((free, [{5, 6}, {7}]), (forced, [{5}, {6, 7}])):
        manager.begin(one)
        one.grammar, _ = make_grammar(script)
    manager.grammar_output([free, forced, None])
    assert manager.totals.num_forced == 1
    for one in (free, forced):
        assert one.grammar.accept([5]) is None
    manager.grammar_output([free, forced])
    assert manager.totals.num_forced == 2
    metrics = Metrics()
    metrics.structured_outputs.observe_totals(manager.totals)
    name = "isinglass_structured_output_forced_tokens_total"
    assert [one.value for one in metrics.snapshot() if one.name == name] == [2]
