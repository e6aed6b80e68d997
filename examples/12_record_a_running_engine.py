"""Recording and profiling an engine that is running already, for as long as one wants to look."""

import tempfile
import time

from engine import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
with tempfile.TemporaryDirectory() as folder, LLM(log_level="error") as llm:
    llm.generate(["Nobody looks yet."], params, use_tqdm=False)
    run_dir = llm.start_trace(folder)
    llm.start_profile(max_steps=5)
    llm.generate(["Now somebody does."], params, use_tqdm=False)
    llm.stop_trace()
    while llm.profile_status()[0].state in ("running", "exporting"):
        time.sleep(0.1)
    print("recorded in", run_dir)
    for status in llm.profile_status():
        print(f"profile of rank {status.rank}: {status.state}, {status.num_steps} steps")
