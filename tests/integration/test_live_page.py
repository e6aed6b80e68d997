"""The page at `/` in a headless Chromium, against a real server under load.

What the page shows is compared with the records that the same server sends; the stream is read a
second time by the test itself.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import instrumentation.metrics.frontend  # noqa: F401  it fills the catalogue
from engine.checkpoint.locate import embedded_model_path
from engine.server.live.facts import REQUEST_COLUMNS, STEP_COLUMNS
from instrumentation import StepLabel, parse_step_label, step_kind
from instrumentation.metrics.info import METRICS
from tests.support import server_process
from tests.support.browser import CHROMIUM, Tab, browser
from tests.support.server_facts import scrape
from tests.support.server_process import SMALL_FLAGS, ServerProcess
from tests.tiny_models import build_tiny_checkpoint
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

EVIL = "<img src=x onerror=window.pwned=1>"
EVIL_ID = "<b>&lt;script>window.pwned=1"
WORDS = ("mica", "splits", "into", "sheets", "so", "thin", "that", "light", "passes", "through")
WITHOUT_STATISTICS = """\
const ask = window.fetch;
window.fetch = async (...of) => {
  const answer = await ask(...of);
  if (!String(of[0]).endsWith("live/events")) return answer;
  const told = answer.body
    .pipeThrough(new TextDecoderStream())
    .pipeThrough(new TransformStream({
      transform(text, out) {
        out.enqueue(text.replace('"has_statistics":true', '"has_statistics":false'));
      },
    }))
    .pipeThrough(new TextEncoderStream());
  return new Response(told, { status: answer.status, headers: answer.headers });
};
"""
"""Lets a page hear from any server what one with `--disable-log-stats` tells."""


@pytest.fixture(scope="module")
def model_flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A tiny model with a long context, so that requests last for a while."""
    folder = build_tiny_checkpoint(
        tmp_path_factory.mktemp("live") / "llama",
        "llama",
        vocab_size=49152,
        max_position_embeddings=8192,
    )
    flags = (str(folder), f"--tokenizer={embedded_model_path()}", *SMALL_FLAGS)
    return (*flags, "--max-num-seqs=6", "--num-gpu-blocks-override=600")


@pytest.fixture(scope="module")
def server(model_flags: tuple[str, ...]) -> Iterator[ServerProcess]:
    """A server whose model has a name that a page should not take for markup."""
    with ServerProcess(*model_flags, "--served-model-name", EVIL) as server:
        yield server


def in_browser(test: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """Run a test's coroutine with a function that makes tabs."""

    async def run() -> None:
        async with browser() as new_tab:
            await test(new_tab, *arguments)

    asyncio.run(run())


class Listener:
    """Reads a server's stream as the page does.

    Attributes:
        steps: rows of steps by number, with names.
        requests: rows of requests that ended, by number.
        gaps: how often each time between tokens was, in microseconds.
    """

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}
        self.requests: dict[int, dict[str, Any]] = {}
        self.gaps: Counter[int] = Counter()

    def take(self, message: dict[str, Any]) -> None:
        """Note what a message brings."""
        for row in message.get("steps", ()):
            step = dict(zip(STEP_COLUMNS, row, strict=True))
            assert step["step"] not in self.steps
            self.steps[step["step"]] = step
        for row in message.get("ended", ()):
            request = dict(zip(REQUEST_COLUMNS, row, strict=True))
            self.requests[request["num"]] = request
        if message["kind"] == "delta":
            pairs = message.get("gaps", ())
            for gap, n in zip(pairs[::2], pairs[1::2], strict=True):
                self.gaps[gap] += n


@contextlib.asynccontextmanager
async def listening(url: str) -> AsyncIterator[Listener]:
    """A listener, already past its snapshot."""
    listener, ready = Listener(), asyncio.Event()

    async def listen() -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 22) as session,
            session.get(f"{url}/live/events") as answer,
        ):
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            async for line in answer.content:
                if line.startswith(b"data: "):
                    listener.take(json.loads(line[len(b"data: ") :]))
                    ready.set()

    task = asyncio.create_task(listen())
    await asyncio.wait_for(ready.wait(), PATIENCE_S)
    try:
        yield listener
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def load(url: str, *, num_requests: int, seed: int = 0, most_tokens: int = 60) -> None:
    """Streams of many lengths, of which some are left early, over a few seconds."""
    rng = random.Random(seed)
    shared = " ".join(rng.choices(WORDS, k=60))

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(0.03 * number)
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(3, 200)))
        body = {
            "prompt": shared + prompt if rng.random() < 0.5 else prompt,
            "max_tokens": rng.randint(2, most_tokens),
            "ignore_eos": True,
            "stream": True,
        }
        if number == 3:
            body["request_id"] = EVIL_ID
        leaves = rng.random() < 0.1
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for _ in answer.content:
                if leaves:
                    return

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(one(session, number) for number in range(num_requests)))


