"""Metrics of the HTTP server: what came in, what became of it, and what serving it costs.

Knows the counts and what must add up. Does not know HTTP's messages nor the event loop: the server
tells of each exchange once at its beginning and once at its end. One thread counts; others may read
at any time.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from instrumentation.metrics.accumulators import Families
from instrumentation.metrics.info import HTTP_BUCKETS, AfterDeath, MetricKind, Unit, declare
from instrumentation.metrics.process_facts import read_process_facts, read_start_wall_ns
from instrumentation.metrics.requests import exemplar_of
from instrumentation.metrics.types import Metric

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

OUTCOMES = (
    "completed",
    "client_error",
    "refused",
    "disconnected",
    "engine_error",
    "server_error",
    "cancelled",
)
REFUSALS = (
    "auth",
    "too_slow",
    "body_too_large",
    "headers_too_large",
    "queue_full",
    "connections_full",
    "starting",
    "stopping",
    "dead",
)
OTHER = "other"
"""The route of a path that no route has, and the method of one that the route does not have."""
_LAG_WINDOW_NS = 10_000_000_000

HTTP_ARRIVED = declare(
    "http_requests_arrived_total",
    _COUNTER,
    unit=Unit.REQUESTS,
    help="HTTP requests whose headers have come in, or that were refused before they had. "
    "Arrived = outcomes + in flight; so is the sum of isinglass_http_requests_total",
)
HTTP_REQUESTS = declare(
    "http_requests_total",
    _COUNTER,
    unit=Unit.REQUESTS,
    help="HTTP requests that have ended, by method (other: one that the route does not have), "
    "route template (other: no such path) and status; 499: the client left before the end",
    method=(),
    route=(),
    status=(),
)
HTTP_OUTCOMES = declare(
    "http_request_outcomes_total",
    _COUNTER,
    unit=Unit.REQUESTS,
    help="What became of HTTP requests, each exactly once. refused: 401, 408, 413, 429, 431, 503; "
    "disconnected: the client left; engine_error: the engine failed or died at it; cancelled: "
    "the server ended it",
    outcome=OUTCOMES,
)
HTTP_REFUSED = declare(
    "http_requests_refused_total",
    _COUNTER,
    unit=Unit.REQUESTS,
    help="HTTP requests refused before the engine saw them, by the reason",
    reason=REFUSALS,
)
HTTP_IN_FLIGHT = declare(
    "http_requests_in_flight",
    _GAUGE,
    unit=Unit.REQUESTS,
    help="HTTP requests that have arrived and not ended, this scrape included",
    adds_up=True,
    after_death=AfterDeath.LIVE,
)
HTTP_SECONDS = declare(
    "http_request_duration_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Headers read to last byte handed to the socket (or to the client's leaving)",
    buckets=HTTP_BUCKETS,
    method=(),
    route=(),
)
HTTP_FIRST_BYTE = declare(
    "http_time_to_first_byte_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="Headers read to first byte of the body handed to the socket",
    route=(),
)
HTTP_REQUEST_BYTES = declare(
    "http_request_bytes_total",
    _COUNTER,
    unit=Unit.BYTES,
    help="Bytes of bodies that were read, of HTTP requests that have ended",
    route=(),
)
HTTP_RESPONSE_BYTES = declare(
    "http_response_bytes_total",
    _COUNTER,
    unit=Unit.BYTES,
    help="Bytes of bodies handed to the socket, as they go",
    route=(),
)
HTTP_CHUNKS = declare(
    "http_stream_chunks_total",
    _COUNTER,
    unit=Unit.ENTRIES,
    help="Parts of streamed bodies handed to the socket, as they go",
)
FRONTEND_CPU = declare(
    "frontend_cpu_seconds_total",
    _COUNTER,
    unit=Unit.SECONDS,
    help="Processor time of the server's process, start-up included. Its rate over that of "
    "isinglass_generation_tokens_total is what a token costs outside of the engine core",
)
FRONTEND_LAG = declare(
    "frontend_event_loop_lag_seconds",
    _HISTOGRAM,
    unit=Unit.SECONDS,
    help="How late the event loop ran a timer, sampled four times a second",
)
FRONTEND_LAG_MAX = declare(
    "frontend_event_loop_lag_max_seconds",
    _GAUGE,
    unit=Unit.SECONDS,
    help="The worst of the last ten seconds; it grows while the loop is blocked",
    after_death=AfterDeath.LIVE,
)
FRONTEND_MEMORY = declare(
    "frontend_resident_memory_bytes",
    _GAUGE,
    unit=Unit.BYTES,
    help="Resident memory of the server's process, the engine core's not included",
    adds_up=True,
    after_death=AfterDeath.LIVE,
)
FRONTEND_VIRTUAL_MEMORY = declare(
    "frontend_virtual_memory_bytes",
    _GAUGE,
    unit=Unit.BYTES,
    help="Virtual memory of the server's process, the engine core's not included",
    adds_up=True,
    after_death=AfterDeath.LIVE,
)
FRONTEND_DESCRIPTORS = declare(
    "frontend_open_file_descriptors",
    _GAUGE,
    unit=Unit.ENTRIES,
    help="File descriptors that the server's process has open, a connection each among them",
    adds_up=True,
    after_death=AfterDeath.LIVE,
)
FRONTEND_MAX_DESCRIPTORS = declare(
    "frontend_max_file_descriptors",
    _GAUGE,
    unit=Unit.ENTRIES,
    help="File descriptors that the server's process may have open (RLIMIT_NOFILE)",
    adds_up=True,
    after_death=AfterDeath.LIVE,
)
FRONTEND_START = declare(
    "frontend_start_time_seconds",
    _GAUGE,
    unit=Unit.SECONDS,
    help="When the server's process began, in seconds since 1970; of several frontends, the first",
    after_death=AfterDeath.LIVE,
)


SERVER_METRICS = frozenset(
    info.name
    for info in (
        HTTP_ARRIVED,
        HTTP_REQUESTS,
        HTTP_OUTCOMES,
        HTTP_REFUSED,
        HTTP_IN_FLIGHT,
        HTTP_SECONDS,
        HTTP_FIRST_BYTE,
        HTTP_REQUEST_BYTES,
        HTTP_RESPONSE_BYTES,
        HTTP_CHUNKS,
        FRONTEND_CPU,
        FRONTEND_LAG,
        FRONTEND_LAG_MAX,
        FRONTEND_MEMORY,
        FRONTEND_VIRTUAL_MEMORY,
        FRONTEND_DESCRIPTORS,
        FRONTEND_MAX_DESCRIPTORS,
        FRONTEND_START,
    )
)
"""What an engine without a server does not have."""


class ServerMetrics:
    """Counts for one server process.

    Args:
        labels: further labels of every series.
        buckets: other bounds for histograms, by full name; see `parse_buckets`.
    """

    def __init__(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        buckets: Mapping[str, tuple[float, ...]] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.labels = dict(labels or {})
        self.num_response_bytes: defaultdict[str, int] = defaultdict(int)
        """By route. Raised by the server as bytes go, without a lock: one thread does."""
        self.num_chunks = 0
        """Likewise."""
        self._clock = clock
        self._lock = threading.Lock()
        families = self._families = Families(buckets)
        self._arrived = families.counter(HTTP_ARRIVED)
        self._requests = families.counter(HTTP_REQUESTS)
        self._outcomes = families.counter(HTTP_OUTCOMES)
        self._refused = families.counter(HTTP_REFUSED)
        self._in_flight = families.gauge(HTTP_IN_FLIGHT)
        self._seconds = families.histogram(HTTP_SECONDS)
        self._first_byte = families.histogram(HTTP_FIRST_BYTE)
        self._request_bytes = families.counter(HTTP_REQUEST_BYTES)
        self._response_bytes = families.counter(HTTP_RESPONSE_BYTES)
        self._chunks = families.counter(HTTP_CHUNKS)
        self._cpu = families.counter(FRONTEND_CPU)
        self._lag = families.histogram(FRONTEND_LAG)
        self._lag_max = families.gauge(FRONTEND_LAG_MAX)
        self._memory = families.gauge(FRONTEND_MEMORY)
        self._virtual_memory = families.gauge(FRONTEND_VIRTUAL_MEMORY)
        self._descriptors = families.gauge(FRONTEND_DESCRIPTORS)
        self._max_descriptors = families.gauge(FRONTEND_MAX_DESCRIPTORS)
        self._start = families.gauge(FRONTEND_START)
        self._start.set(read_start_wall_ns())
        self._num_in_flight = 0
        self._lags: list[tuple[int, int]] = []
        self._next_sample_ns = 0

    def observe_arrival(self) -> None:
        """Count a request: once, before anything is done about it."""
        with self._lock:
            self._arrived.add(1)
            self._num_in_flight += 1

    def observe_end(
        self,
        *,
        method: str,
        route: str,
        status: int,
        outcome: str,
        duration_ns: int,
        num_request_bytes: int = 0,
        first_byte_ns: int | None = None,
        refusal: str | None = None,
        traceparent: str | None = None,
    ) -> None:
        """Count a request's end: once, whatever became of it.

        Args:
            method: as given; one that the route does not have is to be called "other".
            route: the template of its path.
            outcome: one of `OUTCOMES`.
            num_request_bytes: of its body, as far as it was read.
            first_byte_ns: None where no body was sent.
            refusal: one of `REFUSALS`, None for a request that was served.
            traceparent: the request's trace, which becomes the exemplar of its duration.
        """
        with self._lock:
            self._num_in_flight -= 1
            self._requests.add(1, method, route, str(status))
            self._outcomes.add(1, outcome if outcome in OUTCOMES else "server_error")
            if refusal is not None:
                self._refused.add(1, refusal)
            exemplar = exemplar_of(duration_ns, traceparent)
            self._seconds.observe(duration_ns, method, route, exemplar=exemplar)
            self._request_bytes.add(num_request_bytes, route)
            if first_byte_ns is not None:
                self._first_byte.observe(first_byte_ns, route)

    def observe_loop(self, lag_ns: int, *, next_sample_ns: int) -> None:
        """Count how late the event loop ran a timer, and note when it is to run the next."""
        now_ns = self._clock()
        with self._lock:
            self._lag.observe(max(0, lag_ns))
            self._lags = [one for one in self._lags if one[0] > now_ns - _LAG_WINDOW_NS]
            self._lags.append((now_ns, lag_ns))
            self._next_sample_ns = next_sample_ns

    def snapshot(self) -> list[Metric]:
        """Read every series, in the catalogue's order."""
        with self._lock:
            self._take_levels()
            return self._families.snapshot(self.labels)

    def _take_levels(self) -> None:
        now_ns = self._clock()
        self._in_flight.set(self._num_in_flight)
        for route, num_bytes in list(self.num_response_bytes.items()):
            self._response_bytes.raise_to(num_bytes, route)
        self._chunks.raise_to(self.num_chunks)
        self._cpu.raise_to(time.process_time_ns())
        overdue_ns = now_ns - self._next_sample_ns if self._next_sample_ns else 0
        recent = [lag for at_ns, lag in self._lags if at_ns > now_ns - _LAG_WINDOW_NS]
        self._lag_max.set(max(0, overdue_ns, *recent))
        facts = read_process_facts()
        self._memory.set(facts.resident_bytes)
        self._virtual_memory.set(facts.virtual_bytes)
        self._descriptors.set(facts.num_descriptors)
        self._max_descriptors.set(facts.max_descriptors)
