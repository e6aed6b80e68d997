"""From records to metrics: accumulators, the catalogue, Prometheus."""
