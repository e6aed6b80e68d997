"""Whatever dies, and whenever: a named error, soon, and nothing left behind."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from engine import (
    LLM,
    CheckpointError,
    EngineDeadError,
    EngineStartError,
    IsinglassError,
    LogitsProcessorError,
    ModelNotFoundError,
    SamplingParams,
    TokenizerError,
    UnsupportedModelError,
)
from engine.checkpoint.locate import embedded_model_path
from instrumentation import Event, RequestTimeline
from tests.integration.conftest import SMALL
from tests.support.measures import counter
from tests.support.scripts import (
    children_of_this_process,
    is_running,
    script,
    socket_folders,
)
from tests.waiting import PATIENCE_S, SOON_S, wait_until
from traces.journal_reader import read_run
from traces.perfetto import write_perfetto
from traces.summary import summarize

LONG = SamplingParams(temperature=0, max_tokens=30_000, ignore_eos=True)
"""A request that would take a minute."""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own, with a path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def kill_soon(llm: LLM) -> tuple[threading.Thread, list[float]]:
    """SIGKILL the core once it has made some steps; the list receives the time of it."""
    killed_at: list[float] = []

    def kill() -> None:
        wait_until(lambda: counter(llm, "isinglass_steps_total") > 20)
        if llm.run_dir is not None:  # what is recorded is written out a while later
            wait_until(lambda: len(read_run(llm.run_dir).steps) > 3)
        killed_at.append(time.monotonic())
        os.kill(llm.llm_engine.engine_core.core_pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread, killed_at


def test_death_of_the_core_during_generation(long_llama: Path, temporary: Path) -> None:
    llm = LLM(long_llama, skip_tokenizer_init=True, trace_dir=temporary / "runs", **SMALL)
    pid = llm.llm_engine.engine_core.core_pid
    thread, killed_at = kill_soon(llm)
    with pytest.raises(EngineDeadError, match="killed by signal 9") as caught:
        llm.generate([[5, 6, 7]] * 3, LONG, use_tqdm=False)
    assert time.monotonic() - killed_at[0] < SOON_S
    assert caught.value.exit_code == -signal.SIGKILL
    thread.join()
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([[5, 6, 7]], LONG, use_tqdm=False),
        llm.reset_prefix_cache,
        lambda: llm.llm_engine.add_request("a", [5], LONG),
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            call()
        assert time.monotonic() - began < SOON_S
    errors = [
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "isinglass_requests_finished_total"
        and metric.labels["finish_reason"] == "error"
    ]
    # The two requests that came after its death have ended too.
    assert errors == [3 + 2]
    llm.shutdown()
    assert not is_running(pid)
    assert not socket_folders(temporary)

    # What the core had recorded until then is there, and every view of it works.
    assert llm.run_dir is not None
    run = read_run(llm.run_dir)
    assert len(run.steps) > 3
    assert {timeline.finish_reason for timeline in run.of_type(RequestTimeline)} == {"error"}
    assert [event.value for event in run.events if event.kind is Event.ENGINE_DEAD] == [-9]
    summary = summarize(llm.run_dir)
    assert summary.num_steps == len(run.steps)
    assert summary.requests.count == 3 + 2
    labels = {label.encode() for label in (group.name for group in summary.steps_by_label)}
    trace = write_perfetto(llm.run_dir).read_bytes()
    assert labels
    assert all(label in trace for label in labels)


def engine_up(llm: LLM) -> float:
    """What its metrics say of the core."""
    (metric,) = [one for one in llm.get_metrics() if one.name == "isinglass_engine_up"]
    return metric.value


def test_death_of_an_idle_core(tiny_llama: Path, temporary: Path) -> None:
    with LLM(tiny_llama, skip_tokenizer_init=True, **SMALL) as llm:
        assert engine_up(llm) == 1
        os.kill(llm.llm_engine.engine_core.core_pid, signal.SIGKILL)
        # Whoever watches the endpoint learns of it without a request.
        wait_until(lambda: engine_up(llm) == 0, "the engine is still up")
        with pytest.raises(EngineDeadError) as caught:
            llm.generate([[5]], use_tqdm=False)
        assert caught.value.exit_code == -signal.SIGKILL
    assert not socket_folders(temporary)


def test_termination_of_the_core(tiny_llama: Path, temporary: Path) -> None:
    with LLM(tiny_llama, skip_tokenizer_init=True, **SMALL) as llm:
        pid = llm.llm_engine.engine_core.core_pid
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_running(pid), "still running")
        with pytest.raises(EngineDeadError) as caught:
            llm.generate([[5]], use_tqdm=False)
        assert caught.value.exit_code == 0, "it stops in good order"
    assert not socket_folders(temporary)


def test_an_error_in_a_step_tells_its_cause(tiny_llama: Path, temporary: Path) -> None:
    """A user's logits processor raises in the core."""
    processor = "tests.support.processors:Raises"
    with LLM(tiny_llama, skip_tokenizer_init=True, logits_processors=[processor], **SMALL) as llm:
        with pytest.raises(EngineDeadError) as caught:
            llm.generate([[5, 6]], LONG.clone(max_tokens=5), use_tqdm=False)
        assert "this processor always raises" in "".join(caught.value.__notes__)
        assert caught.value.exit_code == 1
        assert isinstance(caught.value.__cause__, LogitsProcessorError)
        assert "logits processor Raises: apply raised ZeroDivision" in str(caught.value.__cause__)
        with pytest.raises(EngineDeadError, match="logits processor Raises: apply raised"):
            llm.generate([[5, 6]], LONG, use_tqdm=False)
    assert not children_of_this_process()


