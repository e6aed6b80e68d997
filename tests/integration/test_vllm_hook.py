"""The vllm hook on a real vLLM: its labels are vLLM's own, its trace opens, its tokens stay.

Needs an interpreter with vLLM 0.32 (CPU build), named by ISINGLASS_TEST_VLLM_PYTHON.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

from instrumentation import Phase, format_step_label
from instrumentation.labels import StepLabel
from tests.tiny_models import build_tiny_checkpoint
from traces.journal_reader import Run, read_run
from traces.perfetto import write_perfetto

# Before the fixture that cleans the environment.
VLLM_PYTHON = os.environ.get("ISINGLASS_TEST_VLLM_PYTHON")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parents[1] / "support" / "vllm_run.py"
MAIN = "import sys; from engine.cli.main import main; sys.exit(main())"
TIMEOUT_S = 600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not VLLM_PYTHON,
        reason="ISINGLASS_TEST_VLLM_PYTHON names no interpreter that has vLLM",
    ),
]

WITNESS = """
import functools, json, os

def witness(module):
    '''Note down what vLLM's scheduler answers, and vLLM's own label of it.'''
    from vllm.v1.utils import compute_iteration_details
    schedule = module.Scheduler.schedule

    @functools.wraps(schedule)
    def schedule_and_note(self, *args, **kwargs):
        output = schedule(self, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            details = compute_iteration_details(output)
            blocks = self.kv_cache_manager.block_pool.blocks
            note = {
                "scheduled": output.num_scheduled_tokens,
                "label": [
                    details.num_ctx_requests, details.num_ctx_tokens,
                    details.num_generation_requests, details.num_generation_tokens,
                ],
                "running": len(self.running),
                "cached_free": sum(
                    b.ref_cnt == 0 and b.block_hash is not None and not b.is_null for b in blocks
                ),
                "free": self.kv_cache_manager.block_pool.get_num_free_blocks(),
            }
            with open(os.environ["WITNESS_FILE"], "a") as stream:
                stream.write(json.dumps(note) + "\\n")
        return output

    module.Scheduler.schedule = schedule_and_note

witness.target = "vllm.v1.core.sched.scheduler"
"""


class HookedRun(NamedTuple):
    """What came of running vLLM with the hook, and without."""

    run: Run
    notes: list[dict[str, Any]]
    tokens: list[list[int]]
    tokens_without: list[list[int]]
    log: str


def last_line(done: subprocess.CompletedProcess[str]) -> list[list[int]]:
    """The tokens that the script printed."""
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    tokens: list[list[int]] = json.loads(lines[-1])
    return tokens


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> HookedRun:
    """One run with the hook and a witness of the scheduler, and one without."""
    folder = tmp_path_factory.mktemp("vllm")
    # vLLM's CPU attention wants heads of 32 at least.
    checkpoint = build_tiny_checkpoint(
        folder / "model", "llama", hidden_size=128, num_attention_heads=4, intermediate_size=128
    )
    package = folder / "path" / "witness-1.dist-info"
    package.mkdir(parents=True)
    (folder / "path" / "witness_hook.py").write_text(textwrap.dedent(WITNESS))
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: witness\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[isinglass.hooks]\nwitness = witness_hook:witness\n")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("ISINGLASS_")
    } | {
        "PYTHONPATH": str(folder / "path"),
        "WITNESS_FILE": str(folder / "notes"),
        "VLLM_NO_USAGE_STATS": "1",
    }

    def call(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    assert VLLM_PYTHON is not None
    program = [VLLM_PYTHON, str(SCRIPT), str(checkpoint)]
    names = ["vllm", "witness", "--dir", str(folder / "run")]
    hooks = call(sys.executable, "-c", MAIN, "hooks", "run", *names, "--", *program)
    tokens = last_line(hooks)
    notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    without = last_line(call(*program))
    return HookedRun(read_run(folder / "run"), notes, tokens, without, hooks.stderr)


def test_tokens_are_those_of_vllm_without_the_hook(hooked: HookedRun) -> None:
    assert hooked.tokens == hooked.tokens_without
    assert "failed and is counted" not in hooked.log
    assert "is skipped" not in hooked.log


def test_each_steps_label_is_the_schedulers_own(hooked: HookedRun) -> None:
    steps = hooked.run.steps
    assert [step.step for step in steps] == list(range(len(hooked.notes)))
    assert [step.label for step in steps] == [StepLabel(*note["label"]) for note in hooked.notes]
    kinds = {(step.num_context_requests > 0, step.num_generation_requests > 0) for step in steps}
    assert (True, True) in kinds
    assert (False, True) in kinds


def test_each_steps_requests_queues_and_blocks_are_the_schedulers_own(hooked: HookedRun) -> None:
    ids = {arrival.request_num: arrival.request_id for arrival in hooked.run.arrivals}
    for step, note in zip(hooked.run.steps, hooked.notes, strict=True):
        pairs = zip(step.scheduled[::2], step.scheduled[1::2], strict=True)
        assert {ids[number]: num_tokens for number, num_tokens in pairs} == note["scheduled"]
        assert step.num_running == note["running"]
        assert step.num_blocks_cached_free == note["cached_free"]
        assert step.num_blocks_free + step.num_blocks_cached_free == note["free"]
    assert any(note["cached_free"] for note in hooked.notes)


def test_the_worker_ran_the_same_steps_with_their_phases(hooked: HookedRun) -> None:
    by_step = {step.step: step for step in hooked.run.worker_steps}
    assert sorted(by_step) == [step.step for step in hooked.run.steps]
    for step in hooked.run.steps:
        worker_step = by_step[step.step]
        assert worker_step.label == step.label
        assert step.begin_ns < worker_step.begin_ns < worker_step.end_ns < step.end_ns
        assert {Phase.PREPARE, Phase.FORWARD, Phase.LOGITS, Phase.SAMPLE} <= set(
            worker_step.phases[::3]
        )
        assert {Phase.SCHEDULE, Phase.EXECUTE, Phase.UPDATE} <= set(step.phases[::3])


def test_requests_have_whole_time_lines(hooked: HookedRun) -> None:
    timelines = hooked.run.timelines
    assert len(timelines) == len(hooked.tokens)
    assert [one.num_generation_tokens for one in timelines] == [len(t) for t in hooked.tokens]
    assert {one.finish_reason for one in timelines} == {"length"}
    for one in timelines:
        assert one.queue_ns + one.prefill_ns + one.decode_ns + one.preempted_ns == one.e2e_ns
        assert min(one.intake_ns, one.queue_ns, one.prefill_ns, one.decode_ns) > 0
    assert sum(step.num_sampled_tokens for step in hooked.run.steps) == sum(map(len, hooked.tokens))
    assert any(one.num_cached_tokens for one in timelines)
    assert any(one.preemptions for one in timelines)
    num_preempted = sum(step.num_preempted for step in hooked.run.steps)
    assert num_preempted == sum(len(one.preemptions) for one in timelines)


def test_the_trace_opens(hooked: HookedRun, tmp_path: Path) -> None:
    trace = proto.Trace()
    trace.ParseFromString(write_perfetto(hooked.run.folder, tmp_path / "trace").read_bytes())
    names: list[str] = []
    interned: dict[tuple[int, int], str] = {}
    for packet in trace.packet:
        sequence = packet.trusted_packet_sequence_id
        for entry in packet.interned_data.event_names:
            interned[sequence, entry.iid] = entry.name
        event = packet.track_event
        if event.type == proto.TrackEvent.TYPE_SLICE_BEGIN:
            names.append(event.name or interned[sequence, event.name_iid])
    labels = [format_step_label(step.label) for step in hooked.run.steps]
    for label in set(labels):
        assert names.count(label) == 2 * labels.count(label)  # of the core and of the worker
    processes = {
        packet.track_descriptor.process.process_name
        for packet in trace.packet
        if packet.track_descriptor.HasField("process")
    }
    assert {"EngineCore", "Worker 0"} <= processes
