"""An `LLMEngine` with what is opened around it: instrument, run folder, metrics and endpoint.

Knows in which order things open and close. Knows no request and no event loop.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.api.metrics_endpoint import serve_metrics
from engine.api.run_dir import make_run_dir
from engine.config import EngineConfig
from engine.frontend.llm_engine import LLMEngine
from engine.frontend.observer import make_observer, tracer_opener
from engine.log import get_logger
from engine.transport import factory
from engine.transport.client import EngineCoreClient
from engine.types.attachment import CoreAttachment
from instrumentation import Metric, Role, SinkName
from instrumentation.audit import audit, without_effect
from instrumentation.metrics.engine import Exporter
from instrumentation.setup import setup

if TYPE_CHECKING:
    from instrumentation.metrics.prometheus import MetricsServer

logger = get_logger(__name__)


class EngineHost:
    """Opens an engine in two steps, and closes it. Make it in the thread that the engine serves.

    Args:
        config: the settings.
        attachment: where another process's core is; None: the engine has a core of its own.
        labelled_name: the model's name in metrics; its own if None.
        metric_sources: what snapshots hold besides the engine's own metrics; the caller may add to
            it. A server's, where it is not None.
        metric_exporters: whose errors and drops the metrics count besides.

    Raises:
        ConfigError: `trace_dir` cannot be used.

    Attributes:
        llm_engine: the engine, from `start` on.
        run_dir: folder with this run's journals, None without `trace_dir`.
        observer: sees every message of the core; None with disable_log_stats=True.
        metrics_server: listens at `metrics_port`, where one is set, from `start` to `shutdown`.
    """

    llm_engine: LLMEngine

    def __init__(
        self,
        config: EngineConfig,
        *,
        attachment: CoreAttachment | None = None,
        labelled_name: str | None = None,
        metric_sources: list[Callable[[], list[Metric]]] | None = None,
        metric_exporters: Sequence[tuple[SinkName, Exporter]] = (),
    ) -> None:
        wanted = config.observability
        self._config = config
        self._attachment = attachment
        self._has_server = bool(metric_sources)
        self._owner_pid = os.getpid()
        self._lock = threading.RLock()
        self.metrics_server: MetricsServer | None = None
        if attachment is not None:
            self.run_dir = attachment.run_dir
        else:
            self.run_dir = None if wanted.trace_dir is None else make_run_dir(wanted.trace_dir)
        self._obs = setup(
            wanted,
            role=Role.CALLER,
            rank=0 if attachment is None else attachment.client_index,
            title=_title(attachment, has_server=self._has_server),
            run_dir=self.run_dir,
        )
        try:
            self.observer = make_observer(
                wanted,
                self._obs,
                model_name=labelled_name or config.model.model,
                counts_steps=attachment is None or attachment.counts_steps,
            )
        except BaseException:
            self._obs.close()
            raise
        if self.observer is not None:
            if metric_sources is not None:
                self.observer.metrics.sources = metric_sources
            for sink, exporter in metric_exporters:
                self.observer.metrics.engine.watch(sink, exporter)

    def start(
        self, make_client: Callable[..., EngineCoreClient] = factory.make_client
    ) -> LLMEngine:
        """Bring the engine up, in any thread; what has been opened is closed if that fails.

        Raises:
            ModelError, ConfigError, EngineStartError: why it does not come up.
        """
        wanted, attachment = self._config.observability, self._attachment
        try:
            with self._lock:  # a shutdown meanwhile has to wait, and finds an engine
                self.metrics_server = serve_metrics(wanted, self.observer)
                self.llm_engine = LLMEngine(
                    self._config,
                    obs=self._obs,
                    run_dir=self.run_dir,
                    observer=self.observer,
                    open_tracer=tracer_opener(wanted, self.observer),
                    make_client=make_client,
                    first_request_num=0 if attachment is None else attachment.first_request_num,
                )
        except BaseException:
            self._close_metrics()
            self._obs.close()
            raise
        for line in without_effect(audit(wanted, has_server=self._has_server)):
            logger.warning("%s is without effect: %s", line.option, line.detail)
        return self.llm_engine

    @property
    def is_foreign(self) -> bool:
        """Whether we are in a fork of the process that the engine belongs to."""
        return os.getpid() != self._owner_pid

    def shutdown(self) -> None:
        """Close all; waits for a start under way. Harmless when called twice, or in a fork."""
        if self.is_foreign:  # all is the parent's, and another thread of it may have the lock
            return
        with self._lock:
            try:
                if hasattr(self, "llm_engine"):  # else it has failed, and is closed
                    self.llm_engine.shutdown()
            finally:
                self._close_metrics()

    def _close_metrics(self) -> None:
        server, self.metrics_server = self.metrics_server, None
        if server is not None:
            server.close()


def _title(attachment: CoreAttachment | None, *, has_server: bool) -> str:
    """What this process is called in pictures; empty: the caller."""
    if attachment is None:
        return "ApiServer" if has_server else ""
    return attachment.title + (f" (life {attachment.life + 1})" if attachment.life else "")
