"""What must add up, over random loads with preemption, aborts, n > 1 and errors.

The engine runs in this process, one or two of them, recorded; every identity is checked on the
records, on the metrics and on what the caller got.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine import LLM, AdapterLogitsProcessor, PromptError, RequestOutput, SamplingParams
from engine.types.sampling import RequestOutputKind
from engine.worker.logits_processor import RequestLogitsProcessor
from instrumentation import AdmissionStop
from instrumentation.explain.attribution import attribute, cost_by_request
from instrumentation.explain.step_budget import step_budgets
from tests.integration.conftest import SMALL
from tests.support.measures import counter
from tests.tiny_models import VOCAB_SIZE
from traces.journal_reader import Run, read_run

NUM_BLOCKS = 14


class FailsWhenAsked(AdapterLogitsProcessor):
    """Raises for a request that brings `fail_after`, once that many output tokens are there."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        after = (params.extra_args or {}).get("fail_after")
        if after is None:
            return None

        def process(output_ids, logits):  # type: ignore[no-untyped-def]
            if len(output_ids) >= after:
                raise ArithmeticError("on purpose")
            return logits

        return process


@dataclass
class Load:
    """What a random load sent and got."""

    num_sequences: int = 0
    num_tokens: int = 0
    ended: set[str] = field(default_factory=set)
    reasons: dict[str, int] = field(default_factory=dict)

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            for one in output.outputs:
                self.num_tokens += len(one.token_ids)
                if one.finish_reason is not None:
                    self.reasons[one.finish_reason] = self.reasons.get(one.finish_reason, 0) + 1


def make_engine(model: Path, folder: Path, *, is_async: bool) -> LLM:
    return LLM(
        model,
        trace_dir=folder,
        enable_multiprocessing=False,
        skip_tokenizer_init=True,
        async_scheduling=is_async,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=200,
        max_num_seqs=5,
        logits_processors=[FailsWhenAsked],
        **(SMALL | {"max_num_batched_tokens": 48}),
    )


def random_params(chance: random.Random) -> SamplingParams:
    extra = {"fail_after": chance.randint(0, 6)} if chance.random() < 0.3 else None
    return SamplingParams(
        n=chance.choice((1, 1, 1, 2, 3)),
        temperature=1.0,
        seed=chance.randrange(2**31),
        max_tokens=chance.randint(1, 30),
        ignore_eos=chance.random() < 0.7,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra,
    )


def serve(llms: list[LLM], seed: int, num_requests: int = 24) -> list[Load]:
    """Send requests at random times to engines that take turns, and abort some of them."""
    chance = random.Random(seed)
    loads = [Load() for _ in llms]
    shared = [chance.randrange(5, VOCAB_SIZE) for _ in range(64)]
    waiting = list(range(num_requests))
    open_ids: list[list[str]] = [[] for _ in llms]
    while waiting or any(llm.llm_engine.has_unfinished_requests() for llm in llms):
        for index, (llm, load) in enumerate(zip(llms, loads, strict=True)):
            engine = llm.llm_engine
            if waiting and chance.random() < 0.4:
                request_id = f"r{waiting.pop()}"
                params = random_params(chance)
                prompt = shared[: chance.choice((0, 0, 16, 40, 64))]
                prompt += [chance.randrange(5, VOCAB_SIZE) for _ in range(chance.randint(1, 50))]
                engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
                load.num_sequences += params.n
                open_ids[index].append(request_id)
            if chance.random() < 0.03:
                with pytest.raises(PromptError):
                    engine.add_request(
                        "bad", {"prompt_token_ids": [VOCAB_SIZE + 5]}, random_params(chance)
                    )
            if open_ids[index] and chance.random() < 0.05:
                engine.abort_request([open_ids[index].pop(chance.randrange(len(open_ids[index])))])
            if engine.has_unfinished_requests():
                load.take(engine.step())
    return loads


