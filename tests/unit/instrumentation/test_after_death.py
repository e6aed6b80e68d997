"""What the metrics say once the core is no more: the catalogue says it, and it is so."""

import pytest

from instrumentation import Metric, Metrics, StepRecord
from instrumentation.metrics.info import METRICS, AfterDeath, MetricKind
from instrumentation.metrics.requests import ArrivedRequest
from instrumentation.metrics.types import Counter, Gauge
from instrumentation.metrics.vllm_names import to_vllm
from instrumentation.names import AdmissionStop
from instrumentation.record.step_records import GrammarTotals
from instrumentation.testing import FakeClock
from tests.support.scrapes import LABELS, start


def test_each_gauge_says_what_becomes_of_it_after_the_cores_death() -> None:
    for info in METRICS.values():
        says_so = "death" in info.help or "died" in info.help
        if info.after_death is AfterDeath.RESET and info.kind is MetricKind.GAUGE:
            assert says_so, info.name
        if info.kind is not MetricKind.GAUGE:
            assert info.after_death is AfterDeath.KEPT


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "late"])
def test_totals_and_facts_outlive_the_core_and_levels_do_not(is_late: bool) -> None:
    clock = FakeClock()
    metrics = Metrics(LABELS, clock=clock)

    def live() -> None:
        start(metrics)
        metrics.observe_step(
            StepRecord(
                step=1,
                begin_ns=1,
                end_ns=2,
                num_generation_requests=2,
                num_generation_tokens=2,
                num_running=2,
                num_waiting=5,
                num_waiting_tokens=50,
                num_waiting_deferred_tokens=10,
                num_waiting_preempted=1,
                waiting_by_reason=(4, 0, 1),
                admission_stop=AdmissionStop.KV_BLOCKS,
                admission_stop_num_tokens=12,
                oldest_waiting_since_ns=1,
                oldest_running_since_ns=1,
                num_unfilled_slots=3,
                num_blocks_used=60,
                num_blocks_cached_free=30,
                num_blocks_free=10,
                grammars=GrammarTotals(3, 4, 500, (4, 0, 0, 0, 0, 0), 4, 4096),
            )
        )

    metrics.requests.observe_arrival(ArrivedRequest(1, 16))
    clock.now_ns = 10**9
    if is_late:  # word of what it did comes after word of its death
        metrics.engine_died()
        live()
        before: list[Metric] = []
    else:
        live()
        before = metrics.snapshot()
        metrics.engine_died()
    after = metrics.snapshot()
    for metric in after:
        info, state = METRICS[metric.name], metric.labels.get("state")
        if isinstance(metric, Gauge) and info.after_death is AfterDeath.RESET:
            assert metric.value == (100 if state == "free" else 0), metric
        elif isinstance(metric, Gauge) and info.after_death is AfterDeath.KEPT:
            assert metric.value > 0, metric
    value_of = {
        metric.name: metric.value for metric in after if isinstance(metric, Gauge | Counter)
    }
    assert value_of["isinglass_requests_in_flight"] == 1, "until its end is known"
    assert value_of["isinglass_last_step_age_seconds"] > 0.9
    if not is_late:
        gauges = [m for m in before if isinstance(m, Gauge)]
        assert all(
            m.value > 0 for m in gauges if METRICS[m.name].after_death is not AfterDeath.RESET
        )
        levels = {
            m.name for m in gauges if m.value and METRICS[m.name].after_death is AfterDeath.RESET
        }
        assert levels == {
            info.name
            for info in METRICS.values()
            if info.kind is MetricKind.GAUGE and info.after_death is AfterDeath.RESET
        }
        assert [m for m in after if not isinstance(m, Gauge)] == [
            m for m in before if not isinstance(m, Gauge)
        ]
    vllm = {sample.name: sample.value for one in to_vllm(after) for sample in one.samples}
    assert vllm["vllm:num_requests_running"] == vllm["vllm:kv_cache_usage_perc"] == 0
