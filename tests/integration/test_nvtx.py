"""NVTX without a GPU: what a tool is told by an engine whose core runs in a process of its own."""

import ast
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from instrumentation.labels import format_step_label, parse_step_label
from instrumentation.names import PHASES, Phase, Role, ThreadName
from tests.native.nvtx_tool import Line, build_tool, environment_of, ranges_by_thread, read_lines
from tests.support.scripts import script
from traces.journal_reader import ProcessRecords, Run, ThreadRecords, read_run

WORKER_PHASES = ["prepare", "forward", "logits", "sample", "readback"]
BODY = """
settings = {settings!r}
with start(trace_dir="runs", **settings) as llm:
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(3, 60)), [9] * 30]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    run_dir = llm.run_dir
say("tokens", [list(output.outputs[0].token_ids) for output in outputs])
say("run", run_dir)
"""


@dataclass
class Watched:
    """A run, and what the tool was told meanwhile."""

    run: Run
    tokens: list[list[int]]
    lines: dict[int, list[Line]]


def watch(
    model: Path, folder: Path, patch: pytest.MonkeyPatch, *, tool: bool = True, **settings: object
) -> Watched:
    """Run an engine under the tool and read everything before its folder goes."""
    library = build_tool(folder)
    if tool:
        for name, value in environment_of(library, folder / "nvtx").items():
            patch.setenv(name, value)
    body = BODY.replace("{settings!r}", repr({"max_num_batched_tokens": 40} | settings))
    body = body.replace("start(trace_dir", "start_here(trace_dir")
    start = (
        "def start_here(**settings):\n"
        f"    return LLM({str(model)!r}, skip_tokenizer_init=True, log_level='warning',\n"
        "               kv_cache_memory_bytes=32 << 20, **settings)\n"
    )
    with script(start + body, model=model) as running:
        code, out, err = running.finish()
        assert code == 0, err
        said = dict(line.split(" ", 1) for line in out.splitlines())
        run = read_run(running.folder / said["run"])
    return Watched(run, ast.literal_eval(said["tokens"]), read_lines(folder / "nvtx"))


def thread_of(run: Run, name: ThreadName) -> tuple[ProcessRecords, ThreadRecords]:
    return next(pair for pair in run.threads() if pair[1].name == name)


@pytest.fixture(scope="module")
def watched(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("nvtx")
        return watch(tiny_llama, folder, patch, enable_layerwise_nvtx_tracing=True)


def test_everything_is_in_our_domain_and_registered_once(watched: Watched) -> None:
    assert len(watched.lines) == 2  # the caller and the core
    for lines in watched.lines.values():
        assert {line.domain for line in lines} == {"isinglass"}
        assert [line.what for line in lines].count("domain") == 1
        strings = [line.name for line in lines if line.what == "string"]
        assert len(set(strings)) == len(strings)
        assert {line.name for line in lines if line.what == "push"} <= set(strings)


def test_steps_are_the_journals_and_hold_their_phases(watched: Watched) -> None:
    process, thread = thread_of(watched.run, ThreadName.WORKER)
    ranges = ranges_by_thread(watched.lines[process.header.pid])[thread.native_id]
    # Start-up runs the model outside of steps.
    steps = [one for one in ranges if one.depth == 0 and one.name.startswith("execute_")]
    recorded = watched.run.worker_steps
    assert [one.name for one in steps] == [format_step_label(step.label) for step in recorded]
    assert len(steps) == len(watched.run.steps) > 7
    for one, step in zip(steps, recorded, strict=True):
        assert parse_step_label(one.name) == step.label
        inside = [
            other.name
            for other in ranges
            if other.depth == 1 and one.begin_ns <= other.begin_ns <= other.end_ns <= one.end_ns
        ]
        assert inside == WORKER_PHASES
        # The tool's clock is the journal's.
        assert one.begin_ns - 5_000_000 < step.begin_ns
        assert step.end_ns < one.end_ns + 5_000_000


def test_each_thread_has_its_own_phases(watched: Watched) -> None:
    for phase, info in PHASES.items():
        for process, thread in watched.run.threads():
            if process.header.role not in (Role.CALLER, Role.CORE):
                continue
            seen = ranges_by_thread(watched.lines[process.header.pid]).get(thread.native_id, [])
            count = sum(one.name == phase.label for one in seen)
            # No request here has a grammar.
            is_expected = thread.name == info.thread and phase is not Phase.GRAMMAR_BITMASK
            assert (count > 0) == is_expected, (phase, thread.name)


def test_layers_lie_within_the_forward_pass(watched: Watched) -> None:
    process, thread = thread_of(watched.run, ThreadName.WORKER)
    ranges = ranges_by_thread(watched.lines[process.header.pid])[thread.native_id]
    began_ns = next(one.begin_ns for one in ranges if one.name.startswith("execute_"))
    in_steps = [one for one in ranges if one.begin_ns > began_ns]
    names = Counter(one.name for one in in_steps if one.depth >= 2)
    num_steps = len(watched.run.worker_steps)
    layers = [name for name in names if name.startswith("layers.")]
    assert {name.split(".")[1] for name in layers} == {"0", "1", "2"}
    assert {"layers.0", "layers.0.self_attention", "layers.0.self_attention.qkv"} <= set(layers)
    assert {names[name] for name in [*layers, "LlamaForCausalLM", "embedding", "norm"]} == {
        num_steps
    }
    for outer in ("forward", "layers.1", "layers.1.self_attention"):
        outers = [one for one in in_steps if one.name == outer]
        inner = "layers.1" if outer == "forward" else f"{outer}."
        inners = [one for one in in_steps if one.name.startswith(inner) and one.name != outer]
        assert len(outers) == num_steps
        assert len(inners) >= num_steps
        for one in inners:
            assert any(
                out.begin_ns <= one.begin_ns <= one.end_ns <= out.end_ns and out.depth < one.depth
                for out in outers
            )


def test_nothing_is_said_when_it_is_off(
    watched: Watched, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = watch(tiny_llama, tmp_path, monkeypatch, nvtx="off", enable_layerwise_nvtx_tracing=True)
    assert off.lines == {}
    assert off.tokens == watched.tokens


def test_on_without_a_tool_changes_nothing(
    watched: Watched, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = watch(
        tiny_llama,
        tmp_path,
        monkeypatch,
        tool=False,
        nvtx="on",
        enable_layerwise_nvtx_tracing=True,
    )
    assert alone.lines == {}
    assert alone.tokens == watched.tokens
