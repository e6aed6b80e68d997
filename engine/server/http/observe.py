"""What is seen of every HTTP request: an id, a span, counts, a line in the log.

Outermost of all, so that every arrival has exactly one outcome, whoever answered it. Pure ASGI; a
part of a stream costs it a few additions. Knows no route: those find `request_id`, `traceparent`
and `arrival_ns` in `request.state`, and may leave `outcome`, `refusal`, `response_id` and
`num_prompt_tokens` there.
"""

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.frontend.request_tracer import HttpArrival, RequestTracer
from engine.log import serving
from engine.server.http.access_log import log_exchange
from engine.server.http.errors import ApiError
from engine.server.http.exchange import ExchangeState, RequestHeaders
from engine.server.http.loop_watch import LoopWatch
from engine.server.http.route_names import RouteNames, route_path
from engine.server.http.served import Served
from engine.server.http.wire import Wire
from instrumentation.metrics.buckets import parse_buckets
from instrumentation.metrics.server import OTHER, ServerMetrics

NUM_REMEMBERED = 1024
"""Exchanges that have ended and can still be asked for by their id."""


class Observation:
    """What is known of the exchanges of one server process.

    Args:
        state: the server's.
        names: of its routes, once it is asked for a request.
        clock: in nanoseconds.

    Attributes:
        metrics: the counts; also part of the engine's snapshots once the engine has started.
        in_flight: exchanges under way by `engine_id`.
    """

    def __init__(
        self,
        state: Served,
        names: Callable[[], RouteNames],
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        engine = state.engine
        settings = engine.config.observability
        self.clock = clock
        self.metrics = ServerMetrics(
            {"model_name": engine.labelled_name or engine.model_name, "engine": "0"},
            buckets=parse_buckets(settings.custom_histogram_buckets),
            clock=clock,
        )
        self.in_flight: dict[str, ExchangeState] = {}
        self.loop_watch = LoopWatch(self.metrics)
        self._state = state
        self._names = names
        self._writes_log = not state.config.disable_access_log
        self._ended: OrderedDict[str, ExchangeState] = OrderedDict()
        self._nobody = RequestTracer()
        engine.metric_sources.append(self.metrics.snapshot)

    @property
    def tracer(self) -> RequestTracer:
        """The engine's, once it has started."""
        engine = getattr(self._state.engine, "llm_engine", None)
        return self._nobody if engine is None else engine.tracer

    def begin(self, scope: Scope, *, arrival_ns: int | None = None) -> ExchangeState:
        """A request has come in, now or then; its identity goes into `scope["state"]`."""
        self.metrics.observe_arrival()
        route, method_label = self._names().find(route_path(scope), scope["method"])
        exchange = ExchangeState(
            scope, arrival_ns=arrival_ns or self.clock(), route=route, method_label=method_label
        )
        headers = RequestHeaders(scope["headers"])
        exchange.request_id = headers.request_id
        exchange.engine_id = self._unique(headers.request_id)
        exchange.traceparent = headers.traceparent
        self.in_flight[exchange.engine_id] = exchange
        tracer = self.tracer
        if tracer.is_on:
            exchange.span = tracer.begin_http(_arrival(scope, exchange, headers))
            if exchange.span is not None:
                exchange.traceparent = exchange.span.traceparent or exchange.traceparent
        told = scope.setdefault("state", {})
        told["request_id"] = exchange.engine_id
        told["traceparent"] = exchange.traceparent
        told["arrival_ns"] = exchange.arrival_ns
        exchange.told = told
        return exchange

    def refuse(
        self,
        error: ApiError,
        client: tuple[str, int] | None,
        *,
        begin_ns: int,
        num_bytes: int,
    ) -> None:
        """A connection is refused before there is a request: one arrival, and its outcome.

        The answer gets the id in its headers, as others do.
        """
        scope: dict[str, Any] = {"type": "http", "method": "-", "path": "-", "headers": []}
        scope["client"] = client
        exchange = self.begin(scope, arrival_ns=begin_ns)
        scope["state"]["answered"] = error.status, num_bytes
        if self._state.config.enable_request_id_headers:
            error.headers["X-Request-Id"] = exchange.request_id
        if error.code == "too_many_connections":
            scope["state"]["refusal"] = "connections_full"
        self.end(exchange, None)

    def leave(self, scope: Scope) -> None:
        """The client of a request left while those before it in a pipeline were being answered."""
        exchange = self.begin(scope)
        exchange.has_left = True
        self.end(exchange, None)

    def end(self, exchange: ExchangeState, error: BaseException | None) -> None:
        """It has ended: count it, trace it, log it."""
        exchange.end_ns = exchange.end_ns or self.clock()
        num_sent_bytes = exchange.num_bytes
        exchange.conclude(error, phase=self._state.phase)
        num_bytes_of = self.metrics.num_response_bytes
        num_bytes_of[exchange.route] += exchange.num_bytes - num_sent_bytes
        exchange.num_output_tokens = self._num_output_tokens(exchange)
        exchange.told = {"response_id": exchange.told.get("response_id", exchange.engine_id)}
        del self.in_flight[exchange.engine_id]
        first_byte_ns = exchange.first_byte_ns
        self.metrics.observe_end(
            method=exchange.method_label,
            route=exchange.route,
            status=exchange.status,
            outcome=exchange.outcome,
            duration_ns=exchange.duration_ns,
            num_request_bytes=exchange.num_request_bytes,
            first_byte_ns=first_byte_ns - exchange.arrival_ns if first_byte_ns else None,
            refusal=exchange.refusal,
            traceparent=exchange.traceparent,
        )
        if exchange.generates:
            self._remember(exchange)
        if exchange.span is not None:
            self.tracer.end_http(
                exchange.span,
                end_ns=exchange.end_ns,
                status=exchange.status,
                num_bytes=exchange.num_bytes,
                error_type=exchange.error_type,
                is_ours=exchange.is_ours,
            )
            exchange.span = None
        if self._writes_log:
            log_exchange(exchange)

    def find(self, request_id: str) -> list[ExchangeState]:
        """All that are known under an X-Request-Id, or under an id made from it; oldest first."""
        return [one for one in self.exchanges() if request_id in one.ids]

    def exchanges(self) -> list[ExchangeState]:
        """All that are known, those under way last."""
        return [*self._ended.values(), *self.in_flight.values()]

    def _num_output_tokens(self, exchange: ExchangeState) -> int | None:
        """What the engine made for it, None if nothing is known of that."""
        observer, first = self._state.engine.observer, exchange.told.get("response_id")
        if observer is None or first is None:
            return None
        finished = observer.history.finished
        num_tokens = None
        for request_id in _request_ids(first, lambda one: finished(one) is not None):
            timeline = finished(request_id)
            if timeline is not None:
                num_tokens = (num_tokens or 0) + timeline.num_generation_tokens
        return num_tokens

    def _unique(self, request_id: str) -> str:
        """Two requests of one id may be under way, such as a client's second attempt."""
        unique, number = request_id, 1
        while unique in self.in_flight:
            number += 1
            unique = f"{request_id}~{number}"
        return unique

    def _remember(self, exchange: ExchangeState) -> None:
        self._ended.pop(exchange.engine_id, None)
        self._ended[exchange.engine_id] = exchange
        while len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)


