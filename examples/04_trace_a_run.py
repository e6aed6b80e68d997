"""Record a run, see where its time went, and write a Perfetto file."""

import tempfile

from rich.console import Console

from engine import LLM, SamplingParams
from traces.perfetto import write_perfetto
from traces.summary import summarize
from traces.summary_text import render_summary

with tempfile.TemporaryDirectory() as folder:
    with LLM(trace_dir=folder, log_level="warning") as llm:
        llm.generate(["A short trace"] * 3, SamplingParams(temperature=0, max_tokens=8))
    Console().print(render_summary(summarize(llm.run_dir)))
    trace = write_perfetto(llm.run_dir)
    print(f"{trace.name}: {trace.stat().st_size} bytes, for https://ui.perfetto.dev")