def check(run: Run, load: Load, llm: LLM) -> None:
    """Every identity, on one engine."""
    timelines, steps = run.timelines, run.steps
    check_timelines(run, load)
    for step in steps:
        used, cached_free, free = step.blocks_at_end
        num_blocks = step.num_blocks_used + step.num_blocks_cached_free + step.num_blocks_free
        assert used + cached_free + free == num_blocks
        assert min(used, cached_free, free, step.num_blocks_free) >= 0
        assert sum(step.waiting_by_reason) == step.num_waiting
        assert sum(step.scheduled[1::2]) == step.num_scheduled_tokens
        # One cause a step answers for every request that waited in it.
        assert bool(step.num_waiting) == (step.admission_stop is not AdmissionStop.NONE)
    assert (
        len(
            {
                step.num_blocks_used + step.num_blocks_cached_free + step.num_blocks_free
                for step in steps
            }
        )
        == 1
    )
    delivered = sum(timeline.num_generation_tokens for timeline in timelines)
    assert delivered == load.num_tokens
    assert counter(llm, "isinglass_generation_tokens_total") == delivered
    num_sampled = sum(step.num_sampled_tokens for step in steps)
    assert num_sampled == delivered
    history = llm._observer.history
    known = history.steps()
    assert [one.step.step for one in known] == [step.step for step in steps]
    for one, shares in attribute(known):
        assert sum(share.duration_ns for share in shares) == one.duration_ns
        assert [share.request_num for share in shares] == list(one.step.scheduled[::2])
    costs = cost_by_request(known)
    assert sum(costs.values()) == sum(one.duration_ns for one in known)
    for budget in step_budgets(steps, run.worker_steps):
        assert sum(budget.phases_ns.values()) + budget.unexplained_ns == budget.duration_ns
    check_reports(llm, run, costs)


def check_timelines(run: Run, load: Load) -> None:
    assert len(run.timelines) == load.num_sequences
    assert len({timeline.request_num for timeline in run.timelines}) == load.num_sequences
    assert {arrival.request_num for arrival in run.arrivals} == {
        timeline.request_num for timeline in run.timelines
    }, "arrived = ended"
    for timeline in run.timelines:
        parts = (timeline.queue_ns, timeline.prefill_ns, timeline.decode_ns, timeline.preempted_ns)
        assert sum(parts) == timeline.e2e_ns, timeline
        assert min(parts) >= 0, timeline
        assert timeline.finish_reason in {"stop", "length", "abort", "error"}


def check_reports(llm: LLM, run: Run, costs: dict[int, int]) -> None:
    """Each request's own report agrees with the whole."""
    num_preemptions = 0
    for timeline in run.timelines:
        report = llm.request_timeline(timeline.request_id)
        assert report.is_complete
        assert report.is_finished
        assert report.timeline == timeline
        assert report.cost_ns == costs.get(timeline.request_num, 0)
        num_preemptions += len(report.preemptions)
        for preemption in report.preemptions:
            assert preemption.by_request_num >= 0
            assert preemption.num_recomputed_tokens <= preemption.num_tokens_lost
        for wait in report.waits:
            assert wait.cause != "none"
        assert timeline.request_id in str(report)
    assert num_preemptions == counter(llm, "isinglass_preemptions_total")


@pytest.mark.parametrize(("is_async", "seed"), [(True, 1), (False, 2)], ids=["async", "sync"])
def test_one_engine(tiny_llama: Path, tmp_path: Path, is_async: bool, seed: int) -> None:
    with make_engine(tiny_llama, tmp_path, is_async=is_async) as llm:
        [load] = serve([llm], seed)
        llm.shutdown()
        run = read_run(llm.run_dir)
        check(run, load, llm)
    assert sum(step.num_preempted for step in run.steps) > 0
    assert {timeline.finish_reason for timeline in run.timelines} >= {"length", "abort", "error"}
    assert any(admission.num_hit_tokens for step in run.steps for admission in step.admissions)


def test_two_engines_in_one_process(tiny_llama: Path, tmp_path: Path) -> None:
    with (
        make_engine(tiny_llama, tmp_path / "a", is_async=True) as first,
        make_engine(tiny_llama, tmp_path / "b", is_async=False) as second,
    ):
        loads = serve([first, second], 7)
        for llm, load in zip((first, second), loads, strict=True):
            llm.shutdown()
            check(read_run(llm.run_dir), load, llm)
