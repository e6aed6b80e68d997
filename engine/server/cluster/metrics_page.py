"""What a scrape reads: this process's metrics, or those of all frontends as one.

Knows where snapshots come from and in which thread they are rendered. The formats are those of
`instrumentation.metrics.prometheus`. Answers as long as the process lives: before the engine has
started with what is known, after its death with its totals, and 0 for what it held.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fastapi.responses import Response

from engine.api.async_llm import AsyncLLM
from engine.server.cluster.metrics_share import MetricsShare
from engine.server.http.errors import ApiError
from engine.server.http.observe import Observation
from instrumentation import Gauge, Metric
from instrumentation.metrics.engine import ENGINE_UP
from instrumentation.metrics.merge import merge_snapshots

if TYPE_CHECKING:
    from instrumentation.metrics.prometheus import SnapshotCollector


class MetricsPage:
    """The scrape endpoint of one server process.

    Attributes:
        snapshot: what a scrape reads. By default what this process knows; where several frontends
            serve, what `share` makes of all of theirs.
        share: this frontend's part of the metrics of several.
    """

    def __init__(self, engine: AsyncLLM, observation: Observation) -> None:
        self.snapshot: Callable[[], Sequence[Metric]] = self.own_snapshot
        self.share: MetricsShare | None = None
        if engine.attachment is not None:
            self.share = MetricsShare(
                engine.attachment.directory, engine.attachment.client_index, self.own_snapshot
            )
            self.snapshot = self.shared_snapshot
        self._engine = engine
        self._observation = observation
        self._collector: SnapshotCollector | None = None
        # Of its own: calls to a core that hangs must not be able to take up all threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")

    @property
    def num_errors(self) -> int:
        """Parts of scrapes that have failed, also before there was an engine to count them."""
        return 0 if self._collector is None else self._collector.num_errors

    @property
    def num_drops(self) -> int:
        """Nothing is ever lost."""
        return 0

    def close(self) -> None:
        """Let go of the thread: nobody asks any more."""
        self._thread.shutdown(wait=False)

    def own_snapshot(self) -> list[Metric]:
        """All metrics of this process, the server's included; those alone before the start."""
        observer = self._engine.observer
        if observer is not None:
            return observer.metrics.snapshot()
        metrics = self._observation.metrics.snapshot()
        return metrics if self.share is not None else [self._down(), *metrics]

    def shared_snapshot(self) -> list[Metric]:
        """All frontends' metrics; the engine is down where none of them says that it is up."""
        assert self.share is not None
        return merge_snapshots([self.share.snapshot(), [self._down()]])

    def _down(self) -> Gauge:
        return Gauge(ENGINE_UP.name, self._observation.metrics.labels, 0)

    async def render(self, accept: str, accept_encoding: str) -> Response:
        """One scrape, off the event loop: it takes milliseconds.

        Raises:
            ApiError: 404, no statistics are kept.
        """
        if self._engine.config.observability.disable_log_stats:
            raise ApiError(
                404, "no metrics are kept: the server was started with --disable-log-stats"
            )
        from instrumentation.metrics.prometheus import exposition

        if self._collector is None:
            self._collector = self._make_collector()
        collector = self._collector
        body, headers = await asyncio.get_running_loop().run_in_executor(
            self._thread,
            lambda: exposition(collector, accept=accept, accept_encoding=accept_encoding),
        )
        return Response(body, headers=dict(headers) | {"Vary": "Accept, Accept-Encoding"})

    def _make_collector(self) -> "SnapshotCollector":
        from instrumentation.metrics.prometheus import SnapshotCollector
        from instrumentation.metrics.vllm_names import to_vllm

        wants_vllm = self._engine.config.observability.metrics_compat == "vllm"
        return SnapshotCollector(
            [lambda: self.snapshot()], translations=[to_vllm] if wants_vllm else []
        )
