"""Log records: which request they belong to, and JSON lines."""

import io
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from engine.log import JsonFormatter, configure, get_logger, serving, set_served
from engine.transport.process import SpawnedProcess

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def own_root() -> Iterator[logging.Logger]:
    """The package's logger as it is, put back afterwards."""
    logger = logging.getLogger("isinglass")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.propagate = propagate
    logger.setLevel(level)


def identity(record: logging.LogRecord) -> tuple[object, ...]:
    return tuple(getattr(record, name, None) for name in ("request_id", "trace_id", "span_id"))


def test_records_name_the_request_that_is_being_served(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("test")
    caplog.set_level(logging.INFO, logger="isinglass")
    logger.info("before")
    with serving("a", TRACEPARENT):
        logger.info("within")
        with serving("b"):
            logger.info("deeper")
        thread = threading.Thread(target=logger.info, args=("elsewhere",))
        thread.start()
        thread.join()
        logger.info("own", extra={"request_id": "c"})
    set_served("d", "not a traceparent")
    logger.info("loop")
    set_served(None)
    logger.info("after")
    seen = {record.message: identity(record) for record in caplog.records}
    trace_id, span_id = TRACEPARENT.split("-")[1:3]
    nothing = (None, None, None)
    assert seen == {
        "before": nothing,
        "within": ("a", trace_id, span_id),
        "deeper": ("b", None, None),
        "elsewhere": nothing,
        "own": ("c", None, None),
        "loop": ("d", None, None),
        "after": nothing,
    }


def test_json_lines_hold_one_object_each() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("caller"))
    logger = get_logger("json")
    logger.addHandler(handler)
    try:
        with serving("a", TRACEPARENT):
            logger.warning("two\nlines of %s", "söme «text»")
        try:
            raise ValueError("broken")
        except ValueError:
            logger.exception("it failed")
    finally:
        logger.removeHandler(handler)
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning",
        "logger": "isinglass.json",
        "process": "caller",
        "pid": os.getpid(),
        "message": "two\nlines of söme «text»",
        "request_id": "a",
        "trace_id": TRACEPARENT.split("-")[1],
        "span_id": TRACEPARENT.split("-")[2],
    }
    assert second["message"] == "it failed"
    assert "ValueError: broken" in second["exception"]
    assert "request_id" not in second


def test_an_own_process_writes_in_the_chosen_form(
    own_root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info", role="EngineCore", own_process=True, log_format="json")
    logging.getLogger("isinglass.status").info("hello")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["process"] == "EngineCore"
    configure("warning", role="EngineCore", own_process=True)
    logging.getLogger("isinglass.status").info("quiet")
    logging.getLogger("isinglass.status").warning("hello")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING ")
    assert line.endswith("[EngineCore] hello")
    assert len(own_root.handlers) == 1


def test_a_programs_own_handlers_are_left_alone(own_root: logging.Logger) -> None:
    own_root.handlers[:] = []
    own_root.propagate = True
    configure("info", role="caller", own_process=False, log_format="json")
    assert own_root.handlers == []  # pytest handles the root logger's records
    assert own_root.propagate


def test_a_dead_process_is_quoted_by_what_its_lines_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("EngineCore"))
    logger = logging.Logger("quoted")
    logger.addHandler(handler)
    logger.info("loaded «a»")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed\nbadly")
    others = ["", "{not JSON", '{"own": 1}', '{"a":' * 100_000, "Killed"]
    lines = [*stream.getvalue().splitlines(), *others]
    process = object.__new__(SpawnedProcess)
    process._log = deque(maxlen=40)
    stderr = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
    process._process = SimpleNamespace(stderr=stderr, poll=lambda: None)  # type: ignore[assignment]
    process._forward_log()
    tail = process.log_tail()
    assert tail[:3] == ("INFO loaded «a»", "ERROR it failed", "badly")
    assert tail[3].startswith("Traceback")
    assert tail[-6:] == ("ValueError: broken", *others)
    assert capsys.readouterr().err.splitlines() == lines, "they pass through as they are"


def test_a_process_without_standard_error_logs_to_nobody(
    own_root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one has that was started with `2>&-`; what its core says is kept for the report."""
    monkeypatch.setattr("sys.stderr", None)
    configure("info", role="caller", own_process=True)
    own_root.info("loaded")
    process = object.__new__(SpawnedProcess)
    process._log = deque(maxlen=40)
    stderr = io.BytesIO(b"one\ntwo\n")
    process._process = SimpleNamespace(stderr=stderr, poll=lambda: None)  # type: ignore[assignment]
    process._forward_log()
    assert process.log_tail() == ("one", "two")
