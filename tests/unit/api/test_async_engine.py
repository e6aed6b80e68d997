"""The life of an engine without an engine: settings, starts that fail, last or are given up."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine.api.engine_host
from engine import LLM, AsyncLLM, ConfigError, EngineDeadError, EngineStartError
from engine.api.engine_host import EngineHost
from engine.api.output_handler import OutputHandler
from engine.config import EngineConfig
from engine.transport import factory
from engine.transport.async_mp_client import AsyncMPClient
from engine.types.sampling import RequestOutputKind
from tests.support.async_core import PlayedCore
from tests.waiting import PATIENCE_S

QUIET = {"flight_recorder_steps": 0}


class Bytes:
    """A path, but not of text."""

    def __fspath__(self) -> bytes:
        return b"model"


class FakeLLMEngine:
    """Comes up when the test lets it, with an error if the test wants one."""

    made: "list[FakeLLMEngine]"
    is_starting: threading.Event
    may_start: threading.Event
    error: Exception | None = None

    def __init__(self, config: EngineConfig, **options: Any) -> None:
        self.options, self.num_shutdowns = options, 0
        self.is_starting.set()
        assert self.may_start.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.made.append(self)

    def shutdown(self) -> None:
        self.num_shutdowns += 1


class BootingClient(AsyncMPClient):
    """Of a core that comes up when the test lets it, or is killed."""

    def __init__(self, start: Callable[[], Any], *, timeout_s: float) -> None:
        self.may_go_on = threading.Event()
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True
        self.may_go_on.set()


class BootingLLMEngine(FakeLLMEngine):
    """Comes up with its core."""

    client: BootingClient

    def __init__(self, config: EngineConfig, *, make_client: Any, **options: Any) -> None:
        type(self).client = make_client()
        self.is_starting.set()
        assert self.client.may_go_on.wait(PATIENCE_S)
        if self.client.is_killed:
            raise EngineStartError("killed")
        super().__init__(config, **options)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeLLMEngine]]:
    class Fake(FakeLLMEngine):
        """Counts for one test only."""

    Fake.made, Fake.is_starting, Fake.may_start = [], threading.Event(), threading.Event()
    Fake.may_start.set()
    monkeypatch.setattr(engine.api.engine_host, "LLMEngine", Fake)
    yield Fake
    Fake.may_start.set()


def url_of(host: EngineHost) -> str:
    assert host.metrics_server is not None
    return host.metrics_server.url


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize("model", [3, b"model", Bytes(), ["model"], object()])
def test_a_model_that_is_no_path_is_a_config_error(kind: type, model: object) -> None:
    with pytest.raises(ConfigError, match=r"^model must be str, got .*\)$"):
        kind(model)


def test_paths_are_settings_of_text() -> None:
    config = EngineConfig.from_kwargs(
        model=Path("a/model"), tokenizer=Path("a/tokenizer"), trace_dir=Path("runs"), dtype="auto"
    )
    assert (config.model.model, config.model.tokenizer) == ("a/model", "a/tokenizer")
    assert config.observability.trace_dir == "runs"
    assert AsyncLLM(Path("a/model")).model_name == "a/model"
    with pytest.raises(ConfigError, match="max_num_seqs must be int"):
        EngineConfig.from_kwargs(max_num_seqs=Path("3"))


def test_what_has_been_shut_down_before_its_start_does_not_start() -> None:
    async def run() -> None:
        llm = AsyncLLM()
        for _ in range(2):
            await llm.shutdown()
        calls: list[Callable[[], Any]] = [
            llm.start,
            llm.__aenter__,
            llm.wait_for_death,
            lambda: llm.submit("Once"),
            lambda: anext(llm.generate("Once")),
            lambda: anext(llm.chat([{"role": "user", "content": "Once"}])),
        ]
        for call in calls:
            with pytest.raises(EngineDeadError, match=r"shut down.*new AsyncLLM"):
                await call()
        await llm.abort("any")
        assert (llm.is_running, llm.num_unfinished, llm.has_request("any")) == (False, 0, False)

    asyncio.run(run())


def test_a_start_that_fails_closes_what_it_has_opened(fake: type[FakeLLMEngine]) -> None:
    fake.error = EngineStartError("no")
    sources: list[Any] = []
    config = EngineConfig.from_kwargs(metrics_port=0)
    host = EngineHost(config, labelled_name="mine", metric_sources=sources)
    closed: list[str] = []
    assert host.observer is not None
    assert host.observer.metrics.sources is sources
    host._obs.close, close = lambda: closed.append("obs"), host._obs.close  # type: ignore[method-assign]
    with pytest.raises(EngineStartError, match="no"):
        host.start()
    assert (host.metrics_server, closed) == (None, ["obs"])
    close()
    host.shutdown()  # finds nothing to do
    assert not fake.made


def test_a_shutdown_waits_for_the_start_and_ends_what_it_has_made(
    fake: type[FakeLLMEngine],
) -> None:
    fake.may_start.clear()
    host = EngineHost(EngineConfig.from_kwargs(metrics_port=0, **QUIET))
    starting = threading.Thread(target=host.start)
    stopping = threading.Thread(target=host.shutdown)
    starting.start()
    assert fake.is_starting.wait(PATIENCE_S)
    assert url_of(host)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive()
    fake.may_start.set()
    stopping.join(PATIENCE_S)
    starting.join(PATIENCE_S)
    assert [one.num_shutdowns for one in fake.made] == [1]
    assert host.metrics_server is None


def test_a_start_whose_loop_ends_meanwhile_leaves_no_engine_behind(
    fake: type[FakeLLMEngine],
) -> None:
    fake.may_start.clear()
    llm = AsyncLLM(**QUIET)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await llm.start()
        fake.may_start.set()

    asyncio.run(give_up())
    assert len(fake.made) == 1
    asyncio.run(llm.shutdown())
    assert fake.made[0].num_shutdowns == 1


@pytest.fixture
def booting(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[BootingLLMEngine]]:
    class Booting(BootingLLMEngine):
        """Counts for one test only."""

    Booting.made, Booting.is_starting, Booting.may_start = [], threading.Event(), threading.Event()
    Booting.may_start.set()
    monkeypatch.setattr(engine.api.engine_host, "LLMEngine", Booting)
    make = staticmethod(lambda: BootingClient(object, timeout_s=1))
    monkeypatch.setattr(factory, "make_async_mp_client", make)
    yield Booting
    Booting.client.may_go_on.set()


def test_a_block_that_is_left_before_its_engine_is_up_ends_the_core(
    booting: type[BootingLLMEngine],
) -> None:
    llm = AsyncLLM(**QUIET)

    async def enter() -> None:
        async with llm:
            raise AssertionError("it came up")

    async def run() -> None:
        entering = asyncio.create_task(enter())
        assert await asyncio.to_thread(booting.is_starting.wait, PATIENCE_S)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(entering), PATIENCE_S / 2)
        assert booting.client.is_killed
        with pytest.raises(EngineStartError, match="killed"):
            await llm.start()

    asyncio.run(run())
    assert not booting.made


def test_a_start_that_its_loop_does_not_outlive_ends_the_core(
    booting: type[BootingLLMEngine],
) -> None:
    async def give_up() -> None:
        llm = AsyncLLM(**QUIET)
        starting = asyncio.create_task(llm.start())
        assert await asyncio.to_thread(booting.is_starting.wait, PATIENCE_S)
        starting.cancel()
        await asyncio.wait([starting])
        assert not booting.client.is_killed  # it may be waited for again

    asyncio.run(give_up())
    assert booting.client.is_killed


def test_an_observer_that_cannot_be_made_leaves_no_instrument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    obs = SimpleNamespace(close=lambda: closed.append("obs"))
    monkeypatch.setattr(engine.api.engine_host, "setup", lambda *_, **__: obs)
    monkeypatch.setattr(engine.api.engine_host, "make_observer", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        EngineHost(EngineConfig.from_kwargs())
    assert closed == ["obs"]


def test_requests_that_are_failed_end_in_the_core_though_nobody_reads() -> None:
    core = PlayedCore()

    async def run() -> None:
        class Running(set[str]):
            def unfinished_ids(self) -> list[str]:
                return list(self)

        running, ended = Running(("a", "b")), list[str]()

        def discard(request_ids: list[str]) -> None:
            ended.extend(request_ids)
            running.difference_update(request_ids)

        fake: Any = SimpleNamespace(
            engine_core=core.client(),
            output_processor=running,
            discard_request=discard,
            abort_request=lambda ids: None,
            bury=lambda error: None,
        )
        handler = OutputHandler(fake)
        streams = [handler.open(one, RequestOutputKind.DELTA) for one in ("a", "b", "done")]
        for _ in range(2):
            handler.fail_all(EngineDeadError("cut off"))
            assert ended == ["a", "b"]
        assert handler.num_open == 3
        for stream in streams:
            with pytest.raises(EngineDeadError, match="cut off"):
                await anext(stream)
        assert (handler.num_open, ended) == (0, ["a", "b"])
        await handler.stop()

    asyncio.run(run())
    core.close()


def test_what_is_still_held_at_the_interpreters_end_ends_in_silence() -> None:
    code = (
        "import asyncio\n"
        "from engine.api.async_llm import AsyncLLM\n"
        "from engine.frontend.output_stream import RequestStream\n"
        "from engine.types.sampling import RequestOutputKind\n"
        "loop = asyncio.new_event_loop()\n"
        "llm, delta = AsyncLLM(), RequestOutputKind.DELTA\n"
        "llm._loop, llm._handler, llm._host = loop, object(), object()\n"
        "stream = RequestStream('r', delta, on_close=print, loop=loop)\n"
        "loop.close()\n"
        "held = [llm, stream]\n"
        "held.append(held)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
