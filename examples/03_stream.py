"""Stream by stepping the engine yourself, and abort a request half-way."""

from engine import LLM, RequestOutputKind, SamplingParams

params = SamplingParams(
    temperature=0.8, seed=1, max_tokens=40, stop=["\n\n"], output_kind=RequestOutputKind.DELTA
)

with LLM(log_level="warning") as llm:
    engine = llm.llm_engine
    engine.add_request("story", "Once upon a time", params)
    engine.add_request("unwanted", "This one will be aborted", params)
    num_outputs = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "story":
                print(output.outputs[0].text, end="", flush=True)
            elif output.finished:
                print(f"\n[{output.request_id}: {output.outputs[0].finish_reason}]")
            num_outputs += 1
            if num_outputs == 6:
                engine.abort_request(["unwanted"])
    print()
