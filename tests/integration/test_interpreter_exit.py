"""The end of the interpreter: scripts that close their engine or do not say nothing about it.

Modules are taken apart in an order that depends on what was imported first: torch holds some of the
standard library's for longer, so that objects of a script's top level outlive them.
"""

import textwrap
from pathlib import Path

import pytest

from tests.support.scripts import script

IMPORTS = {
    "engine-only": "",
    "torch-first": "import torch",
    "torch-last": "import engine.api.llm, torch",
    "numpy-first": "import numpy",
    "transformers-first": "import transformers",
    "asyncio-torch": "import asyncio, concurrent.futures, queue, torch",
}

BODIES = {
    "left-open": "llm = start(**KIND)\ngenerate(llm)",
    "made-only": "llm = start(**KIND)",
    "with": "with start(**KIND) as llm:\n    generate(llm)",
    "shutdown": "llm = start(**KIND)\ngenerate(llm)\nllm.shutdown()",
    "twice": "llm = start(**KIND)\nllm.shutdown()\nllm.shutdown()",
    "with-and-shutdown": "with start(**KIND) as llm:\n    llm.shutdown()\nllm.shutdown()",
    "deleted": "llm = start(**KIND)\ngenerate(llm)\ndel llm",
    "rebound": "llm = start(**KIND)\nllm = None",
    "in-a-function": "def main():\n    llm = start(**KIND)\n    generate(llm)\nmain()",
    "kept-by-a-function": "def main(kept=[]):\n    kept.append(start(**KIND))\nmain()",
    "in-a-cycle": "llm = start(**KIND)\nllm.itself = llm\ndel llm",
    "exits-in-with": "with start(**KIND) as llm:\n    raise SystemExit(7)",
    "exits": "import sys\nllm = start(**KIND)\nsys.exit(7)",
    "raises": "llm = start(**KIND)\ngenerate(llm)\nraise RuntimeError('mine')",
    "two": "first, second = start(**KIND), start(**KIND)\nfirst.shutdown()",
    "wrong": "try: start(**KIND, max_num_seqs=0)\nexcept Exception: pass\nllm = start(**KIND)",
    "own-atexit": "import atexit\nllm = start(**KIND)\natexit.register(llm.shutdown)",
}
"""What is done with an `LLM`; `KIND` says where its core runs."""

ASYNC = """
import asyncio
from engine import AsyncLLM

def make():
    return AsyncLLM(
        MODEL, skip_tokenizer_init=True, log_level="warning",
        kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256,
    )

def stream(llm, num_tokens=5, name="a"):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return llm.generate({"prompt_token_ids": [5, 6, 7]}, params, name)

async def use(llm, num_tokens=5):
    await llm.start()
    say("core", llm.llm_engine.engine_core.core_pid)
    async for output in stream(llm, num_tokens):
        if num_tokens > 5:
            break

"""
ASYNC_BODIES = {
    "left-open": "llm = make()\nasyncio.run(use(llm))",
    "with": """
        llm = make()
        async def main():
            async with llm:
                await use(llm)
        asyncio.run(main())
        """,
    "shutdown-twice": """
        llm = make()
        async def main():
            await use(llm)
            await llm.shutdown()
            await llm.shutdown()
        asyncio.run(main())
        """,
    "never-started": "llm = make()\nsay('core', os.getpid())",
    "left-half-way": "llm = make()\nasyncio.run(use(llm, 200))",
    "streams-kept": """
        llm = make()
        kept = []
        async def main():
            await use(llm)
            kept.append(stream(llm, 200, "b"))
            await anext(kept[0])
            kept.append(await llm.submit({"prompt_token_ids": [5]}, SamplingParams(), "c"))
        asyncio.run(main())
        """,
    "loop-left-open": """
        llm, loop, kept = make(), asyncio.new_event_loop(), []
        async def main():
            await use(llm)
            kept.append(await llm.submit({"prompt_token_ids": [5]}, SamplingParams(), "c"))
        loop.run_until_complete(main())
        """,
    "loop-of-a-thread": """
        import threading
        llm, loop = make(), asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(use(llm), loop).result()
        """,
    "exits": """
        import sys
        llm = make()
        async def main():
            async with llm:
                await use(llm)
                sys.exit(7)
        asyncio.run(main())
        """,
    "raises": """
        llm = make()
        async def main():
            await use(llm, 200)
            raise RuntimeError('mine')
        asyncio.run(main())
        """,
}

