"""A real run, recorded: what the journals and every view of them say is what happened."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine import LLM, RequestOutput, SamplingParams
from instrumentation import Phase, RequestTimeline
from instrumentation.labels import format_step_label
from instrumentation.names import PHASES, STARTUP_PHASES
from tests.integration.conftest import SMALL
from tests.support.measures import counter
from tests.support.perfetto_files import load
from tests.support.reference import random_prompts
from tests.tiny_models import VOCAB_SIZE
from traces.journal_reader import Run, read_run
from traces.perfetto import write_perfetto
from traces.request_slices import request_slices
from traces.requests import scheduled_pairs
from traces.summary import summarize

PARAMS = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
DRAWN = SamplingParams(n=3, temperature=1.2, seed=3, max_tokens=9)


@dataclass(frozen=True)
class Recorded:
    """A run and what its caller got."""

    run: Run
    outputs: list[RequestOutput]
    num_preemptions: int
    is_async: bool


NOT_IN_THIS_RUN = {Phase.GRAMMAR_BITMASK}
"""Structured outputs need a tokenizer; `test_structured_outputs` has them."""


def generate(llm: LLM) -> list[RequestOutput]:
    """Prefix hits, chunks, preemptions, several sequences: something of everything."""
    prompts = random_prompts(50, [40, 3, 61, 90, 17, 52], VOCAB_SIZE)
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    outputs += llm.generate(prompts[2:4], DRAWN, use_tqdm=False)
    return outputs + llm.generate(prompts[2:3], PARAMS, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def settings(is_async: bool) -> dict[str, object]:
    return SMALL | {
        "skip_tokenizer_init": True,
        "async_scheduling": is_async,
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 14,
        "max_model_len": 200,
    }


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def recorded(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    folder = tmp_path_factory.mktemp("runs")
    with LLM(tiny_llama, trace_dir=folder, **settings(request.param)) as llm:
        outputs = generate(llm)
        num_preemptions = int(counter(llm, "isinglass_preemptions_total"))
    assert llm.run_dir is not None
    return Recorded(read_run(llm.run_dir), outputs, num_preemptions, request.param)


def test_tokens_are_the_same_without_tracing(recorded: Recorded, tiny_llama: Path) -> None:
    with LLM(tiny_llama, disable_log_stats=True, **settings(recorded.is_async)) as llm:
        assert llm.run_dir is None
        assert tokens(generate(llm)) == tokens(recorded.outputs)


def test_every_phase_fires_in_its_thread(recorded: Recorded) -> None:
    seen: dict[Phase, set[str]] = {}
    for _, thread in recorded.run.threads():
        for span in thread.phase_spans():
            assert 0 < span.begin_ns <= span.end_ns
            seen.setdefault(span.phase, set()).add(thread.name)
    assert seen == {
        phase: {str(info.thread)} for phase, info in PHASES.items() if phase not in NOT_IN_THIS_RUN
    }
    startups = Counter((startup.phase) for startup in recorded.run.startups)
    assert startups == Counter(dict.fromkeys(STARTUP_PHASES, 1))
    assert [process.header.role for process in recorded.run.processes].count("core") == 1
    assert not any(process.is_truncated for process in recorded.run.processes)
    assert sum(process.num_dropped for process in recorded.run.processes) == 0


def test_steps_tell_what_was_computed_and_delivered(recorded: Recorded) -> None:
    steps, outputs = recorded.run.steps, recorded.outputs
    delivered = sum(len(one) for one in tokens(outputs))
    assert sum(step.num_sampled_tokens for step in steps) == delivered
    assert sorted(step.step for step in steps) == list(range(1, len(steps) + 1))
    num_sequences = sum(len(output.outputs) for output in outputs)
    assert sum(len(step.first_tokens) for step in steps) == num_sequences
    assert sum(len(step.finished) for step in steps) == num_sequences
    assert sum(step.num_preempted for step in steps) == recorded.num_preemptions > 0
    for step in steps:
        pairs = dict(scheduled_pairs(step))
        assert len(pairs) == step.num_scheduled_requests
        assert sum(pairs.values()) == step.num_scheduled_tokens <= 48
        assert step.token_budget_left == 48 - step.num_scheduled_tokens
        blocks = step.num_blocks_used + step.num_blocks_cached_free + step.num_blocks_free
        assert blocks == sum(step.blocks_at_end) == 14
        assert sum(step.waiting_by_reason) == step.num_waiting
    # Each prompt token is either found in the cache or computed; so is each output token but the
    # last of a sequence, which nobody needs. Preemptions cost what they lost, less what came back.
    computed = sum(step.num_scheduled_tokens for step in steps)
    hits = sum(step.prefix_hit_tokens + step.preempted_prefix_hit_tokens for step in steps)
    lost = sum(one.tokens_lost for step in steps for one in step.preempted)
    prompt = sum(len(output.prompt_token_ids) * len(output.outputs) for output in outputs)
    surplus = computed + hits - lost - (prompt + delivered - num_sequences)
    ended_early = sum(one.finish_reason == "stop" for out in outputs for one in out.outputs)
    # A step in flight may compute one token more of a sequence that has just stopped.
    assert 0 <= surplus <= (ended_early if recorded.is_async else 0)


def test_worker_steps_are_the_cores(recorded: Recorded) -> None:
    run = recorded.run
    assert [step.step for step in run.worker_steps] == sorted(step.step for step in run.steps)
    labels = {step.step: step.label for step in run.steps}
    by_core = {step.step: step for step in run.steps}
    for worker_step in run.worker_steps:
        assert worker_step.label == labels[worker_step.step]
        core = by_core[worker_step.step]
        assert core.begin_ns <= worker_step.begin_ns <= worker_step.end_ns <= core.end_ns
    overlaps = any(a.end_ns > b.begin_ns for a, b in zip(run.steps, run.steps[1:], strict=False))
    assert overlaps == recorded.is_async


def test_time_lines_add_up(recorded: Recorded) -> None:
    timelines = recorded.run.timelines
    completions = [one for output in recorded.outputs for one in output.outputs]
    assert len(timelines) == len(completions)
    by_id = {timeline.request_id: timeline for timeline in timelines}
    num_preempted = 0
    for output in recorded.outputs:
        for one in output.outputs:
            is_alone = len(output.outputs) == 1
            timeline = by_id[output.request_id if is_alone else f"{output.request_id}/{one.index}"]
            assert timeline == one.metrics
            assert isinstance(timeline, RequestTimeline)
            assert timeline.num_generation_tokens == len(one.token_ids)
            assert timeline.num_prompt_tokens == len(output.prompt_token_ids)
            assert timeline.finish_reason == one.finish_reason
            parts = timeline.queue_ns, timeline.prefill_ns, timeline.decode_ns
            assert min(parts) > 0
            assert sum(parts) + timeline.preempted_ns == timeline.e2e_ns
            stamps = [
                timeline.arrival_ns,
                timeline.queued_ns,
                timeline.first_scheduled_ns,
                timeline.first_token_ns,
                timeline.last_token_ns,
                timeline.delivered_ns,
            ]
            assert stamps == sorted(stamps)
            num_preempted += len(timeline.preemptions)
            for preempted_ns, resumed_ns in timeline.preemptions:
                assert timeline.first_scheduled_ns < preempted_ns < resumed_ns
    assert num_preempted == recorded.num_preemptions
    assert {arrival.request_num for arrival in recorded.run.arrivals} == {
        timeline.request_num for timeline in timelines
    }


def test_the_perfetto_file_has_all_of_it(recorded: Recorded, tmp_path: Path) -> None:
    run = recorded.run
    loaded = load(write_perfetto(run.folder, tmp_path / "trace.pftrace").read_bytes())
    # A request's slice and the phase of the input thread are both called decode.
    of_threads = {uuid for uuid, track in loaded.tracks.items() if track.HasField("thread")}
    on_threads = Counter(piece.name for piece in loaded.slices if piece.track in of_threads)
    elsewhere = Counter(piece.name for piece in loaded.slices if piece.track not in of_threads)
    drawn = on_threads + elsewhere
    spans = Counter(
        span.phase.label for _, thread in run.threads() for span in thread.phase_spans()
    )
    for phase in set(Phase) - NOT_IN_THIS_RUN:
        assert on_threads[phase.label] == spans[phase.label] > 0
    of_requests = Counter(
        piece.name for timeline in run.timelines for piece in request_slices(timeline)
    )
    assert {name: elsewhere[name] for name in of_requests} == of_requests
    steps = Counter(format_step_label(step.label) for step in run.steps + run.worker_steps)
    assert {label: drawn[label] for label in steps} == steps
    instants = Counter(name for name, _, _ in loaded.instants)
    events = Counter(event.kind.label for event in run.events)
    assert {name: instants[name] for name in events} == events
    assert events["preempt"] == recorded.num_preemptions


def test_the_summary_agrees(recorded: Recorded) -> None:
    summary = summarize(recorded.run.folder)
    assert summary.num_steps == len(recorded.run.steps)
    delivered = sum(len(one) for one in tokens(recorded.outputs))
    assert summary.num_sampled_tokens == summary.requests.num_generation_tokens == delivered
    assert summary.requests.count == sum(len(output.outputs) for output in recorded.outputs)
    assert summary.preemptions.count == recorded.num_preemptions
    assert summary.pool.num_blocks == 14
    assert sum(group.durations.count for group in summary.steps_by_label) == summary.num_steps
