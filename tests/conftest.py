"""What holds for every test: a clean environment before it, nothing left behind after it."""

import gc
import io
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported, here or in an engine core. There are as many of us as processors:
    # their threads would wait for each other, at twice the processor time. See `several_threads`.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # the same, where a test has threads

_GRACE_S = 30.0
_PREFIXES = ("ISINGLASS_", "OTEL_")


@pytest.fixture(scope="session", autouse=True)
def private_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary folder of this session's own, so that what others leave is not taken for ours.

    Its path is short, because sockets are made below it.
    """
    tmp_path_factory.getbasetemp()  # pytest's own folders stay where they are kept for a look
    with (
        tempfile.TemporaryDirectory(prefix="iso-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(scope="session", autouse=True)
def heeded_interrupts() -> None:
    """Signals as in a terminal: whoever starts the tests may have them ignored, as a shell that
    starts them in the background does with Ctrl-C.

    All but SIGHUP, which `nohup` has ignored to good purpose; see `heeded_hangups`.
    """
    defaults = dict.fromkeys((signal.SIGTERM, signal.SIGUSR2), signal.SIG_DFL)
    for number, handler in {signal.SIGINT: signal.default_int_handler, **defaults}.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture
def heeded_hangups(signals_as_before: None) -> None:
    """SIGHUP does to this test, and to what it starts, what it does by default."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def signals_as_before(heeded_interrupts: None) -> Iterator[None]:
    """A test's signal handlers end with it: those of an event loop of uvloop outlive the loop."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the caller's shell reaches a test."""
    for name in [name for name in os.environ if name.startswith(_PREFIXES)]:
        monkeypatch.delenv(name)


@pytest.fixture
def several_threads() -> Iterator[None]:
    """PyTorch has threads in this process, as outside of tests."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(2, os.cpu_count() or 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cores_with_threads(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine cores of this test have threads, as outside of tests."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def ascii_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files whose encoding nobody names are ASCII to `pathlib`, as under LC_CTYPE=C."""
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "ascii")


@pytest.fixture(autouse=True)
def unconfigured_logger() -> None:
    """Our logger as at import: an engine of an earlier test has set it up as its process's own."""
    logger = logging.getLogger("isinglass")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def nothing_left_behind(private_temporary_folder: Path) -> Iterator[None]:
    """Fail a test that leaves an engine core or its socket folder.

    Engines of fixtures with a wider scope were there before the test, and may stay.
    """
    before = _leftovers(private_temporary_folder)
    yield
    new = _leftovers(private_temporary_folder) - before
    if new:
        gc.collect()  # an engine in a reference cycle ends with the cycle
    deadline = time.monotonic() + _GRACE_S
    while new and time.monotonic() < deadline:
        time.sleep(0.05)
        new = _leftovers(private_temporary_folder) - before
    assert not new, f"left behind by the test: {', '.join(sorted(new))}"


def _leftovers(folder: Path) -> set[str]:
    # Flight records are meant to stay.
    found = {
        f"folder {path.name}"
        for path in folder.glob("isinglass-*")
        if not path.name.startswith("isinglass-flight")
    }
    own_pid = os.getpid()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything; the fields behind it do not.
            state, parent_pid = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent_pid) != own_pid:
                continue
            arguments = (stat.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        if b"EngineCore" in arguments or state == "Z":
            found.add(f"process {stat.parent.name}")
    return found
