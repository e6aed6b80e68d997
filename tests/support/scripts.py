"""Running small user scripts as processes of their own, and looking for what they leave behind.

Each script has a private temporary folder, so that only its own remains are found there. Knows
processes, folders and shared memory; no test.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]

START = """\
from engine import LLM, SamplingParams

def start(**settings):
    llm = LLM(
        {model!r}, skip_tokenizer_init=True, log_level="warning",
        kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256, **settings,
    )
    say("core", llm.llm_engine.engine_core.core_pid)
    return llm

def say(*words):
    print(*words, flush=True)

def generate(llm, num_tokens=5):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return list(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)

"""
"""What every script begins with; `{model!r}` is filled in."""


class Script:
    """A running script, in a process group of its own."""

    def __init__(
        self,
        body: str,
        *,
        model: Path,
        folder: Path,
        by_stdin: bool = False,
        modules: Path | None = None,
        before: str = "",
    ) -> None:
        text = before + START.format(model=str(model)) + body
        file = folder / "script.py"
        file.write_text(text)
        path = os.pathsep.join(map(str, [ROOT, *([modules] if modules else [])]))
        environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder)}
        self.folder = folder
        self.core_pid = 0
        self.process = subprocess.Popen(
            [sys.executable, "-"] if by_stdin else [sys.executable, str(file)],
            stdin=subprocess.PIPE if by_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        if by_stdin:
            assert self.process.stdin is not None
            self.process.stdin.write(text)
            self.process.stdin.close()
            self.process.stdin = None

    def wait_for(self, word: str) -> str:
        """Read standard output up to a line that begins with the word; returns the rest of it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            first, _, rest = line.strip().partition(" ")
            if first == "core":
                self.core_pid = int(rest)
            if first == word:
                return rest
        raise AssertionError(f"the script ended without {word!r}: {self.process.stderr.read()}")

    def wait_for_core(self) -> None:
        """Wait until the script has begun to start its core."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        wait_until(children.read_text, "no core is being started")
        self.core_pid = int(children.read_text().split()[0])

    def finish(self) -> tuple[int, str, str]:
        """Wait for the end; returns exit code, the rest of standard output and standard error."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        for line in out.splitlines():
            if line.startswith("core "):
                self.core_pid = int(line.split()[1])
        return self.process.returncode, out, err

    def interrupt(self) -> None:
        """What a terminal does at Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def assert_nothing_left(self) -> None:
        """No core, no socket folder, no shared memory."""
        assert self.core_pid, "the script has told the core's process id"
        wait_until(lambda: not is_running(self.core_pid), "the core runs on")
        wait_until(lambda: not socket_folders(self.folder), "a folder is left")
        pids = {str(self.core_pid), str(self.process.pid)}
        left = [
            name
            for name in os.listdir("/dev/shm")
            if "isinglass" in name or pids & set(name.replace(".", "_").split("_"))
        ]
        assert not left, f"shared memory is left: {left}"


@contextmanager
def script(
    body: str,
    *,
    model: Path,
    by_stdin: bool = False,
    modules: Path | None = None,
    before: str = "",
) -> Iterator[Script]:
    """Run a script in a new folder; both are gone afterwards.

    Args:
        modules: a folder of modules that it finds besides ours.
        before: what stands in front of all else, imports for example.
    """
    # Not pytest's own folder: the path of a socket has room for 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="script-"))
    running = Script(
        body, model=model, folder=folder, by_stdin=by_stdin, modules=modules, before=before
    )
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()
        if running.core_pid and is_running(running.core_pid):
            os.kill(running.core_pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def socket_folders(folder: Path) -> list[Path]:
    """The engines' private folders below a temporary folder."""
    return [
        path
        for path in folder.glob("isinglass-*")
        if not path.name.startswith("isinglass-flight")  # records that are meant to stay
    ]


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def children_of_this_process() -> set[int]:
    """Process ids of our running children."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return {pid for pid in found if is_running(pid)}
