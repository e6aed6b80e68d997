"""Loggers of the engine: `isinglass.*`, configured by whoever owns the process.

Importing the package configures nothing. `configure` attaches one handler that writes to
standard error, as text or as JSON, unless the program has set up logging itself. Either way each
record made while a request is being served has `request_id`, `trace_id` and `span_id`.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

from instrumentation import parse_traceparent

_ROOT = "isinglass"
_CONTEXT_FIELDS = ("request_id", "trace_id", "span_id")

_served: ContextVar[tuple[str, str | None] | None] = ContextVar("isinglass_served", default=None)


@contextmanager
def serving(request_id: str, traceparent: str | None = None) -> Iterator[None]:
    """Name the request that the current thread or task works for, in all log records meanwhile."""
    token = _served.set((request_id, traceparent))
    try:
        yield
    finally:
        _served.reset(token)


def set_served(request_id: str | None, traceparent: str | None = None) -> None:
    """The same for loops over requests; None when none is being served any more."""
    _served.set(None if request_id is None else (request_id, traceparent))


class _ServedRequest(logging.Filter):
    """Adds the request's identity to a record; one that was given by `extra` stays."""

    def filter(self, record: logging.LogRecord) -> bool:
        served = _served.get()
        if served is not None and not hasattr(record, "request_id"):
            record.request_id, traceparent = served
            context = parse_traceparent(traceparent)
            if context is not None:
                record.trace_id, record.span_id = context.trace_id, context.span_id
        return True


_SERVED_REQUEST = _ServedRequest()


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, process, pid, message; request
    and trace where there is one; what `extra={"fields": {...}}` adds; the traceback where there is
    one."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._role,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        for field in _CONTEXT_FIELDS:
            value = getattr(record, field, None)
            if value is not None:
                line[field] = value
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def readable_lines(line: str) -> list[str]:
    """What a line on standard error says, for an error to quote: of a `JsonFormatter`'s the level,
    the message and the traceback, any other as it is."""
    try:
        fields = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):  # a program's own, or cut off by the process's end
        fields = None
    if not isinstance(fields, dict) or not {"level", "message"} <= fields.keys():
        return [line]
    text = f"{str(fields['level']).upper()} {fields['message']}"
    return [*text.splitlines(), *str(fields.get("exception", "")).splitlines()]


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, below the package's own."""
    logger = logging.getLogger(f"{_ROOT}.{name}")
    # On the logger, not on a handler: a program's own handlers are to see it too.
    logger.addFilter(_SERVED_REQUEST)
    return logger


def configure(level: str, *, role: str, own_process: bool, log_format: str = "text") -> None:
    """Set the level and, where nobody else handles log records, write them to standard error.

    Args:
        level: debug, info, warning or error.
        role: who writes, shown in every line ("caller", "EngineCore").
        own_process: whether this process is ours alone, so that no other handler can exist.
        log_format: text, or json for one object a line.
    """
    logger = logging.getLogger(_ROOT)
    logger.setLevel(level.upper())
    ours = [one for one in logger.handlers if isinstance(one, _OwnHandler)]
    others = logging.getLogger().handlers or len(logger.handlers) > len(ours)
    if not own_process and (others or ours):
        # A second engine of this process may want the other format; the role is the first one's.
        for one in ours:
            one.setFormatter(_formatter(log_format, one.role))
        return
    handler = _OwnHandler(sys.stderr)
    handler.role = role
    handler.addFilter(_SERVED_REQUEST)
    handler.setFormatter(_formatter(log_format, role))
    logger.handlers[:] = [handler]
    logger.propagate = False


class _OwnHandler(logging.StreamHandler):
    """The handler that `configure` has made."""

    role = ""


def _formatter(log_format: str, role: str) -> logging.Formatter:
    if log_format == "json":
        return JsonFormatter(role)
    return logging.Formatter(f"%(levelname)s %(asctime)s [{role}] %(message)s", "%H:%M:%S")
