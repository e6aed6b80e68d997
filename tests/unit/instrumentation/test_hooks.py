"""Hooks, in one process: seeing imports, the fence, the catalogue, and the small ones."""

import gc
import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from instrumentation import Event
from instrumentation.hooks import (
    folder,
    import_watch,
    loader,
    py_spy_stall,
    registry,
    torch_profiler,
)
from instrumentation.hooks.fence import Fence, wrap
from instrumentation.hooks.nvtx_layers import GlobalLayerRanges
from tests.support.hooked_vllm import close_and_read


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
        failed=lambda error, number, **kwargs: told.append((repr(error), number)),
    )
    assert thing.double(4) == 8
    with pytest.raises(KeyError, match="5"):
        thing.double(5, fail=True)
    assert told == [("before 4", 8, 4), ("KeyError(5)", 5)]
    assert fence.num_errors == 4
    assert capsys.readouterr().err.count("RuntimeError: ours") == 1
    assert Thing.double.__name__ == "double"


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
