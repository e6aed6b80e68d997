"""The engine's metrics, counted from its records in the frontend.

Knows the groups of metrics and who feeds which. Does not know how numbers are kept nor who reads
the snapshot. Whoever counts several things that belong together holds `Metrics.lock`.
"""

import threading
import time
from collections.abc import Callable, Mapping

from instrumentation.metrics.accumulators import Families
from instrumentation.metrics.cache import CacheMetrics
from instrumentation.metrics.engine import EngineMetrics
from instrumentation.metrics.requests import RequestMetrics
from instrumentation.metrics.steps import StepMetrics
from instrumentation.metrics.structured_outputs import StructuredOutputMetrics
from instrumentation.metrics.types import Metric
from instrumentation.record.instrument import NULL, Instrument
from instrumentation.record.step_records import StepRecord


class Metrics:
    """All metrics of one engine, in four groups.

    Args:
        labels: further labels of every series (`model_name`, `engine`).
        instrument: the frontend's: the snapshot takes the times of the frontend's phases and the
            drops of its process from it.
        buckets: other bounds for histograms, by full name; see `parse_buckets`.
    """

    def __init__(
        self,
        labels: Mapping[str, str] | None = None,
        *,
        instrument: Instrument = NULL,
        buckets: Mapping[str, tuple[float, ...]] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.labels = dict(labels or {})
        self.lock = threading.RLock()
        """Held for as long as a message is counted or a snapshot taken, so that sums hold."""
        self.sources: list[Callable[[], list[Metric]]] = []
        """What else a snapshot holds, such as a server's own counts."""
        self._instrument = instrument
        self._clock = clock
        self._families = Families(buckets)
        self.steps = StepMetrics(self._families)
        self.cache = CacheMetrics(self._families)
        self.structured_outputs = StructuredOutputMetrics(self._families)
        self.requests = RequestMetrics(self._families)
        self.engine = EngineMetrics(self._families, instrument=instrument)

    def observe_step(self, record: StepRecord) -> None:
        """Count one step of the core: once each, as it comes with the outputs."""
        self.steps.observe_step(record)
        self.cache.observe_step(record)
        self.structured_outputs.observe_step(record)

    def engine_died(self) -> None:
        """Keep the totals, and let go of the levels of a core that is no more.

        What it said last may be counted later than this, so each snapshot lets go again.
        """
        self.engine.engine_is_down()

    def snapshot(self) -> list[Metric]:
        """Read every series, also those still at zero, in the catalogue's order."""
        with self.lock:
            series = self._snapshot()
        return [*series, *(one for source in self.sources for one in source())]

    def _snapshot(self) -> list[Metric]:
        if self.engine.is_down:
            self.steps.forget_queues()
            self.structured_outputs.forget_cache()
        last_step = self.steps.last_step
        self.steps.take_levels(self._clock(), self._instrument.phase_totals_ns())
        if last_step is not None:
            self.cache.take_levels(last_step)
        self.structured_outputs.take_levels()
        self.requests.take_levels()
        self.engine.take_levels(last_step)
        return self._families.snapshot(self.labels)
