"""Hooks, in one process: seeing imports, the fence, the catalogue, and the vllm hook on fakes."""

import gc
import importlib
import itertools
import signal
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from instrumentation import Event, format_step_label
from instrumentation.hooks import (
    folder,
    import_watch,
    loader,
    progress,
    py_spy_stall,
    recording,
    registry,
    torch_profiler,
)
from instrumentation.hooks.fence import Fence, wrap
from instrumentation.hooks.nvtx_layers import GlobalLayerRanges
from instrumentation.hooks.vllm_engine import install
from instrumentation.names import Phase
from tests.unit.vllm_fakes import FakeRequest, fake_modules
from tests.waiting import PATIENCE_S, wait_until
from traces.journal_reader import Run, read_run


@pytest.fixture
def code_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path; what was imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    meta_path = list(sys.meta_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.meta_path[:] = meta_path
    import_watch._watcher.callbacks.clear()


def test_a_module_is_told_of_once_executed_and_bears_no_trace(code_folder: Path) -> None:
    (code_folder / "watched_package").mkdir()
    (code_folder / "watched_package" / "__init__.py").write_text("value = 1")
    (code_folder / "watched_package" / "inner.py").write_text("value = 2")
    seen: list[tuple[str, int]] = []
    for name in ("watched_package", "watched_package.inner"):
        import_watch.watch(name, lambda module: seen.append((module.__name__, module.value)))
    assert not seen
    inner = importlib.import_module("watched_package.inner")
    assert seen == [("watched_package", 1), ("watched_package.inner", 2)]
    assert "exec_module" not in vars(inner.__spec__.loader)
    assert type(inner.__loader__).__name__ == "SourceFileLoader"
    importlib.reload(inner)
    assert len(seen) == 2


def test_a_loader_that_modules_share_is_not_changed(code_folder: Path) -> None:
    archive = code_folder / "archive.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("watched_in_zip.py", "value = 3")
        stream.writestr("other_in_zip.py", "value = 4")
    sys.path.insert(0, str(archive))
    seen: list[int] = []
    import_watch.watch("watched_in_zip", lambda module: seen.append(module.value))
    other = importlib.import_module("other_in_zip")
    assert not seen
    watched = importlib.import_module("watched_in_zip")
    assert seen == [3]
    assert type(watched.__spec__.loader) is type(other.__spec__.loader)
    assert type(watched.__loader__) is type(other.__loader__)


def test_a_module_that_is_there_already_is_told_of_at_once(code_folder: Path) -> None:
    seen: list[ModuleType] = []
    import_watch.watch("sys", seen.append)
    assert seen == [sys]


def test_a_module_that_fails_to_import_is_not_told_of(code_folder: Path) -> None:
    (code_folder / "fails_first.py").write_text("raise KeyError('a')")
    seen: list[ModuleType] = []
    import_watch.watch("fails_first", seen.append)
    with pytest.raises(KeyError):
        importlib.import_module("fails_first")
    assert not seen
    (code_folder / "fails_first.py").write_text("value = 'whole, and longer than before'")
    importlib.invalidate_caches()
    assert importlib.import_module("fails_first") is not None
    assert len(seen) == 1


def test_a_failing_hook_is_reported_once_and_skipped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_reported", set())
    applied: list[ModuleType] = []

    def fail(module: ModuleType) -> None:
        raise ValueError("cannot attach")

    hooks = {
        "bad": registry.Hook("bad", ("sys", "os"), "", "entry point", lambda: fail),
        "good": registry.Hook("good", ("sys",), "", "entry point", lambda: applied.append),
    }
    names = ["bad", "absent", "good"]
    loader.activate(names, find=hooks.get, watch=import_watch.watch)
    error_output = capsys.readouterr().err.splitlines()
    assert error_output == [
        "isinglass hooks: bad is skipped: ValueError: cannot attach",
        "isinglass hooks: absent is skipped: LookupError: there is no such hook; see `isinglass "
        "hooks list`",
    ]
    assert applied == [sys]


def test_users_hooks_come_from_entry_points(code_folder: Path) -> None:
    (code_folder / "my_hooks.py").write_text(
        "def good(module):\n    '''Does good.'''\ngood.target = 'json'\ndef aimless(module): ...\n"
    )
    package = code_folder / "my_hooks-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: my-hooks\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        f"[{registry.GROUP}]\nmine = my_hooks:good\naimless = my_hooks:aimless\n"
        "absent = my_hooks:absent\ngc = my_hooks:good\n"
    )
    hooks = registry.all_hooks()
    assert hooks["mine"].targets == ("json",)
    assert hooks["mine"].help == "Does good."
    assert hooks["mine"].source == "entry point my_hooks:good"
    assert hooks["gc"].source == "builtin"
    for name in ("aimless", "absent"):
        assert hooks[name].help.startswith("broken: AttributeError")
        with pytest.raises(AttributeError):
            hooks[name].load()
    assert registry.find_hook("nobody") is None
    mine = registry.find_hook("mine")
    assert mine is not None
    assert mine[:4] == hooks["mine"][:4]
    assert set(registry.hook_names()) == set(hooks)


