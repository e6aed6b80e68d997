"""Recordings of a running engine: begun and ended at will, in one thread or another."""

import threading
import time
from pathlib import Path

import pytest

from engine import LLM, ConfigError, EngineDeadError, IsinglassError, SamplingParams
from instrumentation import Event
from tests.integration.conftest import SMALL
from tests.support.measures import counter
from tests.tiny_models import VOCAB_SIZE
from tests.waiting import wait_until
from traces.journal_reader import Run, read_run
from traces.perfetto import write_perfetto
from traces.summary import summarize

SETTINGS = SMALL | {"skip_tokenizer_init": True}


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def generate(llm: LLM, max_tokens: int = 8) -> list[list[int]]:
    prompts = [[(5 * one + token) % (VOCAB_SIZE - 9) + 5 for token in range(12)] for one in (1, 2)]
    outputs = llm.generate(prompts, params(max_tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def roles(run: Run) -> list[str]:
    return sorted(process.header.role for process in run.processes)


@pytest.mark.parametrize("in_process", [False, True])
def test_any_number_of_recordings_each_with_its_own_steps(
    tiny_llama: Path, tmp_path: Path, in_process: bool
) -> None:
    with LLM(tiny_llama, enable_multiprocessing=not in_process, **SETTINGS) as llm:
        tokens = generate(llm)
        assert llm.run_dir is None
        assert llm.stop_trace() is None
        folders = []
        for number in range(3):
            folders.append(llm.start_trace(tmp_path / "runs"))
            with pytest.raises(IsinglassError, match="written already; end it"):
                llm.start_trace(tmp_path / "runs")
            assert generate(llm, 8 + number) == [
                one[:8] + rest[8:]
                for one, rest in zip(tokens, generate(llm, 8 + number), strict=True)
            ]
            assert llm.stop_trace() == folders[-1] == llm.run_dir
            assert generate(llm) == tokens, "not on record"
        assert len(set(folders)) == 3
        assert len(list((tmp_path / "runs").iterdir())) == 3, "refused ones leave no folder"
    with pytest.raises(EngineDeadError):
        llm.start_trace(tmp_path / "runs")
    for number, folder in enumerate(folders):
        run = read_run(folder)
        assert roles(run) == ["caller", "core"]
        assert len(run.timelines) == 4
        assert {one.num_generation_tokens for one in run.timelines} == {8 + number}
        assert sum(step.num_sampled_tokens for step in run.steps) == 4 * (8 + number)
        assert summarize(folder).requests.count == 4
        assert write_perfetto(folder).stat().st_size > 1000


def wait_for_steps(llm: LLM, number: int) -> None:
    """Until the engine has made so many more steps."""
    before = counter(llm, "isinglass_steps_total")
    wait_until(lambda: counter(llm, "isinglass_steps_total") >= before + number)


def test_another_thread_records_while_one_generates(long_llama: Path, tmp_path: Path) -> None:
    with LLM(long_llama, **SETTINGS) as llm:
        thread = threading.Thread(target=generate, args=(llm, 1500))
        thread.start()
        wait_for_steps(llm, 20)
        folder = llm.start_trace(tmp_path)
        wait_for_steps(llm, 100)
        report = llm.request_timeline("0")
        flight = llm.dump_flight_record()
        llm.stop_trace()
        assert thread.is_alive(), "it was under way all the time"
        thread.join()
    run = read_run(folder)
    assert run.steps
    assert run.timelines == []
    assert not report.is_finished
    assert report.timeline.first_scheduled_ns
    assert len(report.steps) > 1
    assert len(read_run(flight).steps) > 1
    assert Path(flight).parent == Path(folder), "next to the recording"


def test_a_bounded_recording_ends_and_the_engine_goes_on(tiny_llama: Path, tmp_path: Path) -> None:
    with LLM(tiny_llama, trace_dir=tmp_path, trace_max_bytes=1 << 16, **SETTINGS) as llm:
        expected = generate(llm, 20)
        for _ in range(100):
            assert generate(llm, 20) == expected
            sizes = [path.stat().st_size for path in Path(llm.run_dir).iterdir()]
            if max(sizes) >= 1 << 16:
                break
        assert generate(llm, 20) == expected
    sizes = {path.name: path.stat().st_size for path in Path(llm.run_dir).iterdir()}
    assert max(sizes.values()) < (1 << 16) + 4096
    run = read_run(llm.run_dir)
    assert Event.RECORDING_ENDED in {event.kind for event in run.events}


@pytest.mark.slow
def test_ring_mode_of_an_engine_reads_as_one_run(tiny_llama: Path, tmp_path: Path) -> None:
    with LLM(tiny_llama, trace_dir=tmp_path, trace_ring_s=1.0, **SETTINGS) as llm:
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            generate(llm, 5)
        num_files = len(list(Path(llm.run_dir).iterdir()))
    assert 6 < num_files <= 12, "two processes, at most six files each"
    run = read_run(llm.run_dir)
    assert roles(run) == ["caller", "core"]
    steps = [step.step for step in run.steps]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert steps[0] > 1
    kept_s = (run.steps[-1].end_ns - run.steps[0].begin_ns) / 1e9
    assert 0.9 < kept_s < 3.0
    assert summarize(llm.run_dir).num_steps == len(steps)
    assert write_perfetto(llm.run_dir).stat().st_size > 1000


def test_recordings_that_cannot_be_made(tiny_llama: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with LLM(tiny_llama, disable_log_stats=True, flight_recorder_steps=0, **SETTINGS) as llm:
        with pytest.raises(ConfigError, match="trace_dir"):
            llm.start_trace(blocked)
        with pytest.raises(IsinglassError, match="recorded: everything is off"):
            llm.start_trace(tmp_path / "runs")
        assert list((tmp_path / "runs").iterdir()) == []
        with pytest.raises(IsinglassError, match="disable_log_stats"):
            llm.request_timeline("0")
