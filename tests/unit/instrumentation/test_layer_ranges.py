"""Ranges of layers: invisible to a compiler, and nested whatever is raised."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.nn.modules import module as module_of_hooks

from instrumentation.hooks.nvtx_layers import GlobalLayerRanges
from instrumentation.profile.layer_ranges import LayerRanges
from tests.native.nvtx_tool import build_tool, environment_of, ranges_by_thread, read_lines

ROOT = Path(__file__).parents[3]

COMPILED = """
import torch
from instrumentation.profile.layer_ranges import LayerRanges
from instrumentation.profile.nvtx import choose_nvtx
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.ReLU()))
given = torch.ones(2, 4)
expected = torch.relu(given @ model[0].weight.T + model[0].bias)
if {is_ours}:
    LayerRanges(model.named_modules(), choose_nvtx("on").ranges)

@torch.compile(fullgraph=True, backend={backend!r})
def run(x):
    return model(x)

for _ in range(2):
    assert torch.allclose(run(given), expected)
assert torch.allclose(model(given), expected)
"""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_ours", [True, False], ids=["engine", "hook"])
def test_a_compiled_model_is_one_graph_without_ranges(
    tmp_path: Path, is_ours: bool, backend: str
) -> None:
    """Under a tool, whose calls no compiler can trace."""
    site = ROOT / "instrumentation" / "hooks" / "site"
    environment = environment_of(build_tool(tmp_path), tmp_path / "out") | {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "PATH": os.environ["PATH"],
        "ISINGLASS_HOOKS": "" if is_ours else "nvtx-layers",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILED.format(is_ours=is_ours, backend=backend)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (lines,) = read_lines(tmp_path / "out").values()
    (ranges,) = ranges_by_thread(lines).values()
    seen = [(one.depth, one.name) for one in ranges if not one.name.startswith("GraphModule")]
    path = "" if is_ours else "Sequential."
    names = [(0, "Sequential"), (1, f"{path}0"), (1, f"{path}1"), (2, f"{path}1.0")]
    assert seen == names, "once each: of the call that was not compiled"


class KeptRanges:
    """Ranges as a tool has them: a stack that knows no names at its end."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.told: list[str] = []

    def prepare(self, name: str) -> str:
        return name

    def push(self, handle: str) -> None:
        self.open.append(handle)
        self.told.append("/".join(self.open))

    def pop(self) -> None:
        self.open.pop()


class Layer(nn.Module):
    """Raises what it is told to."""

    def forward(self, error: BaseException | None) -> int:
        if error is not None:
            raise error
        return 1


class Model(nn.Module):
    """A layer within a layer; the second call of the outer one does not let errors through."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.other = Layer()

    def forward(self, error: BaseException | None, *, catches: bool = False) -> int:
        try:
            self.layer(error)
        except BaseException:
            if not catches:
                raise
        return self.other(None)


def attach_ours(model: nn.Module, ranges: KeptRanges) -> Callable[[], None]:
    return LayerRanges(model.named_modules(), ranges).remove


def attach_hook(model: nn.Module, ranges: KeptRanges) -> Callable[[], None]:
    handles: list[Any] = []

    def keep(name: str) -> Callable[..., None]:
        register = getattr(module_of_hooks, name)
        return lambda *args, **kwargs: handles.append(register(*args, **kwargs))

    names = ("register_module_forward_pre_hook", "register_module_forward_hook")
    GlobalLayerRanges(ranges).attach(SimpleNamespace(**{name: keep(name) for name in names}))
    return lambda: [handle.remove() for handle in handles] and None


@pytest.fixture(params=[attach_ours, attach_hook], ids=["engine", "hook"])
def attached(request: pytest.FixtureRequest) -> Iterator[tuple[Model, KeptRanges]]:
    """A model with ranges, attached as the engine and as the hook do."""
    model, ranges = Model(), KeptRanges()
    remove = request.param(model, ranges)
    yield model, ranges
    remove()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("catches", [True, False])
def test_whatever_is_raised_the_next_call_is_nested_as_the_first(
    attached: tuple[Model, KeptRanges], error: type[BaseException], catches: bool
) -> None:
    model, ranges = attached
    model(None)
    first, ranges.told = ranges.told, []
    assert [name.count("/") for name in first] == [0, 1, 1]
    if catches:
        model(error(), catches=True)
    else:
        with pytest.raises(error):
            model(error())
    ranges.told = []
    model(None)
    assert ranges.told == first
    assert not ranges.open


def test_a_hook_that_raises_before_ours_closes_no_range_of_others(
    attached: tuple[Model, KeptRanges],
) -> None:
    model, ranges = attached

    def refuse(module: nn.Module, args: Any) -> None:
        raise RuntimeError("refused")

    global_hooks = module_of_hooks._global_forward_pre_hooks
    handle = module_of_hooks.register_module_forward_pre_hook(refuse)
    global_hooks.move_to_end(handle.id, last=False)
    try:
        ranges.push("theirs")
        with pytest.raises(RuntimeError, match="refused"):
            model(None)
        assert ranges.open == ["theirs"]
    finally:
        handle.remove()


def test_threads_have_ranges_of_their_own(attached: tuple[Model, KeptRanges]) -> None:
    """A layer that is run in another thread, amid a call of the model, closes nothing of it."""
    model, ranges = attached

    def work() -> None:
        model.other(None)

    def start(module: nn.Module, args: Any, output: Any) -> None:
        open_before = list(ranges.open)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert ranges.open == open_before

    handle = model.layer.register_forward_hook(start)
    try:
        assert model(None) == 1
    finally:
        handle.remove()
    assert not ranges.open