FORKS = """
import os, sys
llm = start(**KIND)
expected = generate(llm)
for how in ("falls off", "exits", "shuts down"):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        if how == "exits":
            sys.exit(0)
        if how == "shuts down":
            llm.shutdown()
        break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, how
else:
    assert generate(llm) == expected
"""
"""Forks that end as any script does; the parent's engine goes on."""

INPROC = "KIND = {'enable_multiprocessing': False}\n"
SPAWNED = "KIND = {}\n"


def outcome(name: str) -> tuple[int, str]:
    """Exit code, and the last line on standard error."""
    if name.startswith("exits"):
        return 7, ""
    return (1, "RuntimeError: mine") if name == "raises" else (0, "")


def run(body: str, *, model: Path, imports: str, name: str) -> None:
    with script(body, model=model, before=f"{imports}\nimport os\nMODEL = {str(model)!r}\n") as one:
        code, _, err = one.finish()
        expected, last = outcome(name)
        lines = err.splitlines()
        if last:
            assert lines[-1:] == [last], err
            assert lines[0] == "Traceback (most recent call last):", err
            assert err.count("Traceback") == 1, err
        else:
            assert err == ""
        assert code == expected
        one.assert_nothing_left()


@pytest.mark.parametrize(
    ("imports", "kind", "name"),
    [
        ("torch-first", SPAWNED, "left-open"),
        ("torch-last", SPAWNED, "with"),
        ("torch-first", INPROC, "left-open"),
        ("torch-last", INPROC, "twice"),
    ],
)
def test_nothing_is_said_at_the_end(imports: str, kind: str, name: str, tiny_llama: Path) -> None:
    run(kind + BODIES[name], model=tiny_llama, imports=IMPORTS[imports], name=name)


def test_nothing_is_said_at_the_end_of_an_async_engine(tiny_llama: Path) -> None:
    body = ASYNC + textwrap.dedent(ASYNC_BODIES["streams-kept"])
    run(body, model=tiny_llama, imports=IMPORTS["torch-first"], name="streams-kept")


def pairs(bodies: dict[str, str], *usual: str) -> list[tuple[str, str]]:
    """Every body with torch first, and some with every order of imports."""
    found = [("torch-first", name) for name in bodies]
    return found + [(imports, name) for imports in IMPORTS for name in usual]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SPAWNED, INPROC], ids=["spawned", "in-process"])
@pytest.mark.parametrize(
    ("imports", "name"), dict.fromkeys(pairs(BODIES, "left-open", "with", "twice", "exits"))
)
def test_ends_of_an_llm(imports: str, kind: str, name: str, tiny_llama: Path) -> None:
    run(kind + BODIES[name], model=tiny_llama, imports=IMPORTS[imports], name=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "name"),
    dict.fromkeys(pairs(ASYNC_BODIES, "with", "streams-kept", "loop-left-open")),
)
def test_ends_of_an_async_llm(imports: str, name: str, tiny_llama: Path) -> None:
    body = ASYNC + textwrap.dedent(ASYNC_BODIES[name])
    run(body, model=tiny_llama, imports=IMPORTS[imports], name=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SPAWNED, INPROC], ids=["spawned", "in-process"])
@pytest.mark.parametrize("imports", ["engine-only", "torch-first"])
def test_ends_of_forks(imports: str, kind: str, tiny_llama: Path) -> None:
    run(kind + FORKS, model=tiny_llama, imports=IMPORTS[imports], name="forks")
