"""Flight records of a real engine: crash, kill, signal, slow step, and on request."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, EngineDeadError, IsinglassError, LogitsProcessor, SamplingParams
from engine.core.engine_core import EngineCore
from instrumentation import Event, FlightReason
from tests.integration.conftest import SMALL
from tests.support.measures import counter
from tests.tiny_models import VOCAB_SIZE
from tests.waiting import wait_until
from traces.flight import FlightRecord, read_flight
from traces.summary import summarize

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=30_000, ignore_eos=True)
SETTINGS = SMALL | {"skip_tokenizer_init": True}


class FailsAtFifthStep(LogitsProcessor):
    """Serves four steps, then raises for the whole batch."""

    def __init__(self, config: Any, device: Any, is_pin_memory: bool) -> None:
        self._num_steps = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        self._num_steps += 1

    def apply(self, logits: Any) -> Any:
        if self._num_steps >= 5:
            raise ZeroDivisionError("went wrong on purpose")
        return logits


def prompts(number: int, length: int = 9) -> list[list[int]]:
    return [
        [(7 * one + token) % (VOCAB_SIZE - 9) + 5 for token in range(length)]
        for one in range(number)
    ]


def record_named_in(message: str) -> FlightRecord:
    found = re.search(r"isinglass flight show (\S+)", message)
    assert found, f"no flight record is named in {message!r}"
    return read_flight(found[1])


def core_pid(llm: LLM) -> int:
    return llm.llm_engine.engine_core.core_pid


@pytest.mark.parametrize("with_stats", [True, False])
def test_a_killed_core_leaves_the_callers_copy(
    long_llama: Path, tmp_path: Path, with_stats: bool
) -> None:
    """SIGKILL: the core can write nothing; metrics and the last steps are still there."""
    llm = LLM(
        long_llama,
        flight_dir=tmp_path,
        flight_recorder_steps=16,
        disable_log_stats=not with_stats,
        **SETTINGS,
    )
    llm.generate(prompts(2), PARAMS, use_tqdm=False)
    pid = core_pid(llm)
    killer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {pid}"])
    with pytest.raises(EngineDeadError, match="killed by signal 9") as caught:
        llm.generate(prompts(3), LONG, use_tqdm=False)
    killer.wait()
    record = record_named_in(str(caught.value))
    assert record.path.parent == tmp_path
    assert record.process.header.role == "caller"
    assert record.dump is not None
    assert record.dump.reason is FlightReason.ENGINE_DEAD
    assert len(record.steps) == len(record.worker_steps) == 16
    assert record.steps[-1].num_running == 3
    assert {num for step in record.steps for num in step.scheduled[::2]} <= set(record.names)
    with pytest.raises(EngineDeadError, match="flight show"):
        llm.dump_flight_record()
    assert len(list(tmp_path.iterdir())) == 1, "one death, one record"
    if with_stats:
        assert counter(llm, "isinglass_steps_total") > 16
        assert {metric.name: metric for metric in llm.get_metrics()}[
            "isinglass_engine_up"
        ].value == 0
        report = llm.request_timeline("2")
        assert report.timeline.finish_reason == "error"
    llm.shutdown()


@pytest.mark.slow
def test_a_crash_in_the_core_is_written_down_by_the_core(tiny_llama: Path, tmp_path: Path) -> None:
    """A processor that raises for the whole batch ends the engine; the step is on record."""
    llm = LLM(
        tiny_llama,
        flight_dir=tmp_path,
        trace_dir=tmp_path / "runs",
        logits_processors=[FailsAtFifthStep],
        **SETTINGS,
    )
    with pytest.raises(EngineDeadError) as caught:
        llm.generate(prompts(2), PARAMS, use_tqdm=False)
    record = record_named_in(str(caught.value))
    assert record.process.header.role == "core"
    assert record.dump is not None
    assert record.dump.reason is FlightReason.CRASH
    assert "went wrong on purpose" in record.dump.detail
    reason = next(step for step in record.steps if step.step == record.dump.step)
    assert reason is record.steps[4], "the fifth, not the one that was planned meanwhile"
    assert reason.num_sampled_tokens == 0
    assert [event.kind for event in record.events][-1] is Event.STEP_FAILED
    llm.shutdown()
    assert llm.run_dir is not None
    assert summarize(llm.run_dir).num_steps == len(record.steps)


def test_a_step_that_fails_in_process_is_written_down(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_llama, enable_multiprocessing=False, flight_dir=tmp_path, **SETTINGS) as llm:
        expected = llm.generate(prompts(2), PARAMS, use_tqdm=False)
        assert len(expected) == 2
        core: EngineCore = llm.llm_engine.engine_core._core
        monkeypatch.setattr(core.scheduler, "update_from_output", lambda *_: 1 // 0)
        with pytest.raises(EngineDeadError, match="a step failed") as caught:
            llm.generate(prompts(2), PARAMS, use_tqdm=False)
        record = record_named_in(str(caught.value))
        assert record.dump is not None
        assert record.dump.reason is FlightReason.CRASH
        assert record.steps[-1].num_sampled_tokens == 0


def test_on_request_by_signal_and_at_a_slow_step(tiny_llama: Path, tmp_path: Path) -> None:
    with LLM(
        tiny_llama,
        flight_dir=tmp_path,
        flight_recorder_steps=5,
        flight_slow_step_s=1e-6,
        max_num_seqs=2,
        **SETTINGS,
    ) as llm:
        tokens = [
            one.outputs[0].token_ids for one in llm.generate(prompts(4), PARAMS, use_tqdm=False)
        ]
        path = llm.dump_flight_record()
        assert Path(path).name.startswith("flight-api-core-")
        os.kill(core_pid(llm), signal.SIGUSR2)
        for reason in ("signal", "slow_step"):
            wait_until(lambda reason=reason: list(tmp_path.glob(f"flight-{reason}-core-*")), reason)
        again = llm.generate(prompts(4), PARAMS, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in again] == tokens
        record = read_flight(path)
        assert len(record.steps) == 5
        assert record.steps[-1].finished
        assert len(list(tmp_path.glob("flight-slow_step-*"))) == 1, "at most one a minute"
    shown = subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "flight", "show", path, "--last", "3"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"COLUMNS": "140"},
    ).stdout
    for part in (
        "why: api",
        "The last 3 of 5 steps",
        "execute_context_0(0)_generation",
        "finished",
    ):
        assert part in shown, part


def test_without_a_recorder(tiny_llama: Path, tmp_path: Path) -> None:
    with LLM(tiny_llama, flight_recorder_steps=0, flight_dir=tmp_path, **SETTINGS) as llm:
        with pytest.raises(IsinglassError, match="flight_recorder_steps is 0"):
            llm.dump_flight_record()
        os.kill(core_pid(llm), signal.SIGUSR2)  # means nothing, and ends nothing
        time.sleep(0.3)
        assert llm.generate(prompts(1), PARAMS, use_tqdm=False)
    assert list(tmp_path.iterdir()) == []
