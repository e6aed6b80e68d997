"""Hooks in real programs: start-up, the chain of `sitecustomize`, children, and the commands."""

import gzip
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from instrumentation import Event
from instrumentation.hooks.registry import BUILTIN_HOOKS
from tests.waiting import PATIENCE_S, wait_until
from traces.journal_reader import read_run

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "instrumentation" / "hooks" / "site"
MAIN = "import sys; from engine.cli.main import main; sys.exit(main())"
MARK = "isinglass hooks:"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a program: hooks that tests bring, on the path; bytecode cached, but not in the tree."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(SITE), str(tmp_path / "path")]),
        "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode"),
        "ISINGLASS_HOOKS_DIR": str(tmp_path / "hooks"),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Run:
    """Run Python with these arguments, in the temporary folder."""

    def call(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment | changes,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    return call


def write_user_hooks(folder: Path, source: str, **hooks: str) -> None:
    """A package of users' hooks, as pip would leave it: a module and its entry points."""
    package = folder / "user_hooks-1.dist-info"
    package.mkdir(parents=True)
    (folder / "user_hooks.py").write_text(textwrap.dedent(source))
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: user-hooks\nVersion: 1\n")
    lines = [f"{name} = user_hooks:{function}" for name, function in hooks.items()]
    (package / "entry_points.txt").write_text("\n".join(["[isinglass.hooks]", *lines, ""]))


@pytest.fixture
def tell_hook(tmp_path: Path) -> str:
    """The name of a user's hook that says where it was applied."""
    write_user_hooks(
        tmp_path / "path",
        """
        import os
        def tell(module):
            print("applied to", module.__name__, "with", module.encoder.__name__, flush=True)
        tell.target = "json"
        """,
        tell="tell",
    )
    return "tell"


APPLIED = "applied to json with json.encoder"


def test_without_the_gate_nothing_happens_and_it_takes_next_to_no_time(run: Run) -> None:
    """Some tenths of a millisecond: a fraction of what Python's own start takes."""
    code = (
        "import sys; print([m for m in sys.modules if 'isinglass' in m or m == 'instrumentation'])"
    )
    assert run("-c", code).stdout == "[]\n"
    times_us: dict[str, list[int]] = {"sitecustomize": [], "encodings": []}
    for _ in range(15):
        for line in run("-X", "importtime", "-c", "pass").stderr.splitlines():
            _, in_all_us, name = line.split("|")
            if name.strip() in times_us:
                times_us[name.strip()].append(int(in_all_us))
    assert len(times_us["sitecustomize"]) == 15
    medians = {name: statistics.median(times) for name, times in times_us.items()}
    assert medians["sitecustomize"] < medians["encodings"] / 2


@pytest.mark.parametrize("gate", ["", "tell"])
def test_the_next_sitecustomize_runs_once_under_its_own_name(
    run: Run, tmp_path: Path, tell_hook: str, gate: str
) -> None:
    (tmp_path / "path" / "sitecustomize.py").write_text("print('next', __name__, __file__)")
    (tmp_path / "further").mkdir()
    (tmp_path / "further" / "sitecustomize.py").write_text("print('further')")
    path = os.pathsep.join([str(SITE), str(tmp_path / "path"), str(tmp_path / "further")])
    code = "import sitecustomize, json; print(sitecustomize.__file__)"
    done = run("-c", code, PYTHONPATH=path, ISINGLASS_HOOKS=gate)
    file = tmp_path / "path" / "sitecustomize.py"
    applied = [APPLIED] if gate else []
    assert done.stdout.splitlines() == [f"next sitecustomize {file}", *applied, str(file)]
    assert done.stderr == ""


def test_errors_of_the_next_sitecustomize_are_reported_as_python_does(
    run: Run, tmp_path: Path, tell_hook: str
) -> None:
    (tmp_path / "path" / "sitecustomize.py").write_text("raise ValueError('theirs')")
    alone = run("-c", "import json", PYTHONPATH=str(tmp_path / "path"))
    assert "ValueError: theirs" in alone.stderr
    hooked = run("-c", "import json", ISINGLASS_HOOKS=tell_hook)
    assert (hooked.returncode, hooked.stderr) == (alone.returncode, alone.stderr)
    assert hooked.stdout.splitlines() == [APPLIED]


def test_the_kill_switch_wins(run: Run, tell_hook: str) -> None:
    for value, is_applied in (("1", False), ("0", True), ("", True)):
        done = run("-c", "import json", ISINGLASS_HOOKS=tell_hook, ISINGLASS_HOOKS_DISABLED=value)
        assert (APPLIED in done.stdout) is is_applied


def test_unknown_and_failing_hooks_are_told_and_the_program_runs(run: Run, tmp_path: Path) -> None:
    write_user_hooks(
        tmp_path / "path",
        """
        def bad(module):
            raise KeyError("in the hook")
        bad.target = ("json", "csv")
        """,
        bad="bad",
    )
    done = run("-c", "import json, csv; print('ran')", ISINGLASS_HOOKS="nobody, bad")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert "nobody is skipped: LookupError" in lines[0]
    assert "bad is skipped: KeyError: 'in the hook'" in lines[1]


def test_isolated_interpreters_are_left_alone(run: Run, tell_hook: str) -> None:
    for flag in ("-I", "-E", "-S"):
        assert run(flag, "-c", "import json", ISINGLASS_HOOKS=tell_hook).stdout == ""


def test_children_and_their_children_have_the_hooks(
    run: Run, tmp_path: Path, tell_hook: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, subprocess, sys

            def child():
                import json
                code = "import json"
                subprocess.run([sys.executable, "-c", code], check=True)

            if __name__ == "__main__":
                for method in ("spawn", "forkserver", "fork"):
                    process = multiprocessing.get_context(method).Process(target=child)
                    process.start()
                    process.join()
                    assert process.exitcode == 0
            """
        )
    )
    done = run(str(script), ISINGLASS_HOOKS=tell_hook)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [APPLIED] * 6


@pytest.mark.slow
def test_our_own_engine_core_has_the_hooks(run: Run, tmp_path: Path, tiny_llama: Path) -> None:
    write_user_hooks(
        tmp_path / "path",
        """
        import os, sys
        def core(module):
            module.EngineCore.hooked = True
            print("core", os.getppid() , file=sys.stderr, flush=True)
        core.target = "engine.core.engine_core"
        """,
        core="core",
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom engine import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny_llama)!r}, log_level='warning',"
        " skip_tokenizer_init=True, kv_cache_memory_bytes=32 << 20)\n"
        "out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True),"
        " use_tqdm=False)\n"
        "print(os.getpid(), len(out[0].outputs[0].token_ids))\nllm.shutdown()\n"
    )
    path = os.pathsep.join([str(SITE), str(tmp_path / "path"), str(ROOT)])
    done = run(str(script), ISINGLASS_HOOKS="core", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    pid, num_tokens = done.stdout.split()
    assert num_tokens == "2"
    assert f"core {pid}" in done.stderr.splitlines()


def test_the_programs_own_modules_are_not_hidden(run: Run, tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import importlib.util, sys
        for name in ("engine", "traces", "tests", "loader", "registry", "folder"):
            print(name, importlib.util.find_spec(name) is not None)
        print(importlib.util.find_spec("instrumentation").origin)
        """
    )
    # An interpreter that does not have Isinglass: no site-packages, but our folder.
    done = run("-c", f"import site\n{code}", ISINGLASS_HOOKS="gc", PYTHONPATH=str(SITE))
    assert done.stdout.splitlines()[-1] == str(ROOT / "instrumentation" / "__init__.py")
    (tmp_path / "path").mkdir(exist_ok=True)
    (tmp_path / "path" / "instrumentation.py").write_text("mine = True")
    done = run("-c", "import instrumentation; print(instrumentation.mine)", ISINGLASS_HOOKS="gc")
    assert done.stdout == "True\n"
    assert (
        "gc is skipped: ImportError: the program has a module named instrumentation" in done.stderr
    )


def test_an_interpreter_without_our_packages_can_be_hooked(run: Run, tmp_path: Path) -> None:
    """The gc hook in a bare interpreter that has msgspec, and is told what is missing without."""
    import msgspec

    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)

    def call(path: str) -> subprocess.CompletedProcess[str]:
        code = "import gc, sys; c = []; c.append(c); del c; gc.collect(); print(sys.prefix)"
        return subprocess.run(
            [bare / "bin" / "python", "-c", code],
            env={
                "PYTHONPATH": os.pathsep.join([str(SITE), path]),
                "ISINGLASS_HOOKS": "gc",
                "ISINGLASS_HOOKS_GC_MIN_US": "0",
                "ISINGLASS_HOOKS_DIR": str(tmp_path / "hooks"),
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    without = call("")
    assert without.stdout == f"{bare}\n"
    assert "gc is skipped: ImportError: No module named 'msgspec'" in without.stderr
    assert f"install the package msgspec into {bare}" in without.stderr
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    assert call(str(packages)).stderr == ""
    events = read_run(tmp_path / "hooks").events
    assert any(event.kind is Event.GARBAGE_COLLECTION for event in events)


OTHER_SITECUSTOMIZE = """
import os, sys
print("other", flush=True)
here = os.path.dirname(os.path.abspath(__file__))
parts = [part for part in os.environ["PYTHONPATH"].split(os.pathsep) if part != here]
os.environ["PYTHONPATH"] = os.pathsep.join([here, *parts])
from importlib.metadata import entry_points
for one in entry_points(group="opentelemetry_pre_instrument"):
    one.load()()
"""
"""What `opentelemetry-instrument` puts in front of the path: it chains to nobody, keeps itself in
front for children, and loads the entry points that are to come before it."""


@pytest.mark.parametrize("is_ours_first", [True, False])
def test_another_tool_with_a_sitecustomize_works_beside(
    run: Run, tmp_path: Path, tell_hook: str, is_ours_first: bool
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(OTHER_SITECUSTOMIZE)
    both = [str(SITE), str(tmp_path / "other")]
    path = os.pathsep.join([*(both if is_ours_first else both[::-1]), str(tmp_path / "path")])
    code = "import json, subprocess, sys; subprocess.run([sys.executable, '-c', 'import json'])"
    done = run("-c", code, ISINGLASS_HOOKS=tell_hook, PYTHONPATH=path)
    assert done.stdout.splitlines() == ["other", APPLIED] * 2
    assert done.stderr == ""


@pytest.mark.parametrize("is_ours_first", [True, False])
def test_opentelemetry_instrument_works_beside(
    run: Run, tmp_path: Path, tell_hook: str, is_ours_first: bool
) -> None:
    pytest.importorskip("opentelemetry.instrumentation.auto_instrumentation")
    tool = Path(sys.executable).parent / "opentelemetry-instrument"
    script = tmp_path / "script.py"
    script.write_text(
        "import json, subprocess, sys\n"
        "print('opentelemetry.instrumentation.auto_instrumentation' in sys.modules, flush=True)\n"
        "if len(sys.argv) == 1:\n"
        "    subprocess.run([sys.executable, __file__, 'child'], check=True)\n"
    )
    hooks = [sys.executable, "-c", MAIN, "hooks", "run", tell_hook, "--"]
    instrument = [sys.executable, str(tool)]
    order = [*hooks, *instrument] if is_ours_first else [*instrument, *hooks]
    path = os.pathsep.join([str(tmp_path / "path"), str(ROOT)])
    done = run(*order[1:], sys.executable, str(script), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    # Tools on the way that import json have the hook too.
    assert done.stdout.splitlines()[-4:] == [APPLIED, "True"] * 2


def test_list_shows_every_hook(run: Run, tmp_path: Path, tell_hook: str) -> None:
    path = os.pathsep.join([str(tmp_path / "path"), str(ROOT)])
    done = run("-c", MAIN, "hooks", "list", PYTHONPATH=path, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    table = re.sub(r" {2,}", " | ", done.stdout)
    assert "gc | start | builtin | journal an event for each garbage collection" in table
    assert "nvtx-layers | import torch.nn | builtin" in table
    assert "tell | import json | entry point user_hooks:tell" in table


def test_a_list_that_is_not_for_a_terminal_has_one_line_a_hook(run: Run) -> None:
    done = run("-c", MAIN, "hooks", "list", PYTHONPATH=str(ROOT), COLUMNS="40")
    lines = done.stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == sorted(BUILTIN_HOOKS)
    assert "import vllm.v1.engine.core, import vllm.v1.worker.gpu_worker" in lines[-1]
    for line in lines:
        assert BUILTIN_HOOKS[line.split()[0]].help in line


@pytest.mark.parametrize("width", [60, 80, 120])
def test_names_stay_whole_on_a_terminal(run: Run, width: int) -> None:
    done = run(
        *("-c", MAIN, "hooks", "list"),
        PYTHONPATH=str(ROOT),
        COLUMNS=str(width),
        FORCE_COLOR="1",
    )
    lines = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines()
    assert max(map(len, lines)) <= width
    assert {"py-spy-dump-on-stall", "vllm.v1.engine.core,", "vllm.v1.worker.gpu_worker"} <= {
        word for line in lines for word in line.split()
    }


@pytest.mark.parametrize("order", ["before", "after"])
def test_run_passes_arguments_and_exit_code(run: Run, tmp_path: Path, order: str) -> None:
    (tmp_path / "script.py").write_text(
        "import gc, os, sys\nprint(sys.argv[1:], os.environ['ISINGLASS_HOOKS_DIR'])\nsys.exit(7)\n"
    )
    names = {"before": ["--dir", "here", "gc"], "after": ["gc", "--dir", "here"]}[order]
    command = ["python", "script.py", "--flag", "--", "word"]
    path = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    done = run("-c", MAIN, "hooks", "run", *names, "--", *command, PYTHONPATH=str(ROOT), PATH=path)
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"['--flag', '--', 'word'] {tmp_path / 'here'}\n"
    assert done.stderr == f"{MARK} gc: writing to {tmp_path / 'here'}\n"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (
            ["gcc", "--", sys.executable, "script.py"],
            1,
            "there is no hook named gcc; there are: gc",
        ),
        (["gc", sys.executable], 2, "put -- between"),
        (["--", sys.executable], 2, "name at least one hook"),
        (["gc", "--"], 2, "there is no command"),
        (["gc", "--", "no-such-command"], 127, "no-such-command: no such command"),
        (["gc", "--", "/"], 126, "/: "),
    ],
)
def test_run_refuses_what_it_cannot_run(
    run: Run, tmp_path: Path, words: list[str], status: int, message: str
) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    done = run("-c", MAIN, "hooks", "run", *words, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr


def test_short_lived_programs_end_with_the_gc_hook(run: Run, tmp_path: Path) -> None:
    """A collection at the interpreter's end must not open a journal: no thread can start then."""
    for _ in range(3):
        done = run("-c", "pass", ISINGLASS_HOOKS="gc", ISINGLASS_HOOKS_GC_MIN_US="0")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_layers_have_no_ranges_where_no_tool_listens(run: Run) -> None:
    code = "import torch; print(torch.nn.Linear(2, 2)(torch.ones(2)).shape)"
    done = run("-c", code, ISINGLASS_HOOKS="nvtx-layers")
    assert done.stdout == "torch.Size([2])\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{MARK} nvtx-layers is skipped: RuntimeError: ")
    assert re.search("no tool is attached|the package nvtx cannot be imported", line)


def test_a_stall_is_dumped_once(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # It is stuck until its stacks have been written down, and a little longer.
    script.write_text(
        "import pathlib, threading, time\n"
        f"folder, ends = pathlib.Path({str(tmp_path / 'hooks')!r}), threading.Event()\n"
        "def end():\n"
        "    while not any('stuck' in file.read_text() for file in folder.glob('stall.*.txt')):\n"
        "        time.sleep(0.1)\n"
        "    time.sleep(1)\n"
        "    ends.set()\n"
        "def stuck():\n"
        "    ends.wait()\n"
        "threading.Thread(target=end, daemon=True).start()\n"
        "stuck()\n"
    )
    done = run(str(script), ISINGLASS_HOOKS="py-spy-dump-on-stall", ISINGLASS_HOOKS_STALL_S="0.5")
    assert done.returncode == 0
    (file,) = (tmp_path / "hooks").glob("stall.*.txt")
    text = file.read_text()
    assert text.startswith("by ")
    assert "stuck" in text
    assert f"stacks are in {file}" in done.stderr


def test_waiting_for_an_engine_uses_up_no_dumps(run: Run, tmp_path: Path) -> None:
    """Beside the vllm hook, only the engine's stall is one, and then in every process."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import glob, os, subprocess, sys, time

            def wait_for_dumps(number):
                deadline = time.monotonic() + 60
                while len(glob.glob("hooks/stall.*")) < number and time.monotonic() < deadline:
                    time.sleep(0.05)
                print(len(glob.glob("hooks/stall.*")), flush=True)

            if len(sys.argv) == 1:
                child = subprocess.Popen([sys.executable, __file__, "core"], stdin=subprocess.PIPE)
                time.sleep(4)  # eight times what makes a stall
                print(len(glob.glob("hooks/stall.*")), flush=True)
                child.stdin.write(b"!")
                child.stdin.flush()
                wait_for_dumps(2)
                child.communicate()
            else:
                from instrumentation.hooks.progress import Progress, set_probe
                is_busy = False
                set_probe(lambda: Progress(is_busy, 7))
                os.read(0, 1)
                is_busy = True
                os.read(0, 1)
            """
        )
    )
    done = run(
        str(script), ISINGLASS_HOOKS="vllm,py-spy-dump-on-stall", ISINGLASS_HOOKS_STALL_S="0.5"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "2"]
    files = [file.name.split(".") for file in (tmp_path / "hooks").glob("stall.*")]
    assert len({pid for _, pid, *_ in files}) == 2


@pytest.mark.slow
def test_a_profile_can_be_asked_for_twice(environment: dict[str, str], tmp_path: Path) -> None:
    """After the delay, and again by the signal; threads other than the main one are seen."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, threading, time, torch\n"
        "a = torch.ones(8, 8)\n"
        "def work():\n"
        "    while not ended:\n"
        "        a @ a\n"
        "        time.sleep(0.005)\n"
        "ended = []\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "print(thread.native_id, flush=True)\n"
        "sys.stdin.read()\n"
        "ended.append(1)\n"
    )
    settings = {
        "ISINGLASS_HOOKS": "torch-profiler",
        "ISINGLASS_HOOKS_PROFILE_DELAY_S": "0.1",
        "ISINGLASS_HOOKS_PROFILE_S": "0.3",
        "RANK": "3",
    }
    with subprocess.Popen(
        [sys.executable, str(script)],
        env=environment | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        thread_id = int(process.stdout.readline())
        pattern = f"torch.rank3.{process.pid}*"
        wait_for_files(tmp_path / "hooks", pattern, 1)

        def is_written_again() -> bool:
            """Asked more than once: the hook says that it has written, then waits anew."""
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            return len(list((tmp_path / "hooks").glob(pattern))) > 1

        wait_until(is_written_again)
        files = wait_for_files(tmp_path / "hooks", pattern, 2)
        process.stdin.close()
    assert process.returncode == 0
    for file in files:
        with gzip.open(file, "rt") as stream:
            events = json.load(stream)["traceEvents"]
        operators = {event["tid"] for event in events if event.get("name") == "aten::mm"}
        assert thread_id in operators


@pytest.mark.slow
def test_a_profile_that_is_asked_for_before_torch_is_there_waits(run: Run, tmp_path: Path) -> None:
    """The signal ends no program that has not imported torch, and none that does so in a thread."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, threading, time\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "def work():\n"
        "    import torch\n"
        "    a = torch.ones(8, 8)\n"
        "    while not os.path.isdir('hooks') or not any(\n"
        "        name.startswith('torch.rank') for name in os.listdir('hooks')\n"
        "    ):\n"
        "        a @ a\n"
        "        time.sleep(0.005)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    done = run(str(script), ISINGLASS_HOOKS="torch-profiler", ISINGLASS_HOOKS_PROFILE_S="0.2")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "hooks").glob("torch.rank0.*"))) == 1


def wait_for_files(folder: Path, pattern: str, number: int) -> list[Path]:
    """Wait until a folder holds that many files of a pattern."""
    wait_until(
        lambda: len(list(folder.glob(pattern))) >= number,
        f"{folder} has not got {number} files {pattern}",
    )
    return sorted(folder.glob(pattern))
