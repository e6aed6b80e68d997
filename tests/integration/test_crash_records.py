"""What is written down of a step that fails, wherever in it that is."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from engine import LLM, EngineDeadError, SamplingParams
from engine.core.engine_core import EngineCore
from tests.integration.conftest import SMALL
from traces.flight import FlightRecord, read_flight, render_flight

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def crash(
    model: Path,
    folder: Path,
    part: str,
    method: str,
    *,
    is_async: bool,
    patch: pytest.MonkeyPatch,
) -> tuple[FlightRecord, str]:
    """Let a method of the core fail when it is called for the third time; the record, and its text.

    That is where the fourth step is planned, handed over or sampled, but the third collected.
    """
    settings = SMALL | {"skip_tokenizer_init": True, "flight_dir": folder}
    num_calls = 0
    with LLM(model, enable_multiprocessing=False, async_scheduling=is_async, **settings) as llm:
        core: EngineCore = llm.llm_engine.engine_core._core
        owner = getattr(core, part)
        original = getattr(owner, method)

        def fail_at_third(*args: object) -> object:
            nonlocal num_calls
            num_calls += 1
            return original(*args) if num_calls < 3 else 1 // 0

        patch.setattr(owner, method, fail_at_third)
        with pytest.raises(EngineDeadError, match="a step failed"):
            llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)
    (file,) = folder.glob("flight-crash-*")
    record = read_flight(file)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_flight(record))
    return record, console.export_text()


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("executor", "execute_model"),
        ("executor", "sample_tokens"),
        ("scheduler", "update_from_output"),
    ],
)
def test_the_step_that_failed_is_on_record_and_named(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    method: str,
    is_async: bool,
) -> None:
    record, text = crash(tiny_llama, tmp_path, part, method, is_async=is_async, patch=monkeypatch)
    assert record.dump is not None
    failed = record.steps[2]
    assert record.dump.step == failed.step
    assert failed.num_sampled_tokens == 0
    # Another may have been planned meanwhile; it is on record, but not the reason.
    is_overlapped = is_async and method == "update_from_output"
    assert len(record.steps) == 3 + is_overlapped
    took = re.search(rf"step {failed.step} \(the reason\) took ([\d.,]+) ms from", text)
    assert took is not None, text
    duration_ms = (failed.end_ns - failed.begin_ns) / 1e6
    assert float(took[1]) == pytest.approx(duration_ms, abs=0.001)
    assert duration_ms > 0


def test_a_plan_that_fails_is_no_step(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, text = crash(
        tiny_llama, tmp_path, "scheduler", "schedule", is_async=True, patch=monkeypatch
    )
    assert record.dump is not None
    assert record.dump.step == -1
    assert len(record.steps) == 2
    assert "(the longest)" in text
    assert "(the reason)" not in text
