"""The audit: every option has a line, and what was asked for in vain is said to be."""

from dataclasses import fields

import pytest

from instrumentation import ObservabilityConfig
from instrumentation.audit import AuditState, audit, without_effect


def states(config: ObservabilityConfig, **environment: str) -> dict[str, AuditState]:
    return {line.option: line.state for line in audit(config, environment=environment)}


def test_every_option_has_a_line_and_nothing_is_asked_for_in_vain_by_default() -> None:
    lines = audit(ObservabilityConfig(), environment={})
    assert {spec.name for spec in fields(ObservabilityConfig)} < {line.option for line in lines}
    assert not without_effect(lines)
    assert all(line.detail and str(line).startswith(line.option) for line in lines)


@pytest.mark.parametrize(
    ("option", "settings"),
    [
        ("metrics_compat", {"metrics_compat": "vllm"}),
        ("metrics_host", {"metrics_host": "::1"}),
        ("custom_histogram_buckets", {"custom_histogram_buckets": "{}", "disable_log_stats": True}),
        ("slo_ttft_s", {"slo_ttft_s": 1.0, "disable_log_stats": True}),
        ("trace_steps", {"trace_steps": "all"}),
        ("trace_slow_request_s", {"trace_slow_request_s": 1.0}),
        ("enable_layerwise_nvtx_tracing", {"enable_layerwise_nvtx_tracing": True}),
        ("flight_slow_step_s", {"flight_slow_step_s": 1.0, "flight_recorder_steps": 0}),
        ("flight_dir", {"flight_dir": "x", "flight_recorder_steps": 0}),
        ("nvtx", {"nvtx": "on"}),
    ],
)
def test_what_is_asked_for_in_vain(option: str, settings: dict[str, object]) -> None:
    lines = audit(ObservabilityConfig(**settings), environment={})  # type: ignore[arg-type]
    assert option in {line.option for line in without_effect(lines)}


def test_what_an_option_needs_makes_it_count() -> None:
    config = ObservabilityConfig(
        metrics_compat="vllm", metrics_port=0, trace_steps="all", trace_slow_request_s=2.0
    )
    found = states(config, OTEL_EXPORTER_OTLP_ENDPOINT="http://localhost:4317")
    assert found["metrics_compat"] is found["trace_steps"] is AuditState.ON
    assert found["otlp_traces_endpoint"] is AuditState.ON
    assert found["trace_slow_request_s"] is AuditState.WITHOUT_EFFECT  # all steps are exported
    disabled = states(
        ObservabilityConfig(otlp_traces_endpoint="http://localhost:4317"), OTEL_SDK_DISABLED="true"
    )
    assert disabled["otlp_traces_endpoint"] is AuditState.WITHOUT_EFFECT


def test_an_objective_of_zero_is_one() -> None:
    found = states(ObservabilityConfig(slo_ttft_s=0.0, flight_slow_step_s=0.0))
    assert found["slo_ttft_s"] is found["flight_slow_step_s"] is AuditState.ON
    lines = audit(ObservabilityConfig(slo_itl_s=0.0, disable_log_stats=True), environment={})
    assert [line.option for line in without_effect(lines)] == ["slo_itl_s"]


def test_tracing_that_could_not_be_set_up_is_not_on() -> None:
    config = ObservabilityConfig(otlp_traces_endpoint="http://localhost:4317")
    lines = audit(config, environment={}, is_tracing=False)
    assert "otlp_traces_endpoint" in {line.option for line in without_effect(lines)}


def test_a_variable_that_cannot_be_used_is_named() -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
    }
    [line] = without_effect(audit(ObservabilityConfig(), environment=environment))
    assert "http/json" in line.detail


def test_hooks_of_the_environment_are_named() -> None:
    lines = audit(ObservabilityConfig(), environment={"ISINGLASS_HOOKS": "gc"})
    [hooks] = [line for line in lines if line.option == "ISINGLASS_HOOKS"]
    assert (hooks.state, hooks.detail) == (AuditState.ON, "gc")