@pytest.mark.parametrize("how", ["raises", "none", "width"])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_request_fails_alone_in_its_logits_processor(
    how: str, async_scheduling: bool, tiny_llama: Path
) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9], list(range(3, 40)), [11]]
    each = [params.clone(seed=seed) for seed in range(4)]
    faulty = list(each)
    faulty[1] = each[1].clone(extra_args={"fails_after": 4, "how": how})
    faulty[2] = each[2].clone(extra_args={"fails_after": 0, "how": how}, n=2)
    settings = SMALL | {"max_num_seqs": 3, "async_scheduling": async_scheduling}
    processor = "tests.support.processors:FailsAfter"
    with LLM(
        tiny_llama, skip_tokenizer_init=True, logits_processors=[processor], **settings
    ) as llm:
        expected = llm.generate(prompts, each, use_tqdm=False)
        outputs = llm.generate(prompts, faulty, use_tqdm=False)
        for index in (0, 3):
            assert outputs[index].error is None
            assert outputs[index].outputs[0].token_ids == expected[index].outputs[0].token_ids
        for index, num_tokens in ((1, 4), (2, 0)):
            assert outputs[index].finished
            assert "logits processor FailsAfter: the request's callable r" in outputs[index].error
            for completion in outputs[index].outputs:
                assert completion.finish_reason == "error"
                assert len(completion.token_ids) == num_tokens
        assert outputs[1].outputs[0].token_ids == expected[1].outputs[0].token_ids[:4]
        again = llm.generate(prompts, each, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in again] == [
            one.outputs[0].token_ids for one in expected
        ]
        assert llm.llm_engine.call_utility("check_integrity") is True


