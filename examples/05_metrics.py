"""Read the engine's metrics and check two of their identities."""

from engine import LLM, SamplingParams

with LLM(log_level="warning") as llm:
    outputs = llm.generate(
        ["Metrics are", "A histogram is"], SamplingParams(temperature=0, max_tokens=10)
    )
    metrics = llm.get_metrics()

totals: dict[str, float] = {}
for metric in metrics:
    if hasattr(metric, "value"):
        totals[metric.name] = totals.get(metric.name, 0) + metric.value

delivered = sum(len(output.outputs[0].token_ids) for output in outputs)
print("generation tokens:", totals["isinglass_generation_tokens_total"], "delivered:", delivered)
assert totals["isinglass_generation_tokens_total"] == delivered

for output in outputs:
    life = output.metrics
    parts = life.queue_ns + life.prefill_ns + life.decode_ns + life.preempted_ns
    assert parts == life.e2e_ns
    print(
        f"queue {life.queue_ns / 1e6:.1f} ms, prefill {life.prefill_ns / 1e6:.1f} ms, "
        f"decode {life.decode_ns / 1e6:.1f} ms, end to end {life.e2e_ns / 1e6:.1f} ms"
    )
