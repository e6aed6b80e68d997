"""The scrape endpoint of an engine in the caller's process.

Knows the settings that ask for it. Imports the Prometheus client only when there is one to serve.
"""

from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.frontend.observer import EngineObserver
from engine.log import get_logger
from instrumentation import ObservabilityConfig, SinkName

if TYPE_CHECKING:
    from instrumentation.metrics.prometheus import MetricsServer

logger = get_logger(__name__)


def serve_metrics(
    wanted: ObservabilityConfig, observer: EngineObserver | None
) -> "MetricsServer | None":
    """Listen at `metrics_port`; None where none is asked for.

    Raises:
        ConfigError: the port is taken or not allowed, or there are no metrics to serve.
    """
    if wanted.metrics_port is None:
        return None
    if observer is None:
        raise ConfigError("metrics_port needs metrics: leave disable_log_stats out.")
    from instrumentation.metrics.prometheus import MetricsServer, SnapshotCollector
    from instrumentation.metrics.vllm_names import to_vllm

    metrics = observer.metrics
    collector = SnapshotCollector(
        [metrics.snapshot],
        translations=[to_vllm] if wanted.metrics_compat == "vllm" else [],
    )
    metrics.engine.watch(SinkName.PROMETHEUS, collector)
    try:
        server = MetricsServer(collector, host=wanted.metrics_host, port=wanted.metrics_port)
    except (OSError, ValueError) as error:  # a name that is none
        raise ConfigError(
            f"cannot listen at metrics_host {wanted.metrics_host!r}, metrics_port "
            f"{wanted.metrics_port} ({error}). Use another port, or 0 for any free one."
        ) from error
    logger.info("metrics at %s", server.url)
    return server
