"""Why a request took as long as it did: its steps, its share of them, and why it waited."""

from engine import LLM, SamplingParams

# A pool too small for everybody at once, so that requests wait and are thrown out.
with LLM(num_gpu_blocks_override=26, max_model_len=512, log_level="error", slo_ttft_s=0.2) as llm:
    prompts = [f"Count from {number} upwards:" for number in range(12)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    slowest = max(outputs, key=lambda output: output.metrics.e2e_ns)
    print(llm.request_timeline(slowest.request_id))
    for metric in llm.get_metrics():
        if metric.name in ("isinglass_slo_misses_total", "isinglass_preemptions_total"):
            print(metric.name, metric.labels.get("cause", ""), metric.value)
    print("the last steps are in", llm.dump_flight_record())