class ObserveMiddleware:
    """Watches the messages of each exchange go by."""

    def __init__(
        self,
        app: ASGIApp,
        observation: Observation,
        *,
        shows_ids: bool,
    ) -> None:
        self.app = app
        self._observation = observation
        self._shows_ids = shows_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        observation = self._observation
        observation.loop_watch.start()
        exchange = observation.begin(scope)
        if self._shows_ids:
            scope["state"]["shown_id"] = exchange.request_id
        wire = Wire(
            exchange,
            receive,
            send,
            observation.metrics,
            clock=observation.clock,
            shows_id=self._shows_ids,
        )
        error: BaseException | None = None
        with serving(exchange.engine_id, exchange.traceparent):
            try:
                await self.app(scope, wire.receive, wire.send)
            except BaseException as raised:
                error = raised
                # What has been answered with a 500 has been logged as well.
                is_answered = exchange.is_complete and exchange.status == 500
                if not (isinstance(raised, Exception) and is_answered):
                    raise
            finally:
                wire.close()
                observation.end(exchange, error)


def observe(app: FastAPI, state: Served, names: Callable[[], RouteNames]) -> Observation:
    """Watch an application; returns what is seen of its requests."""
    observation = Observation(state, names)
    build = app.build_middleware_stack

    def build_watched() -> Any:
        # Outside of Starlette's own answer to errors, which no added middleware is.
        return ObserveMiddleware(
            build(),
            observation,
            shows_ids=state.config.enable_request_id_headers,
        )

    app.build_middleware_stack = build_watched  # type: ignore[method-assign]
    return observation


def _request_ids(first: str, exists: Callable[[str], bool]) -> Iterator[str]:
    """The engine's ids of one exchange's sequences: `-<prompt>` where there are several prompts,
    `/<sample>` where there are several samples."""
    bases: Iterable[str] = (first,)
    if not exists(first) and not exists(f"{first}/0"):
        bases = (f"{first}-{number}" for number in itertools.count())
    for base in bases:
        if exists(base):
            yield base
            continue
        if not exists(f"{base}/0"):
            return
        samples = (f"{base}/{number}" for number in itertools.count())
        yield from itertools.takewhile(exists, samples)


def _arrival(scope: Scope, exchange: ExchangeState, headers: RequestHeaders) -> HttpArrival:
    client = scope.get("client")
    return HttpArrival(
        method=exchange.method,
        route=None if exchange.route == OTHER else exchange.route,
        path=exchange.path,
        scheme=scope.get("scheme", "http"),
        protocol_version=scope.get("http_version", "1.1"),
        client=None if client is None else (client[0], client[1]),
        server=scope.get("server"),
        user_agent=headers.user_agent,
        request_id=exchange.request_id,
        begin_ns=exchange.arrival_ns,
        traceparent=headers.traceparent,
        tracestate=headers.tracestate,
    )