def nearest_rank(values: Counter[int], rank: int) -> int:
    """A percentile, by going through all values one by one."""
    ordered = sorted(values.elements())
    return ordered[-(-rank * len(ordered) // 100) - 1]


async def go_quiet(tab: Tab, listener: Listener, server: ServerProcess) -> None:
    """Wait until the page, and the listener, have been told of all there is."""
    num_steps = (await asyncio.to_thread(scrape, server.url)).total("steps_total")
    await tab.until(f"isinglass.state.steps.length === {num_steps:g}")
    await tab.until("isinglass.state.requests.every(one => one.end !== null)")
    await until(lambda: len(listener.steps) == num_steps, "the listener has not heard all")
    await asyncio.sleep(1.6)


def test_the_page_shows_what_the_records_say(server: ServerProcess, tmp_path: Path) -> None:
    in_browser(_shows_what_the_records_say, server, tmp_path)


async def _shows_what_the_records_say(
    new_tab: Callable[[], Awaitable[Tab]], server: ServerProcess, tmp_path: Path
) -> None:
    async with listening(server.url) as listener:
        tab = await new_tab()
        await tab.resize(1440, 1000)
        await tab.prefer("light")
        await tab.open(f"{server.url}/")
        await tab.until("window.isinglass?.state.connection === 'live'")
        loading = asyncio.create_task(load(server.url, num_requests=40))
        await tab.until("isinglass.state.steps.length > 30")
        picture = await tab.screenshot(tmp_path / "live.png")
        assert len(picture) > 40_000, "the page is all but empty"
        await loading
        await go_quiet(tab, listener, server)
        state = await tab.evaluate("isinglass.state")

        # Steps: each once, and as recorded.
        assert len(state["steps"]) > 50
        numbers = [number for number, _, _ in state["steps"]]
        assert numbers == sorted(listener.steps)
        for number, label, kind in state["steps"]:
            recorded = listener.steps[number]
            assert (label, kind) == (recorded["label"], recorded["kind"])
            counts: StepLabel = parse_step_label(label)
            assert kind == step_kind(counts)
            assert counts.num_context_tokens == recorded["num_context_tokens"]
            assert counts.num_generation_tokens == recorded["num_generation_tokens"]
        assert {kind for _, _, kind in state["steps"]} == {"context", "mixed", "generation"}

        # Requests: all of them, and their tokens are the steps' tokens.
        shown = {one["num"]: one for one in state["requests"]}
        for num, recorded in listener.requests.items():
            assert {name: shown[num][name] for name in REQUEST_COLUMNS} == recorded
        assert len(listener.requests) == 40
        assert {"length", "abort"} <= {one["reason"] for one in listener.requests.values()}

        # Percentiles: of the same time lines, computed apart.
        ended = listener.requests.values()
        expected = {
            "ttft": Counter(o["first_token"] - o["arrival"] for o in ended if o["first_token"]),
            "itl": listener.gaps,
            "e2e": Counter(one["end"] - one["arrival"] for one in ended),
        }
        assert sum(listener.gaps.values()) > 200
        for name, values in expected.items():
            found = state["latencies"][name]
            assert found["n"] == sum(values.values()), name
            assert found["values"] == [nearest_rank(values, rank) for rank in (50, 90, 99)], name

        # Blocks: the last map is of an idle engine, and they add up to the pool.
        await tab.until("isinglass.state.blocks.owned + isinglass.state.blocks.shared === 0")
        blocks = await tab.evaluate("isinglass.state.blocks")
        assert sum(blocks.values()) == 600
        assert blocks["cached"] > 0

        # Names are names.
        assert await tab.evaluate("document.querySelector('#model').textContent") == EVIL
        assert await tab.evaluate("window.pwned") is None
        assert any(EVIL_ID in one["id"] for one in ended)

        await _words_and_keys(tab, listener)
        await _looks(tab, tmp_path)
        origins = {url.split("/")[2] for url in tab.requested()}
        assert origins == {f"127.0.0.1:{server.port}"}
        assert tab.complaints() == []


async def _words_and_keys(tab: Tab, listener: Listener) -> None:
    """Definitions, and what the keyboard does."""
    for name, row in {
        "time_to_first_token_seconds": "ttft",
        "inter_token_latency_seconds": "itl",
        "request_e2e_seconds": "e2e",
    }.items():
        title = await tab.evaluate(f"document.querySelector('[data-latency={row}]').title")
        assert METRICS[f"isinglass_{name}"].help in title
    await tab.evaluate("document.querySelector('#strip').focus()")
    await tab.press("End")
    for key in ("ArrowLeft", "ArrowLeft", "Home", "ArrowRight"):
        await tab.press(key)
        shown = await tab.evaluate("isinglass.state.shown")
        text = await tab.evaluate("document.querySelector('#detail-label').textContent")
        assert text == shown["label"] == listener.steps[shown["step"]]["label"]
    await tab.press("Enter")
    pinned = await tab.evaluate("isinglass.state.shown.step")
    await tab.evaluate("document.querySelector('#strip').blur()")
    assert await tab.evaluate("isinglass.state.shown.step") == pinned
    kicker = "document.querySelector('#detail-kicker').textContent"
    assert (await tab.evaluate(kicker)).startswith("pinned step")
    await tab.evaluate("document.querySelector('#strip').focus()")
    await tab.press("Escape")
    visible = "isinglass.timeline.visibleSteps().map(one => one.step)"
    before = await tab.evaluate(visible)
    await tab.press(" ")
    assert await tab.evaluate("document.body.dataset.state") == "paused"
    await asyncio.sleep(0.3)
    assert await tab.evaluate(visible) == before
    await tab.press(" ")
    assert await tab.evaluate("document.body.dataset.state") == "live"


async def _looks(tab: Tab, tmp_path: Path) -> None:
    """Both schemes, a narrow window, and no work while nothing happens."""
    before = -1
    async with asyncio.timeout(PATIENCE_S):  # what the last key has begun comes to rest first
        while (now := await tab.evaluate("isinglass.state.numFrames")) != before:
            before = now
            await asyncio.sleep(0.3)
    await asyncio.sleep(1.5)
    assert await tab.evaluate("isinglass.state.numFrames") - before <= 3, "draws while idle"
    background = "getComputedStyle(document.body).backgroundColor"
    light = await tab.evaluate(background)
    await tab.prefer("dark")
    await tab.until(f"{background} !== {json.dumps(light)}")
    dark_picture = await tab.screenshot(tmp_path / "dark.png")
    await tab.resize(400, 800)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    await tab.until(f"innerWidth === 400 && {overflow} <= 0")
    assert await tab.screenshot(tmp_path / "narrow.png") != dark_picture
    await tab.resize(1440, 1000)


def test_files_and_stream_over_http(server: ServerProcess) -> None:
    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{server.url}/") as answer:
                assert answer.status == 200
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'self'" in policy
                assert "unsafe-inline" not in policy
            for path in ("live/../state.py", "live/%2e%2e/state.py", "live/page.html"):
                async with session.get(f"{server.url}/{path}") as answer:
                    assert answer.status == 404, path
        async with aiohttp.ClientSession() as session:
            answers = [await session.get(f"{server.url}/live/events") for _ in range(17)]
            assert [one.status for one in answers] == [200] * 16 + [503]
            assert "Retry-After" in answers[-1].headers
            for one in answers:
                one.close()
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            status = 503
            while status != 200:  # those who left have made room
                async with session.get(f"{server.url}/live/events") as answer:
                    status = answer.status

    asyncio.run(run())


@pytest.mark.slow
def test_the_page_comes_back_after_a_restart(
    model_flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server_process.free_port()
    monkeypatch.setattr(server_process, "free_port", lambda: port)

    async def run(new_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await new_tab()
        with ServerProcess(*model_flags) as first:
            await tab.open(f"{first.url}/")
            await tab.until("window.isinglass?.state.connection === 'live'")
            await load(first.url, num_requests=3)
            await tab.until("isinglass.state.steps.length > 3")
            first.stop()  # the open stream must not hold it up
            await tab.until("['lost', 'ended'].includes(isinglass.state.connection)")
            assert await tab.evaluate("!document.querySelector('#notice').hidden")
        with ServerProcess(*model_flags) as second:
            await tab.until("isinglass.state.connection === 'live'")
            assert await tab.evaluate("isinglass.state.steps.length") == 0
            assert await tab.evaluate("document.querySelector('#notice').hidden")
            await load(second.url, num_requests=3, seed=1)
            await tab.until("isinglass.state.steps.length > 3")

    in_browser(run)


def test_the_page_asks_for_a_key_keeps_it_and_knows_of_a_recording_whoever_began_it(
    model_flags: tuple[str, ...], tmp_path: Path
) -> None:
    async def run(new_tab: Callable[[], Awaitable[Tab]]) -> None:
        flags = ("--api-key=a-key", f"--trace-dir={tmp_path}")
        with ServerProcess(*model_flags, *flags) as server:
            tab = await new_tab()
            await tab.open(f"{server.url}/")
            await tab.until("window.isinglass?.state.connection === 'key'")
            for key, outcome in (
                ("wrong", "document.querySelector('#key-error').textContent !== ''"),
                ("a-key", "isinglass.state.connection === 'live'"),
            ):
                await tab.until("document.activeElement.id === 'key'")
                await tab.call("Input.insertText", text=key)
                await tab.evaluate("document.querySelector('#key-form').requestSubmit()")
                await tab.until(outcome)
            await tab.call("Page.reload")
            await tab.until("window.isinglass?.state.connection === 'live'")
            assert await tab.evaluate("document.querySelector('#key-form').hidden")
            assert "a-key" not in "".join(tab.requested())
            tab.events.clear()  # that it was refused, it had to say
            await _knows_of_a_recording(tab, server, tmp_path)
            assert tab.complaints() == []

    in_browser(run)


async def _knows_of_a_recording(tab: Tab, server: ServerProcess, folder: Path) -> None:
    button, note = (f"document.querySelector('#trace{part}')" for part in ("", "-note"))
    for number in (1, 2):
        await tab.until(f"{button}.textContent === 'Stop trace'")
        assert f"recording into {folder}" in await tab.evaluate(f"{note}.title")
        run_name = (await tab.evaluate("isinglass.model.recording")).rpartition("/")[2]
        assert await tab.evaluate(f"{note}.textContent") == f"recording into {run_name}"
        await tab.evaluate(f"{button}.click()")
        await tab.until(f"{button}.textContent === 'Record trace'")
        await tab.until(f"{note}.title.startsWith('recorded in {folder}')")
        if number == 1:
            await tab.evaluate(f"{button}.click()")
    async with (
        aiohttp.ClientSession(headers={"Authorization": "Bearer a-key"}) as session,
        session.post(f"{server.url}/start_trace") as answer,
    ):
        run_dir = (await answer.json())["run_dir"]
    await tab.until(f"{note}.title === 'recording into {run_dir}'")
    await tab.resize(400, 800)
    assert await tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert await tab.evaluate(f"{button}.getBoundingClientRect().height") < 34  # one line


def test_the_page_says_that_the_engine_has_died(model_flags: tuple[str, ...]) -> None:
    async def run(new_tab: Callable[[], Awaitable[Tab]]) -> None:
        with ServerProcess(*model_flags, "--keep-alive-on-engine-death") as server:
            tab = await new_tab()
            await tab.open(f"{server.url}/")
            await tab.until("window.isinglass?.state.connection === 'live'")
            (core,) = server.children()
            os.kill(core, signal.SIGKILL)
            await tab.until("isinglass.state.connection === 'ended'")
            notice = await tab.evaluate("document.querySelector('#notice').textContent")
            assert "engine is gone" in notice
            assert ".." not in notice
            assert await tab.evaluate("document.querySelector('#trace').hidden")
            # A page that is opened now says the same.
            late = await new_tab()
            await late.open(f"{server.url}/")
            await late.until("window.isinglass?.state.connection === 'ended'")

    in_browser(run)


def test_the_page_says_of_whom_nothing_is_heard_and_why_it_is_empty(server: ServerProcess) -> None:
    async def run(new_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await new_tab()
        await tab.open(f"{server.url}/")
        await tab.until("window.isinglass?.state.connection === 'live'")
        gap = "import('/live/lanes.js').then(one => one.widestGap(%s))"
        for given, gap_found in (
            ("5, 95, []", [5, 95]),
            ("5, 95, [[0, 20], [30, 40], [90, 99]]", [40, 90]),
            ("5, 95, [[20, 90]]", [5, 20]),
            ("5, 95, [[1, 99]]", [5, 5]),
        ):
            assert await tab.evaluate(gap % given) == gap_found
        note = "document.querySelector('#lanes-note').textContent"
        for silent, words in (("2", "frontend 2,"), ("2, 4", "frontends 2, 4,"), ("", None)):
            told = f"{{kind: 'delta', now: isinglass.model.now, silent: [{silent}]}}"
            await tab.evaluate(f"isinglass.model.apply({told})")
            heard = f"!{note}.includes('nothing is heard')"
            await tab.until(f"{note}.includes('requests of {words}')" if words else heard)
        notice = "document.querySelector('#notice')"
        assert await tab.evaluate(f"{notice}.hidden")
        await tab.call("Page.addScriptToEvaluateOnNewDocument", source=WITHOUT_STATISTICS)
        await tab.call("Page.reload")
        await tab.until(f"{notice}?.textContent.includes('--disable-log-stats')")
        assert not await tab.evaluate(f"{notice}.hidden")

    in_browser(run)
