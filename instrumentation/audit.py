"""The audit at start-up: each option of observability on, off, or asked for without effect.

Knows what each option needs to do anything. Does not carry any of them out.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import NamedTuple

from instrumentation.config import ObservabilityConfig
from instrumentation.hooks.registry import GATE_VARIABLE
from instrumentation.otel.settings import (
    OtlpSettings,
    application_provider,
    is_disabled,
    read_settings,
)
from instrumentation.profile.nvtx import choose_nvtx


class AuditState(StrEnum):
    """What became of an option."""

    ON = "on"
    OFF = "off"
    WITHOUT_EFFECT = "without effect"


class AuditLine(NamedTuple):
    """One option, what became of it, and why or how."""

    option: str
    state: AuditState
    detail: str

    def __str__(self) -> str:
        return f"{self.option}: {self.state} ({self.detail})"


def audit(
    config: ObservabilityConfig,
    *,
    environment: Mapping[str, str] | None = None,
    is_tracing: bool | None = None,
    has_server: bool = False,
) -> list[AuditLine]:
    """Look at every option; a line each, and one for the hooks of the environment.

    `is_tracing` says whether the engine has really set OpenTelemetry up, None before it has tried;
    `has_server` whether a server offers the metrics, whatever `metrics_port` is.
    """
    environ = os.environ if environment is None else environment
    lines = [
        *_metrics(config, has_server=has_server),
        *_recording(config),
        *_flight(config),
        *_otel(config, environ, is_tracing),
        *_ranges(config, environ),
    ]
    audited = {option for line in lines for option in line.option.split(", ")}
    missing = {spec.name for spec in fields(config)} - audited
    assert not missing, f"options that the audit does not know: {sorted(missing)}"
    hooks = environ.get(GATE_VARIABLE, "")
    lines.append(_line(GATE_VARIABLE, bool(hooks), hooks or "no hooks are asked for"))
    return lines


def without_effect(lines: Iterable[AuditLine]) -> list[AuditLine]:
    """Those that were asked for in vain."""
    return [line for line in lines if line.state is AuditState.WITHOUT_EFFECT]


def _line(option: str, is_on: bool, detail: str) -> AuditLine:
    return AuditLine(option, AuditState.ON if is_on else AuditState.OFF, detail)


def _needs(
    config: ObservabilityConfig, option: str, *, has: bool, needed: str, on: str
) -> AuditLine:
    """A line of an option that does nothing without something else."""
    value = getattr(config, option)
    default = next(spec.default for spec in fields(config) if spec.name == option)
    if value == default and not has:
        return AuditLine(option, AuditState.OFF, needed)
    if value is None or value is False or value == "none":
        return AuditLine(option, AuditState.OFF, "not asked for")
    if not has:
        return AuditLine(option, AuditState.WITHOUT_EFFECT, needed)
    return AuditLine(option, AuditState.ON, on.format(value))


def _metrics(config: ObservabilityConfig, *, has_server: bool) -> Iterator[AuditLine]:
    has_metrics = not config.disable_log_stats
    off = "disable_log_stats is set"
    has_endpoint = has_metrics and config.metrics_port is not None
    yield _line("disable_log_stats", not has_metrics, "no metrics" if not has_metrics else "kept")
    yield _needs(config, "log_stats_interval_s", has=has_metrics, needed=off, on="every {:g} s")
    yield _needs(config, "metrics_port", has=has_metrics, needed=off, on="port {}")
    no_endpoint = "there is no endpoint: set metrics_port"
    yield _needs(config, "metrics_host", has=has_endpoint, needed=no_endpoint, on="{}")
    is_offered = has_endpoint or (has_server and has_metrics)
    yield _needs(config, "metrics_compat", has=is_offered, needed=no_endpoint, on="names of {} too")
    yield _needs(
        config, "custom_histogram_buckets", has=has_metrics, needed=off, on="bounds replaced"
    )
    yield _needs(config, "slo_ttft_s", has=has_metrics, needed=off, on="{:g} s")
    yield _needs(config, "slo_itl_s", has=has_metrics, needed=off, on="{:g} s")
    yield _line("log_format", True, config.log_format)


def _recording(config: ObservabilityConfig) -> Iterator[AuditLine]:
    is_recording = config.trace_dir is not None
    yield _line("trace_dir", is_recording, config.trace_dir or "start_trace() begins one")
    yield _line("trace_max_bytes", True, f"{config.trace_max_bytes} bytes a process")
    ring_s = config.trace_ring_s
    yield _line("trace_ring_s", ring_s is not None, f"{ring_s:g} s" if ring_s else "all is kept")
    yield _line("telemetry_max_share", True, f"{config.telemetry_max_share:g} of the time")
    yield _line("profiler_dir", True, config.profiler_dir or "the run's folder, or a temporary one")
    yield _line(
        "profiler_max_steps", True, f"start_profile() ends after {config.profiler_max_steps}"
    )
    yield _line("profiler_max_bytes", True, f"or after {config.profiler_max_bytes} bytes")


def _flight(config: ObservabilityConfig) -> Iterator[AuditLine]:
    has_recorder = config.flight_recorder_steps > 0
    none = "flight_recorder_steps is 0"
    yield _line(
        "flight_recorder_steps",
        has_recorder,
        f"the last {config.flight_recorder_steps} steps" if has_recorder else "none are kept",
    )
    if config.flight_dir is None:
        yield _line("flight_dir", has_recorder, "the run's folder, or a temporary one")
    else:
        yield _needs(config, "flight_dir", has=has_recorder, needed=none, on="{}")
    yield _needs(config, "flight_slow_step_s", has=has_recorder, needed=none, on="{:g} s")
    yield _needs(
        config, "flight_slow_step_factor", has=has_recorder, needed=none, on="{:g} times the median"
    )


def _otel(
    config: ObservabilityConfig, environ: Mapping[str, str], is_tracing: bool | None
) -> Iterator[AuditLine]:
    has_provider = application_provider() is not None
    wrong = ""
    try:
        targets = read_settings(config, environ)
    except ValueError as error:
        targets, wrong = OtlpSettings(None, None), str(error)
    if is_tracing is False and (targets.exports_anything or has_provider):
        targets, has_provider = OtlpSettings(None, None), False
        wrong = "it was not set up when the engine started; its log says why, if it was asked for"
    has_traces = targets.traces is not None or has_provider
    if is_disabled(environ):
        needed = "OTEL_SDK_DISABLED is true"
    else:
        needed = "no receiver is named (otlp_traces_endpoint or OTEL_EXPORTER_OTLP_ENDPOINT)"
    shown = [f"traces to {targets.traces.shown}"] if targets.traces is not None else []
    shown += ["traces to the application's own provider"] if has_provider else []
    if targets.metrics is not None and not config.disable_log_stats:
        shown.append(f"metrics to {targets.metrics.shown}")
    if wrong:
        yield AuditLine("otlp_traces_endpoint", AuditState.WITHOUT_EFFECT, wrong)
    elif config.otlp_traces_endpoint is None:
        yield _line("otlp_traces_endpoint", has_traces, ", ".join(shown) or needed)
    else:
        on = ", ".join(shown)
        yield _needs(config, "otlp_traces_endpoint", has=has_traces, needed=needed, on=on)
    if config.trace_steps == "off":
        yield _line("trace_steps", False, "not asked for")
    else:
        yield _needs(config, "trace_steps", has=has_traces, needed=needed, on="{}")
    is_sampled = has_traces and config.trace_steps == "sampled"
    yield _needs(
        config,
        "trace_slow_request_s",
        has=is_sampled,
        needed=needed if not has_traces else "trace_steps is not sampled",
        on="{:g} s",
    )


def _ranges(config: ObservabilityConfig, environ: Mapping[str, str]) -> Iterator[AuditLine]:
    choice = choose_nvtx(config.nvtx, environ)
    is_on = choice.ranges is not None
    if config.nvtx == "on" and not is_on:
        yield AuditLine("nvtx", AuditState.WITHOUT_EFFECT, choice.reason)
    else:
        yield _line("nvtx", is_on, choice.reason)
    yield _needs(
        config,
        "enable_layerwise_nvtx_tracing",
        has=is_on,
        needed=f"NVTX is off: {choice.reason}",
        on="a range for each layer",
    )
