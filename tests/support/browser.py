"""A headless Chromium that tests drive by its DevTools protocol, over aiohttp's web socket.

Knows the few commands that tests of a page need. Knows nothing of the page.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from tests.waiting import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root, in a container
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-port=0",
)
_KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27, "Home": 36, "End": 35}


class Tab:
    """One page: commands go out, events are kept.

    Attributes:
        events: every event so far, as (method, parameters).
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._next_id = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            content = json.loads(message.data)
            answer = self._answers.pop(content.get("id", -1), None)
            if answer is not None and not answer.done():
                answer.set_result(content)
            elif "method" in content:
                self.events.append((content["method"], content.get("params", {})))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result; AssertionError where it fails."""
        self._next_id += 1
        answer = asyncio.get_running_loop().create_future()
        self._answers[self._next_id] = answer
        await self._socket.send_json({"id": self._next_id, "method": method, "params": parameters})
        content: dict[str, Any] = await asyncio.wait_for(answer, PATIENCE_S)
        assert "error" not in content, f"{method}: {content['error']}"
        return content["result"]

    async def open(self, url: str) -> None:
        """Go to an address, with everything that happens on the way among `events`."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, awaited if it is a promise."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true; returns its value."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not (value := await self.evaluate(expression)):
            assert asyncio.get_running_loop().time() < deadline, f"never true: {expression}"
            await asyncio.sleep(0.05)
        return value

    async def press(self, key: str) -> None:
        """Press and let go of a key."""
        code = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS.get(key, 0)}
        if key == " ":
            code = {"key": " ", "code": "Space", "text": " ", "windowsVirtualKeyCode": 32}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **code)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    async def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """Give the page a window of this size."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    async def prefer(self, scheme: str) -> None:
        """Say what `prefers-color-scheme` is."""
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    async def screenshot(self, path: Path, *, whole: bool = False) -> bytes:
        """Write a picture of the window, or of the whole page, as PNG."""
        answer = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole
        )
        picture = base64.b64decode(answer["data"])
        path.write_bytes(picture)
        return picture

    def requested(self) -> list[str]:
        """Addresses that the page has asked for."""
        return [
            parameters["request"]["url"]
            for method, parameters in self.events
            if method == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, uncaught exceptions, violations of a policy."""
        found = []
        for method, parameters in self.events:
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(json.dumps(parameters["args"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in (
                "error",
                "warning",
            ):
                found.append(json.dumps(parameters["entry"]))
        return found

    async def close(self) -> None:
        """Hang up."""
        await self._socket.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Callable[[], Any]]:
    """A browser with a profile of its own; what it gives makes a new tab."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"HOME": profile},
            start_new_session=True,
        )
        try:
            port = await asyncio.wait_for(asyncio.to_thread(_debugging_port, process), 60)
            async with aiohttp.ClientSession() as session:
                tabs: list[Tab] = []

                async def new_tab() -> Tab:
                    async with session.put(f"http://127.0.0.1:{port}/json/new") as answer:
                        target = await answer.json()
                    url = target["webSocketDebuggerUrl"]
                    tab = Tab(await session.ws_connect(url, max_msg_size=0))
                    tabs.append(tab)
                    return tab

                try:
                    yield new_tab
                finally:
                    for tab in tabs:
                        await tab.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def _debugging_port(process: "subprocess.Popen[bytes]") -> int:
    assert process.stderr is not None
    said = b""
    for line in process.stderr:
        said += line
        match = re.search(rb"DevTools listening on ws://[^:]+:(\d+)/", line)
        if match:
            return int(match[1])
    raise AssertionError(f"Chromium ended: {said.decode(errors='replace')}")
