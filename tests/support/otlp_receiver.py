"""A real OTLP receiver on loopback: the collector's services over gRPC, and its HTTP endpoints.

Keeps what it received as the protocol's own messages. Can be told to be slow or to refuse.
"""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.waiting import PATIENCE_S


def plain(value: Any) -> Any:
    """An AnyValue as a Python value."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def attributes_of(message: Any) -> dict[str, Any]:
    """A message's attributes as a dictionary."""
    return {one.key: plain(one.value) for one in message.attributes}


@dataclass(slots=True)
class ReceivedSpan:
    """One span, with its resource and children's lookup made easy."""

    proto: Any
    resource: dict[str, Any]
    attributes: dict[str, Any]

    @property
    def name(self) -> str:
        """The span's name."""
        return self.proto.name

    @property
    def span_id(self) -> bytes:
        """Its id."""
        return self.proto.span_id

    @property
    def parent_id(self) -> bytes:
        """Its parent's id, empty for a root."""
        return self.proto.parent_span_id

    @property
    def trace_id(self) -> bytes:
        """Its trace's id."""
        return self.proto.trace_id

    @property
    def begin_ns(self) -> int:
        """Wall clock."""
        return self.proto.start_time_unix_nano

    @property
    def end_ns(self) -> int:
        """Wall clock."""
        return self.proto.end_time_unix_nano


@dataclass(slots=True)
class OtlpReceiver:
    """What has come, and how to treat what comes.

    Attributes:
        delay_s: how long each answer takes.
        refuses: answer with an error that is not worth a retry.
        headers: of the last request.
    """

    endpoint: str = ""
    delay_s: float = 0.0
    refuses: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    trace_requests: list[Any] = field(default_factory=list)
    metric_requests: list[Any] = field(default_factory=list)
    encodings: set[str] = field(default_factory=set)
    closing: threading.Event = field(default_factory=threading.Event)
    _spans: list[ReceivedSpan] = field(default_factory=list)

    def take(self, request: Any) -> None:
        """Keep a message; traces and metrics apart."""
        if not isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            self.metric_requests.append(request)
            return
        self.trace_requests.append(request)
        self._spans += [
            ReceivedSpan(span, attributes_of(group.resource), attributes_of(span))
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def clear(self) -> None:
        """Forget what has come."""
        self.trace_requests.clear()
        self.metric_requests.clear()
        self._spans.clear()

    def wait_as_told(self) -> None:
        """Be slow."""
        self.closing.wait(self.delay_s)

    def spans(self) -> list[ReceivedSpan]:
        """All spans so far."""
        return list(self._spans)

    def requests(self) -> list[ReceivedSpan]:
        """The spans of requests."""
        return [one for one in self.spans() if "gen_ai.operation.name" in one.attributes]

    def steps(self) -> list[ReceivedSpan]:
        """The spans of steps."""
        return [one for one in self.spans() if one.name.startswith("execute_context_")]

    def children_of(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        """The spans right below one, in time order."""
        below = [one for one in self.spans() if one.parent_id == span.span_id]
        return sorted(below, key=lambda one: (one.begin_ns, one.end_ns))

    def last_metrics(self) -> dict[str, Any]:
        """The metrics of the last export that had any, by name."""
        for request in reversed(self.metric_requests):
            found = {
                metric.name: metric
                for group in request.resource_metrics
                for scope in group.scope_metrics
                for metric in scope.metrics
            }
            if found:
                return found
        return {}

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something has come.

        Raises:
            TimeoutError: it has not.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"received {[one.name for one in self.spans()]}")
            time.sleep(0.02)


class _TraceService(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self.receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's name for it
        _answer_grpc(self.receiver, request, context)
        return trace_service_pb2.ExportTraceServiceResponse()


class _MetricsService(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self.receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's name for it
        _answer_grpc(self.receiver, request, context)
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _answer_grpc(receiver: OtlpReceiver, request: Any, context: Any) -> None:
    receiver.wait_as_told()
    receiver.headers = dict(context.invocation_metadata())
    if receiver.refuses:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "this receiver wants nobody's spans")
    receiver.take(request)


def grpc_receiver(credentials: grpc.ServerCredentials | None = None) -> Iterator[OtlpReceiver]:
    """A receiver over gRPC on a free port, with TLS if there are credentials."""
    receiver = OtlpReceiver()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_TraceService(receiver), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_MetricsService(receiver), server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    receiver.endpoint = f"{'http' if credentials is None else 'https'}://127.0.0.1:{port}"
    server.start()
    try:
        yield receiver
    finally:
        receiver.closing.set()
        server.stop(grace=None).wait()


_BODIES = {
    "/v1/traces": (
        trace_service_pb2.ExportTraceServiceRequest,
        trace_service_pb2.ExportTraceServiceResponse,
    ),
    "/v1/metrics": (
        metrics_service_pb2.ExportMetricsServiceRequest,
        metrics_service_pb2.ExportMetricsServiceResponse,
    ),
}


def http_receiver() -> Iterator[OtlpReceiver]:
    """A receiver over HTTP with protobuf bodies on a free port; ends with the iteration."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.wait_as_told()
            receiver.headers = {name.lower(): value for name, value in self.headers.items()}
            known = _BODIES.get(self.path)
            is_protobuf = self.headers["Content-Type"] == "application/x-protobuf"
            if known is None or not is_protobuf or receiver.refuses:
                self._answer(404 if known is None else 400, b"")
                return
            encoding = self.headers.get("Content-Encoding", "identity")
            receiver.encodings.add(encoding)
            if encoding == "gzip":
                body = gzip.decompress(body)
            receiver.take(known[0].FromString(body))
            self._answer(200, known[1]().SerializeToString())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
