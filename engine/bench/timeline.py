"""A run along time: tokens that arrived and requests in flight, in equal bins.

Knows how to spread counts over bins. Does not know how they are drawn.
"""

from engine.bench.records import LoadRun


def tokens_per_bin(run: LoadRun, *, num_bins: int) -> tuple[float, list[float]]:
    """Output tokens per second of each bin between the run's start and end, and a bin's seconds."""
    width_ns = max(run.end_ns - run.start_ns, 1) / num_bins
    bins = [0.0] * num_bins
    for record in run.records:
        if record.chunk_ns:
            tokens = record.output_tokens() / len(record.chunk_ns)
            for at_ns in record.chunk_ns:
                bins[min(int((at_ns - run.start_ns) / width_ns), num_bins - 1)] += tokens
    return width_ns / 1e9, [count / (width_ns / 1e9) for count in bins]


def in_flight_per_bin(run: LoadRun, *, num_bins: int) -> list[float]:
    """Mean number of requests in flight in each bin."""
    width_ns = max(run.end_ns - run.start_ns, 1) / num_bins
    busy_ns = [0.0] * num_bins
    for record in run.records:
        begin, end = record.sent_ns - run.start_ns, record.end_ns - run.start_ns
        for number in range(int(begin / width_ns), min(int(end / width_ns), num_bins - 1) + 1):
            low, high = number * width_ns, (number + 1) * width_ns
            busy_ns[number] += max(0.0, min(end, high) - max(begin, low))
    return [busy / width_ns for busy in busy_ns]