def test_a_message_that_cannot_be_read_ends_only_its_own_request(tiny_llama: Path) -> None:
    with LLM(tiny_llama, skip_tokenizer_init=True, **SMALL) as llm:
        expected = llm.generate([[5, 6, 7]], LONG.clone(max_tokens=200), use_tqdm=False)
        engine = llm.llm_engine
        client = engine.engine_core
        nested = msgspec.Raw(b"\x91" * 3000 + b"\x90")
        engine.add_request("good", [5, 6, 7], LONG.clone(max_tokens=200))
        with pytest.MonkeyPatch.context() as patch:
            # What no check in the caller has caught, whatever that may be.
            patch.setattr("engine.types.sampling.check_extra_args", lambda value: None)
            patch.setattr("engine.types.sampling.copied", lambda value: value)
            engine.add_request("deep", [5], LONG.clone(extra_args={"a": nested}))
        for code, frame in [
            (b"\x00", b"\xff"),
            (b"\x00", b""),
            (b"\x02", b"\x01"),
            (b"\x7f", b"\x90"),
            (b"\x10", b"\x90"),
            (b"", b""),
        ]:
            client._core.input.send_multipart([b"0", code, frame])
        with pytest.raises(IsinglassError, match="could not read the message"):
            client.call_utility(5)  # type: ignore[arg-type]
        finished = {}
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        assert finished["deep"].outputs[0].finish_reason == "error"
        assert "could not read the message: RecursionError" in finished["deep"].error
        tokens = [finished["good"].outputs[0].token_ids, expected[0].outputs[0].token_ids]
        assert tokens[0] == tokens[1]


def test_a_second_ctrl_c_while_the_core_boots(tiny_llama: Path) -> None:
    with script("start()", model=tiny_llama) as running:
        running.wait_for_core()
        began = time.monotonic()
        for _ in range(3):
            running.interrupt()
            time.sleep(0.03)
        code, _, _ = running.finish()
        assert code == -signal.SIGINT
        assert time.monotonic() - began < SOON_S
        running.assert_nothing_left()


def test_a_ctrl_c_while_the_core_is_being_stopped(long_llama: Path) -> None:
    """The core is stopped (SIGSTOP), so that it does not answer to being asked.

    It would be waited for until long after we have lost patience.
    """
    body = f"""
import os, signal, threading, time
llm = start(engine_shutdown_timeout_s={2 * PATIENCE_S})
os.kill(llm.llm_engine.engine_core.core_pid, signal.SIGSTOP)
threading.Timer(0.5, say, ["stopping"]).start()
try:
    llm.shutdown()
except KeyboardInterrupt:
    say("caught")
llm.shutdown()
say("left", os.listdir(os.environ["TMPDIR"]))
"""
    with script(body, model=long_llama) as running:
        running.wait_for("stopping")
        running.interrupt()
        running.wait_for("caught")
        assert "isinglass-" not in running.wait_for("left")
        assert running.finish()[0] == 0
        running.assert_nothing_left()


def test_too_few_file_descriptors(tiny_llama: Path) -> None:
    """However far the start comes with those that there are."""
    body = """
import os, resource
import engine.transport.mp_client, engine.frontend.llm_engine
from engine import EngineStartError
before = sorted(os.listdir("/proc/self/fd"))
for num_free in (1, 4, 8, 12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + num_free, 1 << 12))
    try:
        start()
    except EngineStartError as error:
        say("refused", "Too many open files" in str(error) and "ulimit -n" in str(error))
    say("as before", sorted(os.listdir("/proc/self/fd")) == before)
resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 12, 1 << 12))
say("tokens", *generate(start()))
"""
    with script(body, model=tiny_llama) as running:
        for _ in range(4):
            assert running.wait_for("refused") == "True"
            assert running.wait_for("as") == "before True"
        assert len(running.wait_for("tokens").split()) == 5
        running.finish()
        running.assert_nothing_left()


def test_death_of_the_caller(long_llama: Path) -> None:
    with script("llm = start()\ngenerate(llm, 30_000)", model=long_llama) as running:
        running.wait_for("core")
        time.sleep(0.5)
        running.process.kill()
        running.assert_nothing_left()


def test_termination_of_the_caller(long_llama: Path) -> None:
    with script("llm = start()\ngenerate(llm, 30_000)", model=long_llama) as running:
        running.wait_for("core")
        time.sleep(0.5)
        running.process.terminate()
        code, _, _ = running.finish()
        assert code == -signal.SIGTERM
        running.assert_nothing_left()


@pytest.mark.usefixtures("heeded_hangups")
def test_a_terminal_that_is_closed(long_llama: Path) -> None:
    """All that was started there gets SIGHUP, and the core is still there to tidy up."""
    with script("llm = start()\ngenerate(llm, 30_000)", model=long_llama) as running:
        running.wait_for("core")
        os.killpg(running.process.pid, signal.SIGHUP)
        code, _, _ = running.finish()
        assert code == -signal.SIGHUP
        running.assert_nothing_left()