@pytest.mark.parametrize("name", sorted(registry.BUILTIN_HOOKS))
def test_builtin_hooks_can_be_loaded(name: str) -> None:
    hook = registry.BUILTIN_HOOKS[name]
    assert callable(hook.load())
    assert hook.targets
    assert hook.help


def test_the_program_gets_its_results_and_errors_whatever_we_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Thing:
        def double(self, number: int, *, fail: bool = False) -> int:
            if fail:
                raise KeyError(number)
            return 2 * number

    fence = Fence("test")
    told: list[Any] = []

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("ours")

    assert wrap(Thing, "double", fence=fence, before=broken, after=broken, failed=broken)
    assert not wrap(Thing, "triple", fence=fence)
    thing = Thing()
    assert wrap(
        thing,
        "double",
        fence=fence,
        before=lambda number, **kwargs: f"before {number}",
        after=lambda state, result, number, **kwargs: told.append((state, result, number)),
        failed=lambda error: told.append(repr(error)),
    )
    assert thing.double(4) == 8
    with pytest.raises(KeyError, match="5"):
        thing.double(5, fail=True)
    assert told == [("before 4", 8, 4), "KeyError(5)"]
    assert fence.num_errors == 4
    assert capsys.readouterr().err.count("RuntimeError: ours") == 1
    assert Thing.double.__name__ == "double"


