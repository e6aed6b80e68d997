"""Draws docs/live.png: the live page of a real server under mixed load, in a headless Chromium.

    python scripts/live_picture.py [--out docs/live.png] [--seconds 70] [--rate 1.0]

Knows the load. The browser and the server are the tests' own.
"""

import argparse
import asyncio
import contextlib
import random
import sys
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.browser import browser  # noqa: E402
from tests.support.server_process import ServerProcess  # noqa: E402

_WORDS = ROOT.joinpath("README.md").read_text().split()
_FLAGS = ("--max-num-seqs=24", "--num-gpu-blocks-override=560", "--max-num-batched-tokens=512")


async def draw(server: ServerProcess, out: Path, *, seconds: float, rate: float) -> None:
    """Load the server for so long, then write the picture."""
    rng = random.Random(7)
    shared = " ".join(rng.choices(_WORDS, k=90))
    async with browser() as new_tab, aiohttp.ClientSession() as session:
        tab = await new_tab()
        await tab.resize(1440, 1000)
        # Drawn a few times a second, so that the processor is the engine's until the picture.
        preferences = {"prefers-color-scheme": "dark", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in preferences.items()]
        await tab.call("Emulation.setEmulatedMedia", features=features)
        await tab.open(f"{server.url}/")
        await tab.until("window.isinglass?.state.connection === 'live'")
        await tab.evaluate("document.querySelector('[data-span=\"60\"]').click()")
        deadline = asyncio.get_running_loop().time() + seconds
        tasks: set[asyncio.Task[None]] = set()
        while asyncio.get_running_loop().time() < deadline:
            for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 1, 7))):
                tasks.add(asyncio.create_task(_stream(session, server.url, rng, shared)))
            await asyncio.sleep(rng.expovariate(rate))
        picture = await tab.screenshot(out, whole=True)
        print(f"{out}: {len(picture)} bytes")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stream(
    session: aiohttp.ClientSession, url: str, rng: random.Random, shared: str
) -> None:
    """One request; now and then a long one, one with a known beginning, or one that leaves."""
    kind = rng.random()
    num_words = rng.randint(300, 600) if kind > 0.92 else rng.randint(4, 90)
    prompt = " ".join(rng.choices(_WORDS, k=num_words))
    body = {
        "prompt": f"{shared} {prompt}" if kind < 0.45 else prompt,
        "max_tokens": 4 + int(rng.lognormvariate(4.0, 0.7)),
        "ignore_eos": True,
        "stream": True,
    }
    leaves_after = rng.randint(5, 40) if rng.random() < 0.06 else 1 << 30
    with contextlib.suppress(aiohttp.ClientError):
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            num_lines = 0
            async for _ in answer.content:
                num_lines += 1
                if num_lines > leaves_after:
                    return


def main() -> None:
    """Start a server, draw, stop it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "live.png")
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals a second")
    arguments = parser.parse_args()
    with ServerProcess(*_FLAGS) as server:
        asyncio.run(draw(server, arguments.out, seconds=arguments.seconds, rate=arguments.rate))


if __name__ == "__main__":
    main()
