"""The main job on the embedded model: a dozen varied prompts, every step recorded and shown."""

import time

from rich.console import Console

from engine import LLM, SamplingParams
from traces.perfetto import write_perfetto
from traces.summary import summarize
from traces.summary_text import render_summary

SHARED = (
    "You are the archivist of a small harbour town. You answer briefly and with a date. The town "
    "has a lighthouse from 1871, a fish market on Thursdays, a library with nine thousand books, "
    "a brass band, two bakeries that do not speak to each other, and a ferry that runs when the "
    "weather lets it. Every visitor asks the same things, and you never tire of them.\n\n"
)
LONG = " ".join(f"Entry {i}: the tide came in at {i % 12} and went out again." for i in range(60))

PROMPTS = [
    "The capital of France is",
    "Write a short poem about the sea.\n",
    "def fibonacci(n):\n",
    "Q: Why is the sky blue?\nA:",
    SHARED + "Visitor: When was the lighthouse built?\nArchivist:",
    SHARED + "Visitor: On which day is the market?\nArchivist:",
    SHARED + "Visitor: How many books has the library?\nArchivist:",
    SHARED + "Visitor: Does the ferry run every day?\nArchivist:",
    LONG + "\n\nSummary:",
    "Three uses of mica:\n1.",
    "Once upon a time, in a furnace,",
    "A name for a cat that lives in a lighthouse:",
]
FOUR_WAYS = {1, 11}  # prompts that are sampled four times


def main() -> None:
    began = time.perf_counter()
    console = Console()
    greedy = SamplingParams(temperature=0, max_tokens=48)
    varied = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, n=4, seed=7)
    params = [varied if i in FOUR_WAYS else greedy for i in range(len(PROMPTS))]
    with LLM(trace_dir="runs", log_level="warning") as llm:
        booted = time.perf_counter()
        outputs = llm.generate(PROMPTS, params)
        # A second visit: the shared prefix is in the cache now.
        outputs += llm.generate([PROMPTS[4]], greedy, use_tqdm=False)
        run_dir = llm.run_dir
    for output in outputs:
        head = output.prompt if len(output.prompt) < 60 else "…" + output.prompt[-58:]
        console.rule(f"[bold]{head!r}", align="left")
        for completion in output.outputs:
            console.print(completion.text.strip(), markup=False, highlight=False)
    console.rule("[bold]where the time went", align="left")
    console.print(render_summary(summarize(run_dir)))
    trace = write_perfetto(run_dir)
    console.print(
        f"booted in {booted - began:.1f} s, all of it {time.perf_counter() - began:.1f} s"
    )
    console.print(f"journals:  {run_dir}", soft_wrap=True)
    console.print(f"trace:     {trace}", soft_wrap=True)
    console.print("Open the trace: go to https://ui.perfetto.dev and drop the file on the page.")


if __name__ == "__main__":
    main()