@pytest.fixture
def hooks_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the hooks of this process write; their journals are closed afterwards."""
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "hooks"))
    monkeypatch.setattr(recording, "_instruments", {})
    monkeypatch.setattr(progress, "_probes", [])
    handler = signal.getsignal(signal.SIGUSR2)
    yield tmp_path / "hooks"
    signal.signal(signal.SIGUSR2, handler)
    for instrument in recording._instruments.values():
        instrument.close()


def close_and_read(hooks_dir: Path) -> Run:
    """The run so far."""
    for instrument in recording._instruments.values():
        instrument.close()
    return read_run(hooks_dir)


def test_the_default_folder_is_handed_to_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(folder.VARIABLE, "")
    first = folder.hooks_folder()
    assert first.is_dir()
    assert first.parent == tmp_path / "isinglass-hooks"
    monkeypatch.chdir("/")
    assert folder.hooks_folder() == first


def test_collections_become_events(hooks_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISINGLASS_HOOKS_GC_MIN_US", "0")
    before = list(gc.callbacks)
    registry.BUILTIN_HOOKS["gc"].load()(sys)
    (watch,) = [callback for callback in gc.callbacks if callback not in before]
    try:
        cycle: list[Any] = []
        cycle.append(cycle)
        del cycle
        gc.collect()
    finally:
        gc.callbacks.remove(watch)
    events = [
        event
        for event in close_and_read(hooks_dir).events
        if event.kind is Event.GARBAGE_COLLECTION and event.detail.startswith("generation 2")
    ]
    assert events
    assert all(event.value > 0 for event in events)
    assert any(int(event.detail.split()[2]) >= 1 for event in events)


@pytest.mark.parametrize(
    ("hook", "variable", "text"),
    [
        ("gc", "ISINGLASS_HOOKS_GC_MIN_US", "soon"),
        ("py-spy-dump-on-stall", "ISINGLASS_HOOKS_STALL_S", "0"),
        ("torch-profiler", "ISINGLASS_HOOKS_PROFILE_S", "-1"),
        ("torch-profiler", "ISINGLASS_HOOKS_PROFILE_DELAY_S", "inf"),
    ],
)
def test_settings_out_of_range_are_refused(
    monkeypatch: pytest.MonkeyPatch, hook: str, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=variable):
        registry.BUILTIN_HOOKS[hook].load()(SimpleNamespace())


def test_without_a_delay_the_profile_waits_for_the_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(torch_profiler.DELAY, raising=False)
    monkeypatch.setenv(torch_profiler.DURATION, "1.5")
    assert torch_profiler.read_plan() == (None, 1.5)


def test_stacks_are_written_without_py_spy_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(py_spy_stall.shutil, "which", lambda *args, **kwargs: None)
    text = py_spy_stall.write_stacks(tmp_path / "stacks.txt").read_text()
    assert text.startswith("by the interpreter, without native frames, because py-spy is not inst")
    assert "test_stacks_are_written_without_py_spy_too" in text


def test_stacks_are_written_where_py_spy_may_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    text = py_spy_stall.write_stacks(tmp_path / "stacks.txt").read_text()
    assert "because py-spy failed (Error: Permission Denied)" in text
    assert "test_stacks_are_written_where_py_spy_may_not_look" in text


def test_an_engine_without_work_has_not_stalled(hooks_dir: Path) -> None:
    state = progress.Progress(is_busy=True, num_moves=4)
    progress.set_probe(lambda: state)
    assert py_spy_stall._read_position() == 4
    state = progress.Progress(is_busy=False, num_moves=4)
    assert py_spy_stall._read_position() is None


class RangeList:
    """Ranges that are kept, with their depth."""

    def __init__(self) -> None:
        self.names: list[tuple[int, str]] = []
        self.depth = 0

    def prepare(self, name: str) -> str:
        return name

    def push(self, handle: str) -> None:
        self.names.append((self.depth, handle))
        self.depth += 1

    def pop(self) -> None:
        self.depth -= 1


def test_layers_have_ranges_named_by_their_path() -> None:
    import torch

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, *, fail: bool = False) -> torch.Tensor:
            if fail:
                raise KeyError("in the layer")
            return self.linear(x)

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Half()

        def forward(self, x: torch.Tensor, *, fail: bool = False) -> torch.Tensor:
            return self.first(x, fail=fail)

    ranges = RangeList()
    handles = []
    hooks = SimpleNamespace(
        register_module_forward_pre_hook=lambda hook: handles.append(
            torch.nn.modules.module.register_module_forward_pre_hook(hook)
        ),
        register_module_forward_hook=lambda hook, **kwargs: handles.append(
            torch.nn.modules.module.register_module_forward_hook(hook, **kwargs)
        ),
    )
    GlobalLayerRanges(ranges).attach(hooks)
    try:
        model = Whole()
        x = torch.ones(1, 2)
        expected = model.first.linear.weight.sum(dim=1) + model.first.linear.bias
        assert torch.allclose(model(x)[0], expected)
        assert ranges.names == [(0, "Whole"), (1, "Whole.first"), (2, "Whole.first.linear")]
        with pytest.raises(KeyError):
            model(x, fail=True)
        assert ranges.depth == 0
    finally:
        for handle in handles:
            handle.remove()


# The vllm hook, on fakes of vLLM's classes.


def hooked_core(**kwargs: Any) -> Any:
    """An engine core of fakes with the hook attached."""
    core_module, worker_module = fake_modules()
    install(worker_module)
    install(core_module)
    return core_module.EngineCore(**kwargs)


def request(number: int, *, prompt: int, output: int) -> FakeRequest:
    """A request that arrived a tenth of a second ago."""
    return FakeRequest(f"request-{number}", prompt, output, arrival_time=time.time() - 0.1)


def run_until_done(core: Any) -> list[dict[str, int]]:
    """Run all steps; what each scheduled, by the scheduler's own word."""
    plans = []
    while core.scheduler.requests:
        update = core.scheduler.update_from_output

        def keep(plan: Any, sampled: Any, update: Any = update) -> Any:
            plans.append(dict(plan.num_scheduled_tokens))
            return update(plan, sampled)

        core.scheduler.update_from_output = keep
        core.step_fn()
        core.scheduler.update_from_output = update
    return plans


