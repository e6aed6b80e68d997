"""Signals to a core: whatever thread they come to, and however early."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.scripts import script
from tests.waiting import wait_until
from traces.flight import read_flight

BODY = """
with start(flight_dir=".") as llm:
    generate(llm)
    say("ready")
    wait_for_file("go")
    say("tokens", len(generate(llm)))

"""
WAIT = """
import os, time

def wait_for_file(name):
    while not os.path.exists(name):
        time.sleep(0.02)

"""
OF_THE_CORE = "import os, signal, sys, threading, time\nif sys.orig_argv[-1] == 'EngineCore':\n"
"""What a `sitecustomize` of these tests begins with."""


def send_early(*numbers: int) -> str:
    return (
        OF_THE_CORE
        + f"    for number in {[int(number) for number in numbers]}:\n"
        + ("        os.kill(os.getpid(), number)\n")
    )


THREADS = {
    "none": "",
    "usual": OF_THE_CORE
    + "    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n",
    "unblocks": OF_THE_CORE
    + "    def work():\n"
    + "        signal.pthread_sigmask(signal.SIG_SETMASK, [])\n"
    + "        time.sleep(1000)\n"
    + "    threading.Thread(target=work, daemon=True).start()\n",
}


def blocked(pid: int) -> set[int]:
    """Signals that the main thread of a process blocks."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigBlk:"):
            mask = int(line.split()[1], 16)
            return {number for number in range(1, 65) if mask >> (number - 1) & 1}
    raise AssertionError("the kernel does not tell")


@pytest.mark.parametrize("thread", THREADS)
def test_a_flight_record_is_written_whatever_threads_there_are(
    tiny_llama: Path, tmp_path: Path, thread: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(THREADS[thread])
    with script(WAIT + BODY, model=tiny_llama, modules=tmp_path) as running:
        running.wait_for("ready")
        # Nor do the processes that it starts begin with the signal blocked.
        assert not blocked(running.core_pid) & {signal.SIGINT, signal.SIGHUP, signal.SIGUSR2}
        os.kill(running.core_pid, signal.SIGUSR2)
        pattern = f"flight-signal-core-{running.core_pid}-*"
        wait_until(lambda: list(running.folder.glob(pattern)), "no flight record")
        (running.folder / "go").touch()
        assert running.wait_for("tokens") == "5"
        (file,) = running.folder.glob(pattern)
        assert read_flight(file).steps
        code, _, error = running.finish()
        assert code == 0, error


def test_signals_that_come_before_the_core_can_handle_them_wait(
    tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        send_early(signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
    )
    with script(WAIT + BODY, model=tiny_llama, modules=tmp_path) as running:
        running.wait_for("ready")
        pattern = f"flight-signal-core-{running.core_pid}-*"
        wait_until(lambda: list(running.folder.glob(pattern)), "no flight record")
        (running.folder / "go").touch()
        code, out, error = running.finish()
        assert (code, out.split()) == (0, ["tokens", "5"]), error
        assert "Traceback" not in error
