"""Engine core over a fake executor: the loop at both depths, start-up, aborts, utilities."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core import plugins
from engine.core.engine_core import UTILITIES, EngineCore
from engine.errors import ConfigError
from engine.types.messages import (
    PROTOCOL_VERSION,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from instrumentation import Event, Phase, StartupPhase
from instrumentation.testing import Recorder
from tests.fakes import (
    FakeExecutor,
    LazyFakeExecutor,
    message,
    reference_output,
    sampling_params,
    write_model_folder,
)
from tests.support.cores import MAX_MODEL_LEN, make_core


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


def add(core: EngineCore, *requests: EngineCoreRequest) -> None:
    for request in requests:
        core.add_request(core.prepare_request(request))


def until_idle(core: EngineCore, *, limit: int = 2_000) -> Iterator[int]:
    """Counts steps while there is work; a core that never ends is a failure, not a hang."""
    for number in range(limit):
        if not core.has_work():
            return
        yield number
    raise AssertionError(f"still at work after {limit} steps")


def run(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Step until nothing is left; returns tokens and finish reasons by request."""
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    for _ in until_idle(core):
        collect(core.step(), tokens, reasons)
    core.check_integrity()
    return tokens, reasons


def collect(
    packages: dict[int, EngineCoreOutputs], tokens: dict[str, list[int]], reasons: dict[str, str]
) -> None:
    for package in packages.values():
        for output in package.outputs:
            assert output.request_id not in reasons, "an output after the last one"
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                reasons[output.request_id] = str(output.finish_reason)


def random_load(rng: random.Random, num_requests: int) -> list[EngineCoreRequest]:
    load = []
    for num in range(num_requests):
        prompt = [1, 2, 3, 4, 5, 6, 7, 8][: rng.randrange(9)]
        prompt += [rng.randrange(1, 12) for _ in range(rng.randrange(1, 20))]
        params = sampling_params(
            max_tokens=rng.choice((None, 1, 3, 15)), ignore_eos=rng.random() < 0.3
        )
        load.append(message(f"r{num}", prompt, num=num, params=params, priority=rng.randrange(3)))
    return load


VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_gpu_blocks_override": 12},
    {"num_gpu_blocks_override": 12, "enable_prefix_caching": False},
    {"max_num_batched_tokens": 7},
    {"max_num_batched_tokens": 48, "enable_chunked_prefill": False},
    {"long_prefill_token_threshold": 3, "num_gpu_blocks_override": 14},
    {"scheduling_policy": "priority", "num_gpu_blocks_override": 12},
]


@pytest.mark.parametrize("executor", [FakeExecutor, LazyFakeExecutor])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_both_depths_give_the_outputs_of_requests_served_alone(
    model: Path, executor: type[FakeExecutor], variant: dict[str, Any]
) -> None:
    load = random_load(random.Random(4), 14)
    expected = {
        request.request_id: reference_output(
            request.prompt_token_ids, request.sampling_params, MAX_MODEL_LEN
        )
        for request in load
    }
    for async_scheduling in (False, True):
        core = make_core(model, executor=executor, async_scheduling=async_scheduling, **variant)
        add(core, *load[:9])
        tokens: dict[str, list[int]] = {}
        reasons: dict[str, str] = {}
        for request in load[9:]:
            collect(core.step(), tokens, reasons)
            add(core, request)
        for _ in until_idle(core):
            collect(core.step(), tokens, reasons)
        core.check_integrity()
        assert tokens == {request_id: output for request_id, (output, _) in expected.items()}
        assert reasons == {request_id: reason for request_id, (_, reason) in expected.items()}


def test_async_scheduling_keeps_two_steps_in_flight_and_sync_one(model: Path) -> None:
    for async_scheduling, expected in ((False, 1), (True, 2)):
        core = make_core(model, executor=LazyFakeExecutor, async_scheduling=async_scheduling)
        add(core, message("r", [1, 2, 3], ignore_eos=True, max_tokens=9))
        executor = core.executor
        assert isinstance(executor, FakeExecutor)
        ahead = 0
        for _ in until_idle(core):
            returned = core.step()
            num_done = 0 if executor.worker is None else executor.worker.num_steps
            ahead = max(ahead, len(executor.plans) - num_done + bool(returned))
        assert ahead == expected
        # One step a token: nothing is planned behind the last one.
        assert len(executor.plans) == 9