def test_steps_of_vllm_are_recorded_with_their_labels(hooks_dir: Path) -> None:
    core = hooked_core()
    for number, prompt in enumerate((5, 11)):
        core.scheduler.add_request(request(number, prompt=prompt, output=3))
    plans = run_until_done(core)
    assert core.shutdown() == "shut down"
    run = close_and_read(hooks_dir)
    labels = [format_step_label(step.label) for step in run.steps]
    assert labels == [
        "execute_context_2(8)_generation_0(0)",  # 5 and 3 of 11
        "execute_context_1(7)_generation_1(1)",  # the next 7 of 11
        "execute_context_1(1)_generation_1(1)",  # its last one
        "execute_context_0(0)_generation_1(1)",
        "execute_context_0(0)_generation_1(1)",
    ]
    assert [step.label for step in run.worker_steps] == [step.label for step in run.steps]
    assert [sum(step.scheduled[1::2]) for step in run.steps] == [
        sum(plan.values()) for plan in plans
    ]
    assert [step.first_tokens for step in run.steps] == [(0,), (), (1,), (), ()]
    assert [step.finished for step in run.steps] == [(), (), (0,), (), (1,)]
    assert sum(step.num_sampled_tokens for step in run.steps) == 6
    assert all(sum(step.blocks_at_end) == 15 for step in run.steps)
    first = run.timelines[0]
    assert (first.request_id, first.finish_reason) == ("request-0", "length")
    assert (first.num_prompt_tokens, first.num_generation_tokens) == (5, 3)
    assert 0.1 <= first.intake_ns / 1e9 < PATIENCE_S
    assert first.queue_ns + first.prefill_ns + first.decode_ns + first.preempted_ns == first.e2e_ns
    assert [phase.phase.label for phase in run.startups] == [
        "load_model",
        "allocate_kv_cache",
        "build_scheduler",
    ]


def test_phases_of_core_and_worker_are_recorded_and_do_not_overlap(hooks_dir: Path) -> None:
    core = hooked_core()
    core.scheduler.add_request(request(0, prompt=4, output=2))
    run_until_done(core)
    run = close_and_read(hooks_dir)
    for _, thread in run.threads():
        spans = thread.phase_spans()
        assert all(one.end_ns <= two.begin_ns for one, two in itertools.pairwise(spans))
    phases = {span.phase for _, thread in run.threads() for span in thread.phase_spans()}
    assert phases >= {Phase.SCHEDULE, Phase.EXECUTE, Phase.WAIT, Phase.UPDATE}
    assert phases >= {Phase.PREPARE, Phase.FORWARD, Phase.LOGITS, Phase.SAMPLE}


