"""Torch profiles of a running engine: same tokens, one clock, bounded, and out of the way."""

import json
import shutil
import tempfile
import threading
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import ConfigError, IsinglassError, ProfilerError
from instrumentation import ProfileState, ProfileStatus, ThreadName
from instrumentation.labels import format_step_label
from tests.integration.conftest import SMALL
from tests.support.perfetto_files import Drawn, Loaded, load
from tests.support.reference import random_prompts
from tests.tiny_models import VOCAB_SIZE
from tests.waiting import wait_until
from traces.cli import run_convert
from traces.journal_reader import Run, read_run
from traces.perfetto import write_perfetto

SETTINGS = SMALL | {"skip_tokenizer_init": True, "max_num_batched_tokens": 64}
PROMPTS = random_prompts(11, [40, 3, 90, 17], VOCAB_SIZE)
PHASES = {"prepare", "forward", "logits", "sample", "readback"}


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def generate(llm: LLM, num_tokens: int) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params(num_tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def wait_for_file(llm: LLM) -> ProfileStatus:
    unfinished = (ProfileState.RUNNING, ProfileState.EXPORTING)
    wait_until(lambda: llm.profile_status()[0].state not in unfinished, "it is not written")
    return llm.profile_status()[0]


def document_of(status: ProfileStatus) -> dict[str, Any]:
    assert status.state == ProfileState.DONE, status
    return json.loads(Path(status.file).read_text())


@dataclass
class Profiled:
    """A run of which the middle was profiled."""

    run: Run
    status: ProfileStatus
    tokens: list[list[int]]
    unprofiled: list[list[int]]
    stop_s: float
    written_s: float
    """From the same time on, when its file was there."""
    num_steps_after_stop: int


@pytest.fixture(scope="module")
def profiled(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    """Start before, and stop from another thread in the middle of, one generation."""
    folder = tmp_path_factory.mktemp("profiled")
    num_tokens = 150
    with LLM(tiny_llama, trace_dir=folder, **SETTINGS) as llm:
        unprofiled = generate(llm, num_tokens)
        llm.reset_prefix_cache()
        (started,) = llm.start_profile(max_steps=10_000)
        assert started.state == ProfileState.RUNNING
        tokens: list[list[int]] = []
        thread = threading.Thread(target=lambda: tokens.extend(generate(llm, num_tokens)))
        thread.start()
        while llm.profile_status()[0].num_steps < 20:
            time.sleep(0.005)
        began_s = time.monotonic()
        (stopped,) = llm.stop_profile()
        stop_s = time.monotonic() - began_s
        stopped_ns = time.monotonic_ns()
        assert stopped.state in (ProfileState.EXPORTING, ProfileState.DONE)
        thread.join()
        status = wait_for_file(llm)
        written_s = time.monotonic() - began_s
    run = read_run(llm.run_dir)
    after = sum(step.begin_ns > stopped_ns for step in run.worker_steps)
    return Profiled(run, status, tokens, unprofiled, stop_s, written_s, after)


@pytest.fixture(scope="module")
def drawn(profiled: Profiled, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    output = tmp_path_factory.mktemp("drawn") / "trace.pftrace"
    return load(write_perfetto(profiled.run.folder, output).read_bytes())


def on_track(loaded: Loaded, name: str) -> list[Drawn]:
    return [piece for piece in loaded.slices if loaded.track_name(piece.track) == name]


def test_tokens_are_the_same_and_keep_flowing(profiled: Profiled) -> None:
    assert profiled.tokens == profiled.unprofiled
    assert profiled.status.end_reason == "stop"
    assert 20 <= profiled.status.num_steps < len(profiled.run.worker_steps) // 2
    assert profiled.num_steps_after_stop > 10
    assert profiled.stop_s < profiled.written_s / 2


def test_the_chrome_trace_names_its_rank_and_its_steps(profiled: Profiled) -> None:
    document = document_of(profiled.status)
    assert document["distributedInfo"] == {"rank": 0, "world_size": 1, "backend": "cpu"}
    name = Path(profiled.status.file).name
    assert f"rank0.pid{profiled.status.pid}." in name
    assert Path(profiled.status.file).parent == profiled.run.folder
    labels = [
        event["name"]
        for event in sorted(document["traceEvents"], key=lambda event: event.get("ts", 0))
        if event["name"].startswith("execute_")
    ]
    anchors = [pair for part in document["isinglass"]["parts"] for pair in part["anchors"]]
    recorded = [
        format_step_label(step.label)
        for step in profiled.run.worker_steps
        if anchors[0][0] <= step.begin_ns <= step.end_ns <= anchors[-1][1]
    ]
    assert labels == recorded
    assert len(labels) == profiled.status.num_steps


def test_operators_lie_within_the_phases_of_their_steps(profiled: Profiled, drawn: Loaded) -> None:
    operators = on_track(drawn, "operators")
    error_ns = profiled.status.clock_error_ns
    assert 0 < error_ns < 1_000_000
    assert {piece.arguments["clock_error_ns"] for piece in operators} == {error_ns}
    phases = [piece for piece in on_track(drawn, ThreadName.WORKER) if piece.name in PHASES]
    inside = Counter[tuple[str, str]]()
    for piece in operators:
        holders = [
            phase.name
            for phase in phases
            if phase.begin_ns - error_ns <= piece.begin_ns
            and piece.end_ns <= phase.end_ns + error_ns
        ]
        assert len(holders) == 1, (piece, holders)
        inside[piece.name, holders[0]] += 1
    # Each of the three layers looks its keys and values up in each step's forward pass.
    products = sum(
        number for (name, _), number in inside.items() if name in ("aten::mm", "aten::linear")
    )
    assert products >= 3 * profiled.status.num_steps
    assert {where for name, where in inside if name == "aten::silu"} <= {"forward"}
    assert {where for name, where in inside if name == "aten::embedding"} == {"forward"}
    assert inside["aten::embedding", "forward"] == profiled.status.num_steps


def test_operators_are_below_the_worker(profiled: Profiled, drawn: Loaded) -> None:
    by_name = {drawn.track_name(uuid): track for uuid, track in drawn.tracks.items()}
    worker, operators = by_name[ThreadName.WORKER], by_name["operators"]
    assert operators.parent_uuid == worker.parent_uuid
    siblings = [track for track in drawn.tracks.values() if track.parent_uuid == worker.parent_uuid]
    ranks = sorted(track.sibling_order_rank for track in siblings)
    assert ranks[ranks.index(worker.sibling_order_rank) + 1] == operators.sibling_order_rank
    names = {piece.name for piece in on_track(drawn, "operators")}
    assert not names & PHASES
    assert max(piece.depth for piece in on_track(drawn, "operators")) > 0, "they nest"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs, about pandas
def test_holistic_trace_analysis_loads_it(profiled: Profiled, tmp_path: Path) -> None:
    trace = pytest.importorskip(
        "hta.common.trace",
        reason="HolisticTraceAnalysis is not installed",
        exc_type=ImportError,
    )
    shutil.copy(profiled.status.file, tmp_path)
    loaded = trace.Trace(trace_dir=str(tmp_path))
    assert list(loaded.trace_files) == [0]
    loaded.parse_traces(use_multiprocessing=False)
    frame = loaded.get_trace(0)
    names = loaded.symbol_table.get_sym_table()
    counted = Counter(names[index] for index in frame["name"])
    assert counted["aten::embedding"] == counted["forward"] == profiled.status.num_steps
    assert sorted(loaded.get_iterations(0)) == list(range(profiled.status.num_steps))


def test_limits_errors_and_several_profiles(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(tiny_llama, trace_dir=tmp_path, profiler_dir=tmp_path / "profiles", **SETTINGS) as llm:
        assert llm.profile_status()[0].state == ProfileState.IDLE
        with pytest.raises(ProfilerError, match="there has been none"):
            llm.stop_profile()
        with pytest.raises(ConfigError, match="a whole number from 1 to"):
            llm.start_profile(max_steps=0)
        llm.start_profile(max_steps=6)
        with pytest.raises(ProfilerError, match="running already"):
            llm.start_profile()
        expected = generate(llm, 20)
        first = wait_for_file(llm)
        assert (first.end_reason, first.num_steps) == ("max_steps", 6)
        with pytest.raises(ProfilerError, match="ended by max_steps after 6 steps"):
            llm.stop_profile()
        limit = 1_000_000
        llm.start_profile(max_bytes=limit, record_shapes=True)
        llm.reset_prefix_cache()
        assert generate(llm, 120)[0][:20] == expected[0]
        second = wait_for_file(llm)
        assert second.end_reason == "max_bytes"
        assert second.num_bytes < 2 * limit
        llm.start_profile()
        generate(llm, 10)
    # The third was running when the engine was shut down.
    files = sorted((tmp_path / "profiles").iterdir())
    assert [path.name for path in files] == [
        f"profile.rank0.pid{first.pid}.{number}.pt.trace.json" for number in range(3)
    ]
    assert [str(path) for path in files[:2]] == [first.file, second.file]
    third = json.loads(files[2].read_text())
    assert third["isinglass"]["num_steps"] >= 10

    output = tmp_path / "trace.pftrace"
    arguments = Namespace(run_dir=[llm.run_dir], output=output, profiles=tmp_path / "profiles")
    assert run_convert(arguments) == 0
    assert capsys.readouterr().out.strip() == str(output)
    loaded = load(output.read_bytes())
    names = list(map(loaded.track_name, loaded.tracks))
    assert names.count("operators") == 1, "profiles of one thread share its track"
    lookups = [piece for piece in loaded.slices if piece.name == "aten::embedding"]
    assert len(lookups) == 6 + second.num_steps + third["isinglass"]["num_steps"]


def test_an_unwritable_folder_is_an_error_and_the_engine_lives(
    tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "profiles"
    with LLM(tiny_llama, enable_multiprocessing=False, profiler_dir=folder, **SETTINGS) as llm:
        with pytest.raises(ProfilerError, match="set profiler_dir to a folder"):
            llm.start_profile()
        assert generate(llm, 3)
        assert isinstance(ProfilerError(""), IsinglassError)


def test_without_a_run_the_profile_goes_to_a_new_temporary_folder(tiny_llama: Path) -> None:
    with LLM(
        tiny_llama,
        enable_multiprocessing=False,
        disable_log_stats=True,
        flight_recorder_steps=0,
        **SETTINGS,
    ) as llm:
        llm.start_profile(max_steps=3)
        generate(llm, 5)
        status = wait_for_file(llm)
    folder = Path(status.file).parent
    try:
        assert folder.parent == Path(tempfile.gettempdir())
        names = [event["name"] for event in document_of(status)["traceEvents"]]
        assert sum(name.startswith("execute_") for name in names) == 3
        assert names.count("forward") == 3
    finally:
        shutil.rmtree(folder)