def test_a_step_without_work_does_nothing(model: Path) -> None:
    core = make_core(model)
    assert not core.has_work()
    assert core.step() == {}
    assert core.check_integrity()


def test_each_steps_record_rides_with_its_outputs(model: Path) -> None:
    recorder = Recorder()
    core = make_core(model, obs=recorder, max_num_batched_tokens=5)
    add(core, message("r", [1] * 12, ignore_eos=True, max_tokens=3))
    records = []
    for _ in until_idle(core):
        for package in core.step().values():
            assert package.step is not None
            assert package.worker_step is not None
            assert package.worker_step.step == package.step.step
            records.append(package.step)
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    assert records == recorder.steps
    assert sum(record.num_scheduled_tokens for record in records) == 12 + 2
    assert sum(record.num_sampled_tokens for record in records) == 3
    # The first two chunks bring no token, but their records are sent all the same.
    assert [record.num_sampled_tokens for record in records[:2]] == [0, 0]
    assert {Phase.SCHEDULE, Phase.EXECUTE, Phase.WAIT, Phase.UPDATE} <= recorder.phases_seen


def test_start_up_runs_its_phases_in_order_and_answers(model: Path) -> None:
    recorder = Recorder()
    core = make_core(model, obs=recorder, max_num_batched_tokens=33)
    executor = core.executor
    assert isinstance(executor, FakeExecutor)
    assert executor.calls == [
        "init",
        "load_model",
        "determine_available_memory",
        "initialize_cache",
        "warm_up",
    ]
    phases = [record.phase for record in recorder.startups]
    assert phases == [
        StartupPhase.LOAD_PLUGINS,
        StartupPhase.LOAD_MODEL,
        StartupPhase.PROFILE,
        StartupPhase.ALLOCATE_KV_CACHE,
        StartupPhase.WARMUP,
        StartupPhase.BUILD_SCHEDULER,
    ]
    ready = core.ready_response()
    assert ready.version == PROTOCOL_VERSION
    assert (ready.num_gpu_blocks, ready.block_size) == (FakeExecutor.num_blocks_available, 4)
    assert (ready.max_model_len, ready.max_num_batched_tokens) == (MAX_MODEL_LEN, 33)
    assert ready.kv_cache_bytes == ready.num_gpu_blocks * executor.get_kv_cache_spec().block_bytes
    assert (ready.dtype, ready.device, ready.attention_backend) == ("float32", "cpu", "fake")
    assert core.ready_response() is ready
    told = {record.phase: (record.begin_ns, record.end_ns) for record in recorder.startups}
    assert [*told] == [*phases, StartupPhase.READY]
    assert len(told) == len(recorder.startups)
    assert ready.startup_begin_ns == {phase.label: begin for phase, (begin, _) in told.items()}
    assert ready.startup_ns == {phase.label: end - begin for phase, (begin, end) in told.items()}
    assert ready.memory_bytes == executor.memory_bytes
    core.shutdown()
    assert executor.calls[-1] == "shutdown"
    assert recorder.is_closed


def test_a_context_that_the_pool_cannot_hold_is_reduced(model: Path) -> None:
    recorder = Recorder()
    core = make_core(model, obs=recorder, num_gpu_blocks_override=5)
    assert core.ready_response().max_model_len == 20
    events = [(event.kind, event.value) for event in recorder.events]
    assert events == [(Event.KV_REDUCED_MAX_MODEL_LEN, 20)]
    add(core, message("r", [1] * 10, ignore_eos=True, max_tokens=None))
    tokens, reasons = run(core)
    assert len(tokens["r"]) == 10
    assert reasons == {"r": "length"}


def test_no_room_for_a_single_block_is_a_config_error_that_leaves_nothing(model: Path) -> None:
    executors: list[FakeExecutor] = []

    class Full(FakeExecutor):
        num_blocks_available = 0

        def load_model(self) -> None:
            executors.append(self)

    with pytest.raises(ConfigError, match="no room"):
        make_core(model, executor=Full)
    assert [one.calls[-1] for one in executors] == ["shutdown"]


def test_a_pool_in_which_no_request_can_run_is_a_config_error(model: Path) -> None:
    with pytest.raises(ConfigError, match="no request can ever run"):
        make_core(model, block_size=1, num_gpu_blocks_override=1)
    core = make_core(model, block_size=1, num_gpu_blocks_override=2)
    add(core, message("r", [1], ignore_eos=True, max_tokens=5))
    tokens, reasons = run(core)
    assert (len(tokens["r"]), reasons) == (1, {"r": "length"})


