"""Whether, where and how to export: options and OTEL_* variables, without OpenTelemetry itself."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from instrumentation import ObservabilityConfig
from instrumentation.otel.settings import GRPC, HTTP, read_settings
from instrumentation.otel.setup import open_telemetry

ROOT = Path(__file__).parents[3]
BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
METRICS = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"


def settings(option: str | None = None, **environ: str) -> tuple[object, object]:
    """(protocol, endpoint, shown) of traces and metrics."""
    read = read_settings(ObservabilityConfig(otlp_traces_endpoint=option), environ)
    return tuple(
        None if one is None else (one.protocol, one.endpoint, one.shown)
        for one in (read.traces, read.metrics)
    )  # type: ignore[return-value]


def test_nothing_asks_for_nothing() -> None:
    assert settings() == (None, None)
    assert settings(OTEL_EXPORTER_OTLP_HEADERS="a=b", OTEL_SERVICE_NAME="x") == (None, None)


@pytest.mark.parametrize(
    ("address", "protocol"),
    [
        ("http://host:4317", GRPC),
        ("https://host", GRPC),
        ("http://host:4318", HTTP),
        ("http://host:4318/", HTTP),
        ("http://host:9/otlp", HTTP),
        ("host:4317", GRPC),
    ],
)
def test_the_address_decides_only_where_no_variable_does(address: str, protocol: str) -> None:
    assert settings(**{BASE: address}) == ((protocol, None, address),) * 2
    forced = {BASE: address, "OTEL_EXPORTER_OTLP_PROTOCOL": GRPC}
    assert settings(**forced) == ((GRPC, None, address),) * 2
    forced["OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"] = HTTP
    assert settings(**forced) == ((GRPC, None, address), (HTTP, None, address))


def test_each_signal_may_go_elsewhere_or_nowhere() -> None:
    assert settings(**{TRACES: "http://t:1"}) == ((GRPC, None, "http://t:1"), None)
    assert settings(**{METRICS: "http://m:1"}) == (None, (GRPC, None, "http://m:1"))
    both = {BASE: "http://b:1", METRICS: "http://m:4318/v1/metrics"}
    assert settings(**both) == (
        (GRPC, None, "http://b:1"),
        (HTTP, None, "http://m:4318/v1/metrics"),
    )
    assert settings(**both, OTEL_TRACES_EXPORTER="none")[0] is None
    assert settings(**both, OTEL_METRICS_EXPORTER="none")[1] is None
    assert settings("http://o:1", OTEL_SDK_DISABLED="True", **both) == (None, None)


def test_the_option_names_the_base_and_gives_way_only_to_the_metrics_own_variable() -> None:
    other = {BASE: "http://b:1", TRACES: "http://t:1"}
    assert settings("http://o:4317", **other) == ((GRPC, "http://o:4317", "http://o:4317"),) * 2
    traces, metrics = "http://o:4318/v1/traces", "http://o:4318/v1/metrics"
    for option in ("http://o:4318", "http://o:4318/", traces):
        assert settings(option) == ((HTTP, traces, traces), (HTTP, metrics, metrics))
    assert settings("http://o:4317", **{METRICS: "http://m:1"}) == (
        (GRPC, "http://o:4317", "http://o:4317"),
        (GRPC, None, "http://m:1"),
    )


@pytest.mark.parametrize(
    ("option", "environ", "message"),
    [
        ("host:4317", {}, "must begin with http"),
        ("grpc://host", {}, "must begin with http"),
        ("http://host:99999999", {}, "no valid port"),
        (None, {BASE: "http://h", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "http/json"),
    ],
)
def test_what_cannot_be_used_is_refused(
    option: str | None, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(option, **environ)


def test_nothing_is_imported_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BASE, "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_telemetry(ObservabilityConfig(), model="m", version="1") is None
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    monkeypatch.delenv(BASE)
    assert open_telemetry(ObservabilityConfig(), model="m", version="1") is None
    script = (
        "import sys, engine.frontend.opentelemetry_tracer, instrumentation.otel.setup\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry', 'grpc'))]"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_without_the_packages_an_option_is_an_error_and_a_variable_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "instrumentation.otel.telemetry", raising=False)
    monkeypatch.delitem(sys.modules, "instrumentation.otel.provider", raising=False)
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # as if it were not installed
    config = ObservabilityConfig(otlp_traces_endpoint="http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"pip install .*isinglass\[otel\]"):
        open_telemetry(config, model="m", version="1")
    monkeypatch.setenv(BASE, "http://127.0.0.1:1")
    assert open_telemetry(ObservabilityConfig(), model="m", version="1") is None
    assert "not all installed" in caplog.text


def test_what_a_variable_gets_wrong_is_a_warning_and_an_option_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(BASE, "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli")
    before = threading.active_count()
    assert open_telemetry(ObservabilityConfig(), model="m", version="1") is None
    assert "brotli" in caplog.text
    option = ObservabilityConfig(otlp_traces_endpoint="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="brotli"):
        open_telemetry(option, model="m", version="1")
    assert threading.active_count() == before
