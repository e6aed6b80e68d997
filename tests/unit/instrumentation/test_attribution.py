"""Attribution: shares that add up, why a request waited, and what made it late."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrumentation import (
    Admission,
    AdmissionStop,
    ObservabilityConfig,
    Preemption,
    PrefixMiss,
    RequestTimeline,
    StepHistory,
    StepRecord,
    WorkerStepRecord,
    report_request,
    slo_misses,
)
from instrumentation.explain.attribution import (
    EQUAL_COST_CONTEXT,
    Contexts,
    attribute,
    cost_by_request,
    share_step,
    split,
)
from instrumentation.explain.request_report import HEAD_OF_LINE

MS = 1_000_000


def keep(
    history: StepHistory,
    step: int,
    begin_ms: float,
    end_ms: float,
    *,
    scheduled: tuple[int, ...] = (1, 1),
    is_mixed: bool = False,
    **fields: object,
) -> None:
    """One step whose worker ran from begin to end."""
    label = {"num_generation_requests": 1, "num_generation_tokens": 1}
    if is_mixed:
        label |= {"num_context_requests": 1, "num_context_tokens": 8}
    begin_ns, end_ns = round(begin_ms * MS), round(end_ms * MS)
    history.observe(
        StepRecord(
            step=step, begin_ns=begin_ns, end_ns=end_ns, scheduled=scheduled, **label, **fields
        ),
        WorkerStepRecord(step=step, begin_ns=begin_ns, end_ns=end_ns, **label),
    )


def timeline(**fields: object) -> RequestTimeline:
    defaults = {"request_id": "a", "request_num": 1, "finish_reason": "length", "preemptions": []}
    return RequestTimeline(**(defaults | fields))


# Shares.


@given(
    total=st.integers(0, 10**12),
    weights=st.lists(st.integers(0, 10**9), min_size=1, max_size=40),
)
def test_split_adds_up_and_is_proportional(total: int, weights: list[int]) -> None:
    parts = split(total, weights)
    assert sum(parts) == total
    whole = sum(weights) or len(weights)
    for part, weight in zip(parts, weights if any(weights) else [1] * len(weights), strict=True):
        assert abs(part - total * weight / whole) < 1 + 1e-3


def test_split_gives_the_rest_to_the_largest_remainders() -> None:
    assert split(10, [1, 1, 1]) == [4, 3, 3]
    assert split(11, [1, 2, 2]) == [2, 5, 4]
    assert split(5, [0, 0]) == [3, 2]
    assert split(5, []) == []


def test_weights_grow_with_tokens_and_context() -> None:
    durations = [
        share.duration_ns
        for share in share_step([(1, 1, 0), (2, 1, EQUAL_COST_CONTEXT), (3, 2, 0)], 1_000_000)
    ]
    one, long, two = durations
    assert sum(durations) == 1_000_000
    assert long == pytest.approx(2 * one, abs=2)
    assert two == pytest.approx(2 * one, rel=0.001)


def test_contexts_follow_admissions_chunks_and_preemptions() -> None:
    contexts = Contexts()

    def advance(**fields: object) -> list[tuple[int, int, int]]:
        return contexts.advance(StepRecord(step=1, begin_ns=0, end_ns=1, **fields))

    hit = Admission(7, 40, 16, False, PrefixMiss.NEVER_CACHED)
    assert advance(admissions=(hit,), scheduled=(7, 20)) == [(7, 20, 16)]
    assert advance(scheduled=(7, 4, 8, 1)) == [(7, 4, 36), (8, 1, 0)]
    assert advance(preempted=(Preemption(7, 3, 40, 8),), scheduled=(8, 1)) == [(8, 1, 1)]
    again = Admission(7, 41, 32, True, PrefixMiss.EVICTED)
    assert advance(admissions=(again,), scheduled=(7, 9), finished=(7,)) == [(7, 9, 32)]
    assert advance(scheduled=(7, 1)) == [(7, 1, 0)], "the number of an ended request"


@pytest.mark.parametrize("seed", range(5))
def test_costs_add_up_to_the_steps(seed: int) -> None:
    chance = random.Random(seed)
    history = StepHistory()
    for step in range(1, 200):
        nums = chance.sample(range(50), chance.randint(1, 20))
        scheduled = tuple(n for num in nums for n in (num, chance.randint(1, 300)))
        begin_ms = step * 10
        keep(history, step, begin_ms, begin_ms + chance.random() * 10, scheduled=scheduled)
    steps = history.steps()
    for one, shares in attribute(steps):
        assert sum(share.duration_ns for share in shares) == one.duration_ns
        assert all(share.duration_ns >= 0 for share in shares)
    assert sum(cost_by_request(steps).values()) == sum(one.duration_ns for one in steps)


# Memory.


def test_history_is_bounded() -> None:
    history = StepHistory(num_steps=10, num_requests=3)
    for step in range(1, 100):
        keep(history, step, step, step + 1)
        history.add(timeline(request_id=str(step), request_num=step))
    assert [one.step.step for one in history.steps()] == list(range(90, 100))
    assert [one.request_id for one in history.finished_requests()] == ["97", "98", "99"]
    assert history.finished("5") is None
    history.add(timeline(request_id="98", request_num=500))
    assert history.finished("98").request_num == 500


def test_a_worker_record_that_never_came_leaves_the_cores_times() -> None:
    history = StepHistory()
    history.observe(StepRecord(step=1, begin_ns=5, end_ns=12, scheduled=(1, 1)), None)
    [one] = history.steps()
    assert one.duration_ns == 7


# A request explained.


def test_a_report_says_why_the_request_waited_and_who_threw_it_out() -> None:
    history = StepHistory()
    queue = {"admission_stop": AdmissionStop.MAX_NUM_SEQS}
    keep(history, 1, 10, 20, scheduled=(9, 4), admission_stop_request_num=8, **queue)
    keep(history, 2, 20, 30, scheduled=(9, 1), admission_stop_request_num=8, **queue)
    keep(history, 3, 30, 40, scheduled=(9, 1), admission_stop_request_num=1, **queue)
    admitted = Admission(1, 12, 4, False, PrefixMiss.NEVER_CACHED)
    keep(history, 4, 40, 50, scheduled=(9, 1, 1, 8), admissions=(admitted,))
    keep(
        history,
        5,
        50,
        60,
        scheduled=(9, 1),
        preempted=(Preemption(1, 2, 12, 9),),
        admission_stop=AdmissionStop.AFTER_PREEMPTION,
    )
    resumed = Admission(1, 13, 8, True, PrefixMiss.EVICTED, 3 * MS)
    keep(history, 6, 60, 70, scheduled=(1, 5), admissions=(resumed,), finished=(1,))
    history.add(timeline(request_id="other", request_num=9))
    life = timeline(
        arrival_ns=5 * MS,
        queued_ns=6 * MS,
        first_scheduled_ns=40 * MS,
        first_token_ns=50 * MS,
        last_token_ns=70 * MS,
        preemptions=[(50 * MS, 60 * MS)],
        num_prompt_tokens=12,
        num_cached_tokens=4,
        num_generation_tokens=2,
    )
    report = report_request(life, history)
    assert [(wait.cause, wait.first_step, wait.last_step) for wait in report.waits] == [
        (HEAD_OF_LINE, 1, 2),
        ("max_num_seqs", 3, 3),
        ("after_preemption", 5, 5),
    ]
    # They add up to the time in the waiting queue.
    num_waited = sum(wait.end_ns - wait.begin_ns for wait in report.waits)
    assert num_waited == life.queue_ns - life.intake_ns + life.preempted_ns
    [preemption] = report.preemptions
    assert (preemption.by_request_num, preemption.by_request_id) == (9, "other")
    assert preemption.num_tokens_lost == 12
    assert preemption.num_recomputed_tokens == 12 - 8
    assert preemption.resumed_ns == 60 * MS
    assert [(step.step, step.num_tokens, step.num_context_tokens) for step in report.steps] == [
        (4, 8, 4),
        (6, 5, 8),
    ]
    assert report.steps[1].share_ns == 10 * MS, "it had the step for itself"
    assert report.cost_ns == sum(step.share_ns for step in report.steps)
    assert report.admissions == (admitted, resumed)
    assert report.is_finished
    assert report.is_complete
    text = str(report)
    for part in (
        "request a (length)",
        "queue 35.000 ms + prefill 10.000 ms + decode 10.000 ms + preempted 10.000 ms",
        "waited 24.000 ms (steps 1 to 2): head_of_line",
        "preempted in step 5 for request other: 12 tokens lost, 4 recomputed",
        "1.000 ms until the core queued it: checking, tokenising, transport\n",
        "4 of 12 tokens; the next block was never cached",
        "8 of 13 tokens; the next block was evicted, 3.000 ms before",
    ):
        assert part in text, part


def test_who_waits_for_its_grammar_is_not_said_to_wait_for_others() -> None:
    history = StepHistory()
    queue = {"admission_stop": AdmissionStop.MAX_NUM_SEQS, "admission_stop_request_num": 8}
    keep(history, 1, 10, 20, scheduled=(9, 1), waiting_by_reason=(1, 0, 2), **queue)
    keep(history, 2, 20, 30, scheduled=(9, 1), waiting_by_reason=(2, 0, 1), **queue)
    keep(history, 3, 30, 40, scheduled=(9, 1), waiting_by_reason=(3, 0, 0), **queue)
    life = {"arrival_ns": 5 * MS, "queued_ns": 10 * MS, "finish_reason": None}
    for ready_ns, steps in ((18 * MS, [1, 2]), (40 * MS, [1, 3])):
        # The second is as far as the frontend knows: that nobody waits for any tells it more.
        report = report_request(
            timeline(delivered_ns=40 * MS, grammar_ready_ns=ready_ns, **life), history
        )
        causes = [(wait.cause, wait.first_step) for wait in report.waits]
        assert causes == list(zip(("grammar", HEAD_OF_LINE), steps, strict=True))
    never = report_request(timeline(delivered_ns=40 * MS, **life), history)
    assert [wait.cause for wait in never.waits] == [HEAD_OF_LINE]


@pytest.mark.parametrize("grammar_ready_ns", [0, 39 * MS])
def test_a_report_leaves_no_queue_time_without_a_cause(grammar_ready_ns: int) -> None:
    history = StepHistory()
    keep(history, 1, 1, 20, scheduled=(9, 1))
    keep(history, 2, 20, 30, scheduled=(9, 1))
    short = Admission(1, 12, 0, False, PrefixMiss.PARTIAL_BLOCK)
    keep(history, 3, 40, 50, scheduled=(1, 12), admissions=(short,))
    life = timeline(
        arrival_ns=5 * MS,
        queued_ns=30 * MS,
        first_scheduled_ns=40 * MS,
        last_token_ns=50 * MS,
        grammar_ready_ns=grammar_ready_ns,
    )
    report = report_request(life, history)
    assert report.intake_step == 2
    assert report.waits == ()
    text = str(report)
    assert "25.000 ms until the core queued it: checking, tokenising, transport, and" in text
    assert "and the end of step 2" in text
    what = "its grammar was compiled" if grammar_ready_ns else "the next step was planned"
    assert f"10.000 ms until {what}" in text
    assert "0 of 12 tokens; the rest fills no block before the last token" in text
    assert "partial_block" not in text


def test_a_report_of_a_request_under_way() -> None:
    history = StepHistory()
    keep(
        history,
        1,
        10,
        20,
        scheduled=(1, 64),
        admissions=(Admission(1, 90, 0, False, PrefixMiss.NEVER_CACHED),),
    )
    life = timeline(arrival_ns=4 * MS, delivered_ns=25 * MS, finish_reason=None)
    report = report_request(life, history, {9: "other"})
    assert not report.is_finished
    assert report.timeline.first_scheduled_ns == 10 * MS
    assert report.timeline.queue_ns == 6 * MS
    assert report.timeline.e2e_ns == 21 * MS
    assert "unfinished" in str(report)


def test_long_reports_leave_the_middle_out_and_say_what_is_forgotten() -> None:
    history = StepHistory(num_steps=100)
    for step in range(1, 151):
        keep(history, step, step, step + 1)
    life = timeline(first_scheduled_ns=1 * MS, first_token_ns=2 * MS, last_token_ns=151 * MS)
    report = report_request(life, history)
    assert not report.is_complete
    assert len(report.steps) == 100
    assert "(60 steps left out)" in str(report)
    assert "forgotten" in str(report)


# Objectives.

CONFIG = ObservabilityConfig(slo_ttft_s=0.050, slo_itl_s=0.010)


def causes(life: RequestTimeline, history: StepHistory) -> list[tuple[str, str]]:
    return [(str(one), str(cause)) for one, cause in slo_misses(life, history, CONFIG)]


def life_of(*, scheduled_ms: float, first_ms: float, last_ms: float, **rest: object):
    return timeline(
        arrival_ns=1,
        first_scheduled_ns=round(scheduled_ms * MS),
        first_token_ns=round(first_ms * MS),
        last_token_ns=round(last_ms * MS),
        num_generation_tokens=5,
        **rest,
    )


def test_no_objective_and_no_miss() -> None:
    life = life_of(scheduled_ms=900, first_ms=1000, last_ms=5000)
    assert slo_misses(life, StepHistory(), ObservabilityConfig()) == []
    assert causes(life_of(scheduled_ms=10, first_ms=20, last_ms=40), StepHistory()) == []


def test_late_first_tokens_by_cause() -> None:
    history = StepHistory()
    keep(history, 1, 10, 95)
    queued = life_of(scheduled_ms=60, first_ms=95, last_ms=96)
    assert causes(queued, history) == [("ttft", "queue")]
    computed = life_of(scheduled_ms=10, first_ms=95, last_ms=96)
    assert causes(computed, history) == [("ttft", "prefill")]
    thrown_out = life_of(scheduled_ms=10, first_ms=95, last_ms=96, preemptions=[(20 * MS, 85 * MS)])
    assert causes(thrown_out, history) == [("ttft", "preemption")]
    evicted = Admission(1, 9, 0, False, PrefixMiss.EVICTED)
    history = StepHistory()
    keep(history, 1, 10, 95, admissions=(evicted,))
    assert causes(computed, history) == [("ttft", "cache_miss")]
    history = StepHistory()
    keep(history, 1, 10, 20)
    keep(history, 2, 85, 95)
    assert causes(computed, history) == [("ttft", "host_gap")]


def test_a_request_without_any_token_misses_its_first() -> None:
    given_up = timeline(arrival_ns=1, delivered_ns=90 * MS, finish_reason="abort")
    assert causes(given_up, StepHistory()) == [("ttft", "queue")]


def test_slow_tokens_by_cause() -> None:
    life = life_of(scheduled_ms=1, first_ms=10, last_ms=110)
    history = StepHistory()
    for step in range(5):
        keep(history, step + 1, 10 + 20 * step, 30 + 20 * step)
    assert causes(life, history) == [("itl", "decode")]
    history = StepHistory()
    for step in range(5):
        keep(history, step + 1, 10 + 20 * step, 12 + 20 * step)
    assert causes(life, history) == [("itl", "host_gap")]
    history = StepHistory()
    keep(history, 1, 2, 4)
    keep(history, 2, 10, 60, is_mixed=True)
    keep(history, 3, 60, 110, is_mixed=True)
    assert causes(life, history) == [("itl", "prefill_interference")]
    history = StepHistory()
    keep(history, 1, 10, 30, is_mixed=True, scheduled=(2, 8))
    keep(history, 2, 30, 110)
    thrown_out = life_of(
        scheduled_ms=1, first_ms=10, last_ms=110, preemptions=[(15 * MS, 100 * MS)]
    )
    assert causes(thrown_out, history) == [("itl", "preemption")]