@pytest.mark.parametrize("body", ["llm = start()\n", "with start() as llm:\n    "])
def test_ctrl_c_ends_a_script_cleanly(body: str, long_llama: Path) -> None:
    with script(body + "generate(llm, 30_000)", model=long_llama) as running:
        running.wait_for("core")
        time.sleep(0.5)
        began = time.monotonic()
        running.interrupt()
        code, _, err = running.finish()
        # Python ends itself by the signal, so that a shell loop around it stops too.
        assert code == -signal.SIGINT
        assert time.monotonic() - began < SOON_S
        assert "KeyboardInterrupt" in err
        assert "EngineDeadError" not in err
        running.assert_nothing_left()


def test_ctrl_c_during_start_up(tiny_llama: Path) -> None:
    with script("start()", model=tiny_llama) as running:
        running.wait_for_core()
        time.sleep(0.5)  # it is under way, and takes longer than that
        running.interrupt()
        code, _, _ = running.finish()
        assert code == -signal.SIGINT
        running.assert_nothing_left()


def test_ctrl_c_that_a_script_catches(long_llama: Path) -> None:
    body = """
llm = start()
expected = generate(llm)
for _ in range(2):
    try:
        say("going")
        generate(llm, 30_000)
    except KeyboardInterrupt:
        say("caught")
    assert generate(llm) == expected
    assert llm.llm_engine.call_utility("check_integrity") is True
say("good")
"""
    with script(body, model=long_llama) as running:
        for _ in range(2):
            running.wait_for("going")
            time.sleep(0.4)
            running.interrupt()
            running.wait_for("caught")
        running.wait_for("good")
        code, _, err = running.finish()
        assert (code, err) == (0, "")
        running.assert_nothing_left()


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("with start() as llm:\n    raise RuntimeError('mine')", 1, "RuntimeError: mine"),
        ("llm = start()\nraise RuntimeError('mine')", 1, "RuntimeError: mine"),
        ("llm = start()\nimport sys\nsys.exit(7)", 7, ""),
        ("start()\nsay('dropped')", 0, ""),
        # A fork that ends must not take the parent's engine down.
        (
            "import os\nllm = start()\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\n"
            "say(generate(llm))\nif os.fork() == 0:\n    raise SystemExit\nos.wait()\n"
            "say(generate(llm))",
            0,
            "",
        ),
    ],
    ids=["raises-in-with", "raises", "exits", "drops", "forks"],
)
def test_ends_of_scripts(body: str, code: int, said: str, tiny_llama: Path) -> None:
    with script(body, model=tiny_llama) as running:
        actual, _, err = running.finish()
        assert actual == code, err
        assert said in err
        if not said:
            assert err == ""
        running.assert_nothing_left()


@pytest.mark.parametrize("by_stdin", [False, True])
def test_a_script_needs_no_guard(by_stdin: bool, tiny_llama: Path) -> None:
    body = "llm = start()\nsay('tokens', *generate(llm))"
    with script(body, model=tiny_llama, by_stdin=by_stdin) as running:
        assert len(running.wait_for("tokens").split()) == 5
        code, out, err = running.finish()
        assert (code, out, err) == (0, "", ""), "the script ran once"
        running.assert_nothing_left()


@pytest.mark.slow
def test_a_class_of_the_script_itself(tiny_llama: Path) -> None:
    """This one needs the guard, because the core loads the script."""
    body = """
from engine import LogitsProcessor

class Only9(LogitsProcessor):
    def __init__(self, config, device, is_pin_memory): pass
    def is_argmax_invariant(self): return False
    def update_state(self, batch_update): pass
    def apply(self, logits):
        logits[:, 9] = 1e9
        return logits

if __name__ == "__main__":
    say("tokens", *generate(start(logits_processors=[Only9])))
"""
    with script(body, model=tiny_llama) as running:
        assert running.wait_for("tokens").split() == ["9"] * 5
        assert running.finish()[0] == 0
        running.assert_nothing_left()
    with script(body, model=tiny_llama, by_stdin=True) as running:
        code, _, err = running.finish()
        assert code == 1
        assert "ConfigError" in err
        assert not socket_folders(running.folder)


