"""The ready line: what it says of settings and of the start-up, and where it is written."""

import io
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.server.config import ServerConfig
from engine.server.http.auth import ApiKeys
from engine.server.process.announce import announce, ready_facts


def make_state(
    keys: tuple[str, ...] = (), run_dir: str | None = None, **settings: Any
) -> SimpleNamespace:
    """A server whose engine has come up; settings of the engine and of the server alike."""
    names = {name for name in settings if name in ServerConfig.__dataclass_fields__}
    ready = SimpleNamespace(
        dtype="bfloat16",
        device="cpu",
        attention_backend="native",
        max_model_len=8192,
        num_gpu_blocks=1000,
        block_size=16,
    )
    engine = SimpleNamespace(
        llm_engine=SimpleNamespace(ready=ready),
        config=EngineConfig.from_kwargs(**{k: v for k, v in settings.items() if k not in names}),
        run_dir=run_dir,
    )
    return SimpleNamespace(
        config=ServerConfig.from_kwargs(**{name: settings[name] for name in names}),
        engine=engine,
        keys=ApiKeys(keys),
        model_names=("tiny", "small"),
    )


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is logged."""
    found: list[str] = []
    logger, handler = logging.getLogger("isinglass"), logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)


def test_what_was_decided_is_said(listener: socket.socket) -> None:
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    state = make_state(("one", "two"), "/runs/7", max_num_seqs=12)
    assert ready_facts(state, listener, 1.26) == {  # type: ignore[arg-type]
        "address": address,
        "model": "tiny, small",
        "dtype": "bfloat16",
        "device": "cpu",
        "attention": "native",
        "context": "8,192 tokens",
        "KV cache": "16,000 tokens",
        "max_num_seqs": "12",
        "API keys": "2",
        "live page": f"{address}/",
        "metrics": f"{address}/metrics",
        "traces": "/runs/7",
        "start-up": "1.3 s",
    }


def test_what_is_switched_off_is_not_said(listener: socket.socket) -> None:
    state = make_state(enable_live_page=False, disable_log_stats=True)
    facts = ready_facts(state, listener, 0.0)  # type: ignore[arg-type]
    assert not {"live page", "metrics", "traces"} & facts.keys()
    assert facts["API keys"] == "none: open to all who reach it"


def test_the_address_is_that_of_the_listener(listener: socket.socket, tmp_path: Path) -> None:
    tls = make_state(ssl_certfile="c.pem", ssl_keyfile="k.pem")
    address = ready_facts(tls, listener, 0.0)["address"]  # type: ignore[arg-type]
    assert address == f"https://127.0.0.1:{listener.getsockname()[1]}"
    path = str(tmp_path / "server.sock")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path)
        facts = ready_facts(make_state(), one, 0.0)  # type: ignore[arg-type]
    assert facts["address"] == f"unix:{path}"
    assert (facts["live page"], facts["metrics"]) == ("/", "/metrics")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_line_for_machines_and_a_table_for_terminals(
    listener: socket.socket, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state: Any = make_state(("secret-key",))
    for output, is_table in ((Terminal(), True), (io.StringIO(), False), (None, False)):
        lines.clear()
        monkeypatch.setattr("sys.stdout", output)
        announce(state, listener, 2.0)
        (line,) = lines
        assert line.startswith("ready: address http://127.0.0.1:")
        assert "context 8,192 tokens" in line
        assert "secret-key" not in line
        if output is not None:
            written = output.getvalue()
            assert ("  start-up      2.0 s\n" in written) is is_table
            assert len(written.splitlines()) == (14 if is_table else 0)