def abort(core: EngineCore, *request_ids: str) -> list[EngineCoreOutput]:
    packages = core.abort_requests(request_ids)
    return [output for package in packages.values() for output in package.outputs]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_steps", range(7))
def test_abort_at_any_moment_answers_once_and_hurts_nobody(
    model: Path, async_scheduling: bool, num_steps: int
) -> None:
    recorder = Recorder()
    core = make_core(
        model,
        executor=LazyFakeExecutor,
        obs=recorder,
        async_scheduling=async_scheduling,
        num_gpu_blocks_override=12,
    )
    load = random_load(random.Random(11), 8)
    add(core, *load)
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    for _ in range(num_steps):
        collect(core.step(), tokens, reasons)
    gone = [r.request_id for r in load[::2] if r.request_id not in reasons]
    answers = abort(core, *gone, *gone, "stranger")
    assert [answer.request_id for answer in answers] == gone
    assert all(answer.finish_reason is FinishReason.ABORT for answer in answers)
    assert all(answer.times is not None and answer.num_cached_tokens >= 0 for answer in answers)
    assert abort(core, *gone) == []
    assert [e.request_id for e in recorder.events if e.kind is Event.ABORT] == gone
    for request_id in gone:
        reasons[request_id] = "abort"
    for _ in until_idle(core):
        collect(core.step(), tokens, reasons)
    core.check_integrity()
    for request in load:
        if request.request_id not in gone:
            expected, _ = reference_output(
                request.prompt_token_ids, request.sampling_params, MAX_MODEL_LEN
            )
            assert tokens[request.request_id] == expected


def test_the_ids_of_two_clients_go_to_their_own_packages(model: Path) -> None:
    core = make_core(model)
    requests = [message(f"r{n}", [1, 2], num=n, ignore_eos=True, max_tokens=2) for n in range(4)]
    for request in requests:
        request.client_index = request.request_num % 2
    add(core, *requests)
    seen: dict[int, set[str]] = {0: set(), 1: set()}
    for _ in until_idle(core):
        for index, package in core.step().items():
            seen[index] |= {output.request_id for output in package.outputs}
    assert seen == {0: {"r0", "r2"}, 1: {"r1", "r3"}}


def test_utilities_by_name_and_no_others(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("isinglass"), "propagate", True)
    recorder = Recorder()
    core = make_core(model, obs=recorder)
    add(core, message("r", [1] * 12, ignore_eos=True, max_tokens=2))
    core.step()
    assert core.call_utility("reset_prefix_cache", []) is False
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING], "it is answered"
    run(core)
    assert core.call_utility("reset_prefix_cache", []) is True
    assert [e.value for e in recorder.events if e.kind is Event.RESET_PREFIX_CACHE] == [3]
    assert core.call_utility("get_supported_tasks", []) == ["generate"]
    assert core.call_utility("check_integrity", []) is True
    for name in ("shutdown", "step", "__class__", "nonsense"):
        with pytest.raises(AttributeError, match=UTILITIES[0]):
            core.call_utility(name, [])


def test_an_error_of_the_worker_comes_out_of_the_step(model: Path) -> None:
    core = make_core(model, executor=LazyFakeExecutor, async_scheduling=False)
    add(core, message("r", [1, 2, 3]))
    executor = core.executor
    assert isinstance(executor, FakeExecutor)
    assert executor.worker is not None

    def fail(plan: object) -> Any:
        raise ZeroDivisionError("of the model")

    executor.worker.execute = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError, match="of the model"):
        core.step()


class EntryPoint:
    """An entry point that works, or does not."""

    value = "package:function"

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self._calls = calls

    def load(self) -> Any:
        if self.name == "missing":
            raise ImportError("no such module")

        def call() -> None:
            if self.name == "failing":
                raise ValueError("bad plugin")
            self._calls.append(self.name)

        return call


def test_plugins_run_once_and_a_bad_one_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    names = ["first", "missing", "failing", "last"]

    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == "isinglass.general_plugins"
        return [EntryPoint(name, calls) for name in names]

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    assert plugins.load_plugins() == ["first", "last"] == calls
