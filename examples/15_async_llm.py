"""Many requests on one event loop: streams, leaving one early, and a request's time line."""

import asyncio
import contextlib

from engine import AsyncLLM, RequestOutputKind, SamplingParams

STREAM = SamplingParams(temperature=0.8, seed=3, max_tokens=40, output_kind=RequestOutputKind.DELTA)


async def tell(llm: AsyncLLM, number: int, prompt: str) -> str:
    """The whole text of one request, put together from its deltas."""
    text = ""
    async for output in llm.generate(prompt, STREAM, f"story-{number}"):
        text += output.outputs[0].text
    return f"{number}: {prompt}{text!r}"


async def peek(llm: AsyncLLM, prompt: str) -> str:
    """Only its beginning: leaving the stream aborts the request."""
    async with contextlib.aclosing(llm.generate(prompt, STREAM)) as outputs:
        async for output in outputs:
            return f"left after {output.outputs[0].text!r}"
    raise AssertionError("a request has at least one output")


async def main() -> None:
    async with AsyncLLM(log_level="warning") as llm:
        prompts = ["Once upon a time", "The sea was", "In the year 2300"]
        stories = [tell(llm, number, prompt) for number, prompt in enumerate(prompts)]
        for line in await asyncio.gather(*stories, peek(llm, "A long, long list:")):
            print(line)
        print(llm.request_timeline("story-0"))


asyncio.run(main())
