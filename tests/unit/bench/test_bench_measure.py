"""Figures of a run, against numbers worked out by hand and against numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bench.measure import (
    Objective,
    distribution,
    measure,
    peak_concurrency,
    percentile,
    steady_window_ns,
    tokens_within,
)
from engine.bench.records import NEVER_SENT, Outcome
from engine.bench.timeline import in_flight_per_bin, tokens_per_bin
from tests.support.bench_runs import at_ns, load_run, record


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    percent=st.floats(0, 100),
)
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    ordered = sorted(values)
    expected = float(np.percentile(values, percent))
    assert percentile(ordered, percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_a_distribution_names_its_percentiles() -> None:
    assert distribution([3.0, 1.0, 2.0], (50, 99.9)) == {
        "mean": 2.0,
        "std": round(float(np.std([1.0, 2.0, 3.0])), 3),
        "median": 2.0,
        "p50": 2.0,
        "p99.9": 2.998,
        "max": 3.0,
    }
    assert distribution([], (50,)) == {}
    assert {"p0", "p100", "p99.99999"} < distribution([1.0, 2.0], (0.0, 99.99999, 100)).keys()


def test_latencies_are_those_of_the_definitions() -> None:
    run = load_run(
        record(0, due=0, sent=10, chunks=(110, 130, 190), end=200, completion_tokens=9), end=200
    )
    document = measure(run)
    assert document["mean_ttft_ms"] == 100
    assert document["mean_ttft_from_intended_ms"] == 110
    assert document["mean_itl_ms"] == 40  # two gaps, 20 and 60
    assert document["max_itl_ms"] == 60
    assert document["mean_tpot_ms"] == 10  # 80 ms over nine tokens
    assert document["mean_e2el_ms"] == 190
    assert document["mean_e2el_from_intended_ms"] == 200
    assert document["tokens_per_chunk"] == 3
    assert document["client"]["sent_late_ms"]["max"] == 10


def test_a_single_token_has_no_time_per_token() -> None:
    document = measure(load_run(record(0, due=0, chunks=(5,), end=6), end=6))
    assert document["p50_ttft_ms"] == 5
    assert "p50_tpot_ms" not in document
    assert "p50_itl_ms" not in document


def test_an_answer_in_one_chunk_has_no_time_per_token() -> None:
    whole = record(0, due=0, chunks=(500,), end=501, completion_tokens=50)
    assert "mean_tpot_ms" not in measure(load_run(whole, end=501))
    both = load_run(whole, record(1, due=0, chunks=(10, 30), end=31), end=501)
    assert measure(both)["mean_tpot_ms"] == 20


def test_answers_without_output_are_told() -> None:
    run = load_run(record(0, due=0, end=5), record(1, due=0, chunks=(2,), end=5), end=5)
    assert measure(run)["completed_without_output"] == 1


def test_tokens_are_counted_by_events_where_usage_is_missing_and_it_is_said() -> None:
    without = record(0, due=0, chunks=(1, 2), end=3, completion_tokens=None, num_events=4)
    document = measure(load_run(without, end=1000))
    assert document["total_output_tokens"] == 4
    assert document["tokens_counted_by"] == "events"
    assert measure(load_run(record(0, due=0, chunks=(1,), end=3), end=9))["tokens_counted_by"] == (
        "usage"
    )
    both = measure(load_run(without, record(1, due=0, chunks=(1,), end=3), end=9))
    assert both["tokens_counted_by"].startswith("usage, and events")


def test_each_request_is_one_outcome_and_failures_are_in_no_latency() -> None:
    run = load_run(
        record(0, due=0, chunks=(10, 20), end=20),
        record(1, due=0, end=1, outcome=Outcome.HTTP_ERROR, status=429),
        record(2, due=0, end=1, outcome=Outcome.HTTP_ERROR, status=429),
        record(3, due=0, end=1, outcome=Outcome.REFUSED, status=None),
        record(
            4,
            due=0,
            chunks=(500,),
            end=600,
            outcome=Outcome.DISCONNECTED,
            completion_tokens=None,
        ),
        end=1000,
    )
    document = measure(run)
    assert document["outcomes"] == {"ok": 1, "http_429": 2, "refused": 1, "disconnected": 1}
    assert (document["completed"], document["failed"], document["num_prompts"]) == (1, 4, 5)
    assert document["max_ttft_ms"] == 10
    assert document["request_throughput"] == 1
    # What the broken stream brought has been made and sent.
    assert document["total_output_tokens"] == 3
    assert document["output_throughput"] == 3


def test_goodput_is_judged_from_the_intended_time() -> None:
    run = load_run(
        record(0, due=0, chunks=(50, 60), end=70),
        record(1, due=0, sent=100, chunks=(140, 150), end=160),  # quick, but sent late
        record(2, due=0, chunks=(50, 90), end=100),  # slow per token
        record(3, due=0, chunks=(50,), end=60),  # one token: no time per token to miss
        record(4, due=0, end=1, outcome=Outcome.TIMED_OUT),
        end=2000,
    )
    document = measure(run, objective=Objective(ttft_ms=50, tpot_ms=20))
    assert document["request_goodput"] == 1
    assert document["goodput_ratio"] == 0.4
    assert document["goodput_limits"] == {"ttft_ms": 50, "tpot_ms": 20, "e2el_ms": None}
    assert measure(run, objective=Objective(e2el_ms=65))["goodput_ratio"] == 0.2
    assert measure(run, objective=Objective())["goodput_ratio"] == 0.8
    assert "request_goodput" not in measure(run)


def test_the_peak_counts_requests_at_one_moment() -> None:
    records = [
        record(0, due=0, end=10),
        record(1, due=5, end=15),
        record(2, due=10, end=20),  # begins when the first ends
        record(3, due=30, end=30, outcome=Outcome.CANCELLED, detail=NEVER_SENT),
    ]
    assert peak_concurrency(records) == 2
    assert peak_concurrency(records[3:]) == 0
    assert peak_concurrency([]) == 0


def test_the_steady_state_lies_between_first_end_and_last_sending() -> None:
    run = load_run(
        record(0, due=0, chunks=(100, 1000), end=1000),
        record(1, due=0, chunks=(1500, 2500), end=2500, completion_tokens=20),
        record(2, due=3000, chunks=(3500,), end=4000),
        record(3, due=1, end=2, outcome=Outcome.REFUSED, status=None),
        end=4000,
    )
    assert steady_window_ns(run.records) == (at_ns(1000), at_ns(3000))
    # The second chunk of the first request, and both of the second.
    assert tokens_within(run.records, at_ns(1000), at_ns(3000)) == 21
    assert measure(run)["steady_state"] == {
        "duration": 2.0,
        "output_throughput": 10.5,
        "request_throughput": 0.5,  # the second; the first one's end is the border
    }


def test_the_steady_state_of_an_even_load_is_its_rate() -> None:
    """One place of a closed loop, a request of ten tokens a second: border ends count once."""
    run = load_run(
        *(
            record(
                i,
                due=i * 1000 + 1,  # a moment after the end before it, as always
                chunks=tuple(i * 1000 + at for at in range(50, 1000, 100)),
                end=i * 1000 + 1000,
            )
            for i in range(5)
        ),
        end=5000,
    )
    assert measure(run)["steady_state"] == {
        "duration": 3.001,
        "output_throughput": 10.0,
        "request_throughput": 1.0,
    }


def test_a_burst_has_no_steady_state() -> None:
    run = load_run(*(record(i, due=0, chunks=(5,), end=9) for i in range(3)), end=9)
    assert measure(run)["steady_state"] is None


def test_a_run_without_requests_has_a_document() -> None:
    document = measure(load_run(end=0), objective=Objective(ttft_ms=1))
    assert document["num_prompts"] == 0
    assert document["goodput_ratio"] is None
    assert document["client"]["cpu_us_per_output_token"] is None


def test_the_clients_own_cost_is_given_per_token() -> None:
    run = load_run(record(0, due=0, chunks=(1, 2), end=4), end=2000, client_cpu_s=0.5)
    client = measure(run)["client"]
    assert client["cpu_us_per_output_token"] == 250_000
    assert client["cpu_share_of_a_core"] == 0.25


def test_bins_hold_every_token_and_every_busy_moment() -> None:
    generator = np.random.default_rng(4)
    records = []
    for index in range(40):
        begin = float(generator.uniform(0, 900))
        chunks = tuple(sorted(generator.uniform(begin, 1000, size=7)))
        records.append(
            record(index, due=begin, chunks=chunks, end=chunks[-1], completion_tokens=14)
        )
    run = load_run(*records, end=1000)
    width_s, rates = tokens_per_bin(run, num_bins=13)
    assert width_s * 13 == pytest.approx(1.0)
    assert sum(rates) * width_s == pytest.approx(40 * 14)
    busy_s = sum((one.end_ns - one.sent_ns) / 1e9 for one in records)
    assert sum(in_flight_per_bin(run, num_bins=13)) * width_s == pytest.approx(busy_s)
