"""One HTTP request and its answer, as far as it has got: what is counted, logged and traced of it.

Knows how an exchange ends and what that is called. Does not know who tells, nor where it is shown.
"""

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import quote

from engine.server.http.errors import CLIENT_LEFT_STATUS
from engine.server.http.served import Phase
from instrumentation import parse_traceparent
from instrumentation.metrics.server import OTHER, OUTCOMES, REFUSALS

PROBES = frozenset({"/health", "/ping"})
"""Routes whose 503 is a correct answer."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=+@-]{0,127}", re.ASCII)
_MAX_SHOWN = 256
_MAX_TRACESTATE = 4096
_REFUSAL_OF_STATUS = {
    401: "auth",
    408: "too_slow",
    413: "body_too_large",
    429: "queue_full",
    431: "headers_too_large",
}
_REFUSAL_OF_PHASE = {
    Phase.STARTING: "starting",
    Phase.READY: "queue_full",
    Phase.STOPPING: "stopping",
    Phase.DEAD: "dead",
}


class ExchangeState:
    """One exchange; the middleware fills it in as it goes.

    Attributes:
        request_id: what the answer carries as X-Request-Id.
        engine_id: the same, or made different from that of another exchange still under way; the
            ids of the engine's requests begin with it.
        route: the template of its path; `method_label` the method: each `other` if unknown.
        status: as sent, 0 before that; `CLIENT_LEFT_STATUS` in the end if the client left.
        told: `scope["state"]`, where routes, and the connection, leave what they know better.
        outcome: one of `server_metrics.OUTCOMES`, empty before the end.
    """

    __slots__ = (
        "arrival_ns",
        "client",
        "end_ns",
        "engine_id",
        "error_type",
        "first_byte_ns",
        "has_left",
        "is_complete",
        "method",
        "method_label",
        "num_bytes",
        "num_chunks",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_request_bytes",
        "outcome",
        "path",
        "refusal",
        "request_id",
        "route",
        "span",
        "status",
        "told",
        "traceparent",
    )

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        *,
        arrival_ns: int,
        route: str = OTHER,
        method_label: str = OTHER,
    ) -> None:
        client = scope.get("client")
        self.arrival_ns = arrival_ns
        self.client: str | None = None if client is None else client[0]
        self.method: str = scope["method"]
        self.path = shown_path(scope)
        self.route = route
        self.method_label = method_label
        self.request_id = self.engine_id = ""
        self.traceparent: str | None = None
        self.span: Any = None
        self.told: Mapping[str, Any] = {}
        self.status = 0
        self.num_bytes = self.num_chunks = self.num_request_bytes = 0
        self.first_byte_ns = self.end_ns = 0
        self.is_complete = self.has_left = False
        self.outcome = ""
        self.refusal: str | None = None
        self.error_type: str | None = None
        self.num_prompt_tokens: int | None = None
        self.num_output_tokens: int | None = None

    @property
    def ids(self) -> set[str]:
        """What it can be asked for by; the ids of its engine requests begin with one of these."""
        return {self.request_id, self.engine_id, self.told.get("response_id", self.engine_id)}

    @property
    def generates(self) -> bool:
        """Whether it asks for a completion or a chat, be it refused."""
        return self.method == "POST" and self.route.startswith("/v1/")

    @property
    def duration_ns(self) -> int:
        """Headers read to the end."""
        return self.end_ns - self.arrival_ns

    @property
    def is_ours(self) -> bool:
        """Whether what went wrong was the server's fault."""
        return self.outcome in ("engine_error", "server_error", "cancelled") or (
            self.outcome == "refused" and self.status >= 500
        )

    def conclude(self, error: BaseException | None, *, phase: Phase) -> None:
        """Say what became of it.

        Args:
            error: what the application raised.
            phase: of the server.
        """
        told = self.told
        self.num_prompt_tokens = told.get("num_prompt_tokens")
        answered = told.get("answered")
        if answered is not None:  # by the connection: the application has been told of its end only
            (self.status, self.num_bytes), self.is_complete, error = answered, True, None
        self.outcome = self._outcome(told.get("outcome"), error, phase)
        if self.outcome == "disconnected":
            self.status = CLIENT_LEFT_STATUS
        elif not self.status:
            self.status = 503 if self.outcome == "cancelled" else 500
        has_failed = self.outcome == "server_error" and self.status == 503
        if has_failed or self.outcome == "client_error":
            self.refusal = self._refusal(told.get("refusal"), phase)
        if self.refusal is not None:
            self.outcome = "refused"
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self.error_type = type(error).__name__
        elif self.outcome != "completed":
            by_status = self.outcome in ("client_error", "server_error", "refused")
            self.error_type = str(self.status) if by_status else self.outcome

    def _outcome(self, told: str | None, error: BaseException | None, phase: Phase) -> str:
        if self.has_left and not self.is_complete:
            return "disconnected"
        if told in OUTCOMES:
            return told
        if isinstance(error, asyncio.CancelledError):
            return "cancelled"
        if error is not None or not self.is_complete:
            return "server_error"
        if self.status < 400 or (self.status == 503 and self.route in PROBES):
            return "completed"
        if self.status == 503 and "response_id" in self.told:  # the engine had it
            return "cancelled" if phase is Phase.STOPPING else "engine_error"
        return "client_error" if self.status < 500 else "server_error"

    def _refusal(self, told: str | None, phase: Phase) -> str | None:
        if told in REFUSALS:
            return told
        if self.status == 503:
            return _REFUSAL_OF_PHASE[phase]
        return _REFUSAL_OF_STATUS.get(self.status)


class RequestHeaders:
    """The headers of a request that say who it is.

    Attributes:
        request_id: X-Request-Id if it is of a sane form, else a fresh one.
        traceparent: None for none, several, or one that is not of the form.
        tracestate: all headers of that name as one; None without a traceparent.
        user_agent: cut to a sane length.
    """

    __slots__ = ("request_id", "traceparent", "tracestate", "user_agent")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        request_id = user_agent = None
        parents: list[bytes] = []
        states: list[bytes] = []
        for name, value in headers:
            if name == b"x-request-id":
                request_id = value
            elif name == b"traceparent":
                parents.append(value)
            elif name == b"tracestate":
                states.append(value)
            elif name == b"user-agent":
                user_agent = value
        self.request_id = sane_request_id(request_id) or secrets.token_hex(12)
        traceparent = parents[0].decode("latin-1").strip() if len(parents) == 1 else None
        is_known = parse_traceparent(traceparent) is not None
        self.traceparent = traceparent if is_known else None
        tracestate = b",".join(states).decode("latin-1")
        has_state = is_known and 0 < len(tracestate) <= _MAX_TRACESTATE
        self.tracestate = tracestate if has_state else None
        self.user_agent: str | None = None
        if user_agent is not None:
            self.user_agent = user_agent[:_MAX_SHOWN].decode("latin-1")


def sane_request_id(header: bytes | None) -> str | None:
    """A client's id if it is one to four words' worth of letters, digits and ._:=+@-, else None."""
    if header is None:
        return None
    text = header.decode("latin-1").strip()
    return text if _REQUEST_ID.fullmatch(text) else None


def shown_path(scope: Mapping[str, Any]) -> str:
    """The path as it came, still percent-encoded: nothing in it can forge a line of a log.

    ASGI puts the prefix that a proxy has taken off in front of it again; we do not.
    """
    raw = scope.get("raw_path")
    text = quote(scope["path"]) if raw is None else raw.decode("ascii", "backslashreplace")
    text = text.removeprefix(scope.get("root_path", ""))
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
