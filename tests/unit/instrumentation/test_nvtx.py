"""When NVTX is on, and that its ranges and hooks are balanced and leave nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from instrumentation import StepLabel, WorkerStepRecord
from instrumentation.profile.layer_ranges import LayerRanges
from instrumentation.profile.nvtx import choose_nvtx
from instrumentation.record.live import LiveInstrument
from tests.native.nvtx_tool import build_tool, environment_of, ranges_by_thread, read_lines
from tests.support.ranges import KeptRanges

ROOT = Path(__file__).parents[3]


def run(code: str, **environment: str) -> str:
    """Run code in a process of its own: the NVTX library looks for its tool only once."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


ASK = "from instrumentation.profile.nvtx import choose_nvtx as c; x = c({!r}); print(*x, sep='|')"


@pytest.mark.parametrize("setting", ["auto", "on", "off"])
def test_without_a_tool_there_are_no_ranges_and_a_reason(setting: str) -> None:
    ranges, _, reason = run(ASK.format(setting)).partition("|")
    assert ranges == "None"
    expected = {"auto": "NVTX_INJECTION64_PATH is not set", "on": "no tool is attached"}
    assert expected.get(setting, "nvtx=off") in reason


def test_a_tool_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "no.so")
    answer = run(ASK.format("auto"), NVTX_INJECTION64_PATH=missing)
    assert answer.startswith("None|")
    assert missing in answer


def test_the_package_may_be_missing_or_disabled(tmp_path: Path) -> None:
    hidden = f"import sys; sys.modules['nvtx'] = None; {ASK.format('on')}"
    assert "cannot be imported" in run(hidden)
    library = build_tool(tmp_path)
    environment = environment_of(library, tmp_path / "out") | {"NVTX_DISABLE": "1"}
    assert run(ASK.format("on"), **environment) == "None|NVTX_DISABLE is set"


def test_choosing_off_imports_nothing() -> None:
    code = "import sys; from instrumentation.profile.nvtx import choose_nvtx as c; c('off', {}); "
    code += "c('auto', {}); print('nvtx' in sys.modules, 'torch' in sys.modules)"
    assert run(code) == "False False"
    assert choose_nvtx("off", {"NVTX_INJECTION64_PATH": "x"}).ranges is None


def test_spans_and_steps_reach_the_tool(tmp_path: Path) -> None:
    code = """
from instrumentation import StepLabel, WorkerStepRecord
from instrumentation.config import ObservabilityConfig
from instrumentation.setup import setup
obs = setup(ObservabilityConfig(disable_log_stats=True, flight_recorder_steps=0), role="core")
obs = obs.for_thread("worker")
label = StepLabel(2, 30, 1, 1)
obs.step_begin(label)
with obs.prepare:
    pass
with obs.forward:
    pass
obs.worker_step(WorkerStepRecord(step=1, begin_ns=1, end_ns=2, num_context_requests=2,
    num_context_tokens=30, num_generation_requests=1, num_generation_tokens=1))
with obs.sample:
    pass
"""
    run(code, **environment_of(build_tool(tmp_path), tmp_path / "out"))
    (lines,) = read_lines(tmp_path / "out").values()
    (ranges,) = ranges_by_thread(lines).values()
    assert [(one.name, one.depth) for one in ranges] == [
        ("execute_context_2(30)_generation_1(1)", 0),
        ("prepare", 1),
        ("forward", 1),
        ("sample", 0),
    ]


def test_ranges_can_be_changed_between_steps() -> None:
    obs, first, second = LiveInstrument("worker"), KeptRanges(), KeptRanges()

    def step(number: int) -> None:
        obs.step_begin(StepLabel(0, 0, 1, 1))
        with obs.forward:
            pass
        record = WorkerStepRecord(
            step=number,
            begin_ns=1,
            end_ns=2,
            num_context_requests=0,
            num_context_tokens=0,
            num_generation_requests=1,
            num_generation_tokens=1,
        )
        obs.worker_step(record)
        assert len(record.phases) == 3

    label = "execute_context_0(0)_generation_1(1)"
    for number, ranges in enumerate([None, first, second, None, first]):
        obs.set_ranges(ranges)
        assert obs.ranges is ranges
        step(number)
    assert first.told == [label, f"{label}/forward"] * 2
    assert second.told == [label, f"{label}/forward"]
    assert not first.open
    assert not second.open


def test_layers_are_bracketed_and_can_be_let_go() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    given = torch.randn(3, 4)
    expected = model(given)
    ranges = KeptRanges()
    layers = LayerRanges(model.named_modules(), ranges)
    assert torch.equal(model(given), expected)
    assert ranges.told == [
        "Sequential",
        "Sequential/0",
        "Sequential/1",
        "Sequential/1/1.0",
        "Sequential/1/1.1",
    ]
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(3, 5))
    assert not ranges.open, "a layer that raises closes its range"
    layers.remove()
    layers.remove()
    ranges.told.clear()
    assert torch.equal(model(given), expected)
    assert not ranges.told
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