# -- cores that do not come up ---------------------------------------------------------------------


def copied(folder: Path, name: str, source: Path) -> Path:
    target = folder / name
    shutil.copytree(source, target)
    return target


def truncated_safetensors(folder: Path, tiny: Path) -> Path:
    model = copied(folder, "truncated", tiny)
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size // 2)
    return model


def wrong_shapes(folder: Path, tiny: Path) -> Path:
    model = copied(folder, "shapes", tiny)
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name][:-1].clone()
    save_file(weights, model / "model.safetensors")
    return model


def missing_weight(folder: Path, tiny: Path) -> Path:
    model = copied(folder, "missing", tiny)
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.2.self_attn.k_proj.weight"]
    save_file(weights, model / "model.safetensors")
    return model


def unknown_architecture(folder: Path, tiny: Path) -> Path:
    model = copied(folder, "unknown", tiny)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}
    (model / "config.json").write_text(json.dumps(config))
    return model


def truncated_gguf(folder: Path, tiny: Path) -> Path:
    model = folder / "cut.gguf"
    with embedded_model_path().open("rb") as source:
        # Beyond the header and the vocabulary, so that only the weights are missing.
        model.write_bytes(source.read(20 << 20))
    return model


def no_such_folder(folder: Path, tiny: Path) -> Path:
    return folder / "nowhere"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (truncated_safetensors, CheckpointError),
        (wrong_shapes, CheckpointError),
        (missing_weight, CheckpointError),
        (unknown_architecture, UnsupportedModelError),
        (truncated_gguf, CheckpointError),
        (no_such_folder, ModelNotFoundError),
    ],
)
def test_a_model_that_cannot_be_loaded(
    make: Callable[[Path, Path], Path],
    error: type[IsinglassError],
    tiny_llama: Path,
    tmp_path: Path,
    temporary: Path,
) -> None:
    model = make(tmp_path, tiny_llama)
    before = children_of_this_process()
    with pytest.raises(error):
        LLM(model, skip_tokenizer_init=True, **SMALL)
    assert children_of_this_process() == before
    assert not socket_folders(temporary)


def test_a_model_without_a_tokenizer(tiny_llama: Path, temporary: Path) -> None:
    before = children_of_this_process()
    with pytest.raises(TokenizerError):
        LLM(tiny_llama, **SMALL)
    assert children_of_this_process() == before
    assert not socket_folders(temporary)


def test_a_core_that_is_not_ready_in_time(tiny_llama: Path, temporary: Path) -> None:
    before = children_of_this_process()
    with pytest.raises(EngineStartError, match=re.escape("not ready after 0.05 s")):
        LLM(tiny_llama, skip_tokenizer_init=True, engine_ready_timeout_s=0.05, **SMALL)
    assert children_of_this_process() == before
    assert not socket_folders(temporary)


def test_a_core_of_another_version(
    tiny_llama: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.transport.mp_client.PROTOCOL_VERSION", 4711)
    with pytest.raises(EngineStartError, match="4711"):
        LLM(tiny_llama, skip_tokenizer_init=True, **SMALL)
    assert not socket_folders(temporary)


def test_a_core_that_dies_while_it_starts(
    tiny_llama: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter that cannot even begin: its exit code and its last words are in the error."""
    stand_in = temporary / "python"
    stand_in.write_text("#!/bin/sh\necho 'no luck today' >&2\nexit 3\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    with pytest.raises(EngineStartError, match=r"(?s)exit code 3.*no luck today") as caught:
        LLM(tiny_llama, skip_tokenizer_init=True, **SMALL)
    assert isinstance(caught.value.__cause__, EngineDeadError)
    assert caught.value.__cause__.exit_code == 3
    assert not socket_folders(temporary)