def test_preemptions_of_vllm_are_recorded(hooks_dir: Path) -> None:
    core = hooked_core()
    for number in range(2):
        core.scheduler.add_request(request(number, prompt=3, output=4))
    core.step_fn()
    core.scheduler.preempt_next = True
    run_until_done(core)
    run = close_and_read(hooks_dir)
    (preemption,) = [one for step in run.steps for one in step.preempted]
    assert (preemption.request_num, preemption.blocks_lost, preemption.tokens_lost) == (1, 1, 3)
    # It has a first output token, so computing its prompt again counts as generation.
    assert run.steps[2].label == (0, 0, 2, 5)
    assert run.steps[2].preempted_prefix_query_tokens == 4
    timeline = {one.request_num: one for one in run.timelines}[1]
    ((preempted_ns, resumed_ns),) = timeline.preemptions
    assert preempted_ns < resumed_ns
    assert timeline.preempted_ns == resumed_ns - preempted_ns
    assert [event.value for event in run.events if event.kind is Event.PREEMPT] == [3]


def test_requests_of_vllm_that_are_aborted_end_once(hooks_dir: Path) -> None:
    core = hooked_core()
    for number in range(2):
        core.scheduler.add_request(request(number, prompt=3, output=4))
    core.step_fn()
    assert len(core.scheduler.finish_requests(["request-0", "nobody"], "abort")) == 1
    run_until_done(core)
    run = close_and_read(hooks_dir)
    reasons = {one.request_id: one.finish_reason for one in run.timelines}
    assert reasons == {"request-0": "abort", "request-1": "length"}
    assert [event.value for event in run.events if event.kind is Event.ABORT] == [1]


def test_blocks_of_vllm_are_counted_as_they_are(hooks_dir: Path) -> None:
    core = hooked_core(num_blocks=4)
    pool = core.scheduler.pool
    for number in range(7):
        core.scheduler.add_request(request(number, prompt=3, output=2))
    while core.scheduler.requests:
        core.scheduler.max_num_running_reqs = 3
        core.step_fn()
    run = close_and_read(hooks_dir)
    cached_free = sum(block.block_hash is not None for block in pool.free)
    assert run.steps[-1].blocks_at_end == (0, cached_free, 3 - cached_free)
    assert sum(step.num_evicted_blocks for step in run.steps) == 4
    assert run.steps[0].admission_stop.label == "token_budget"


def test_a_step_of_vllm_that_fails_is_told_and_dumped(hooks_dir: Path) -> None:
    core = hooked_core()
    core.scheduler.add_request(request(0, prompt=3, output=4))
    core.step_fn()
    core.model_executor.worker.fails = True
    with pytest.raises(RuntimeError, match="the device is lost"):
        core.step_fn()
    run = close_and_read(hooks_dir)
    (event,) = [event for event in run.events if event.kind is Event.STEP_FAILED]
    assert event.detail == "RuntimeError: the device is lost"
    assert list(hooks_dir.glob("flight-*"))


def test_a_signal_asks_for_a_flight_record(
    hooks_dir: Path,
) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    core = hooked_core()
    core.scheduler.add_request(request(0, prompt=3, output=2))
    core.step_fn()
    signal.raise_signal(signal.SIGUSR2)
    wait_until(lambda: list(hooks_dir.glob("flight-*")))


def test_errors_of_the_hook_do_not_reach_vllm(
    hooks_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = hooked_core()
    monkeypatch.setattr(
        "instrumentation.hooks.vllm_requests.RequestBook.plan", lambda *args, **kwargs: 1 / 0
    )
    core.scheduler.add_request(request(0, prompt=3, output=4))
    assert len(run_until_done(core)) == 4
    assert capsys.readouterr().err.count("ZeroDivisionError") == 1


def test_another_vllm_is_refused_by_name(hooks_dir: Path) -> None:
    module = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = type("Worker", (), {})
    with pytest.raises(AttributeError, match=r"0\.32"):
        install(module)
