"""Deciding at start-up whether there is anything to export; imports OpenTelemetry only then.

Knows the options, the OTEL_* variables and whether the application has a tracer provider. An
engine without any of them pays for reading a handful of variables.
"""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from instrumentation.config import ObservabilityConfig
from instrumentation.metrics.types import Metric
from instrumentation.otel.settings import application_provider, is_disabled, read_settings

if TYPE_CHECKING:
    from instrumentation.otel.telemetry import Telemetry

_LOGGER = logging.getLogger("isinglass.telemetry")
_INSTALL = 'install them with `pip install "isinglass[otel]"`'


def open_telemetry(
    config: ObservabilityConfig,
    *,
    model: str,
    version: str,
    collect: Callable[[], list[Metric]] | None = None,
) -> "Telemetry | None":
    """The engine's telemetry, None where nothing is configured.

    Spans go to `otlp_traces_endpoint` where that is given; else to the application's tracer
    provider where it has set one; else to the endpoint in the variables. Metrics go to their
    endpoint in any case, if `collect` gives any.

    Raises:
        ValueError: OpenTelemetry is not installed or cannot be set up so, and an endpoint was given
            by option. Where only variables ask for it that is a warning: they may be meant for
            another program.
    """
    if is_disabled(os.environ):
        return None
    cause: Exception
    try:
        settings = read_settings(config, os.environ)
        provider = None if config.otlp_traces_endpoint else application_provider()
        if not settings.exports_anything and provider is None:
            return None
        from instrumentation.otel.telemetry import Telemetry

        return Telemetry(
            config, settings, model=model, version=version, provider=provider, collect=collect
        )
    except ImportError as error:
        problem = f"OpenTelemetry's SDK and OTLP exporters are not all installed ({error})"
        remedy, cause = _INSTALL, error
    except Exception as error:
        problem = f"OpenTelemetry cannot be set up: {error}"
        remedy, cause = "correct the option or the OTEL_* variable", error
    if config.otlp_traces_endpoint:
        raise ValueError(f"otlp_traces_endpoint is set, but {problem}; {remedy}") from cause
    _LOGGER.warning("%s; nothing is exported; %s", problem, remedy)
    return None
