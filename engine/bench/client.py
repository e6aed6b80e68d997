"""A streaming client that costs little: one request in, one record out, whatever happens to it.

Knows `/v1/completions`, `/v1/chat/completions` and every way in which a request can end. Does not
know arrivals nor statistics.

aiohttp, because its HTTP parser is compiled: for each streamed token it takes a fraction of the
processor time that httpx takes, and a load generator that shares a machine with the server must
not be what is measured.
"""

import asyncio
import contextlib
import json
import ssl
import time
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from engine.bench.events import EventFormatError, EventParser, ServerEvent
from engine.bench.prompts import Prompt
from engine.bench.records import Outcome, RequestRecord
from engine.bench.settings import LoadSettings
from engine.errors import ConfigError, IsinglassError

# Shorter than the five seconds after which common servers close idle connections: a request that
# is sent at that very moment would be counted as a disconnect.
_KEEP_ALIVE_S = 4.0
_MAX_DETAIL_CHARS = 200
_READY_POLL_S = 0.25
_GET_LIMIT_S = 10.0


class ServerNotReadyError(IsinglassError):
    """The server did not become ready in time, or refuses to say which model it serves."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def brings_output(self) -> bool:
        """Whether this is generated output: not the role of a message, not a bare ending."""
        delta = self.delta
        if delta is None:
            # A token may have no text yet, half of a character for instance; an ending has none.
            return bool(self.text) or self.finish_reason is None
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _StreamChunk(msgspec.Struct):
    object: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_StreamChunk)


class _EndedError(Exception):
    """Leaves the reading of a stream with an outcome."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


class _StreamState:
    """What has come of one stream."""

    __slots__ = ("chunk_ns", "done", "finish_reason", "num_events", "status", "usage")

    def __init__(self) -> None:
        self.chunk_ns: list[int] = []
        self.num_events = 0
        self.usage: _Usage | None = None
        self.finish_reason: str | None = None
        self.status: int | None = None
        self.done = False

    def take(self, events: list[ServerEvent], now_ns: int) -> None:
        """Take in the events of one read of the socket.

        Raises:
            _EndedError: one of them reports an error or cannot be understood.
        """
        num_before = self.num_events
        for event in events:
            if event.data == b"[DONE]":
                self.done = True
                continue
            self._take_chunk(event)
        if self.num_events > num_before:
            self.chunk_ns.append(now_ns)

    def _take_chunk(self, event: ServerEvent) -> None:
        try:
            chunk = _DECODER.decode(event.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if event.name == "error":
                raise _EndedError(Outcome.ERROR_EVENT, _text(event.data)) from error
            raise _EndedError(Outcome.BAD_STREAM, f"{error}: {_text(event.data)}") from error
        if chunk.error is not None or event.name == "error" or chunk.object == "error":
            raise _EndedError(Outcome.ERROR_EVENT, _text(event.data))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            self.num_events += choice.brings_output()
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason


class StreamingClient:
    """Connections to one server; use with `async with`."""

    def __init__(self, settings: LoadSettings) -> None:
        self._settings = settings
        own = {"Content-Type": "application/json"}
        if settings.api_key is not None:
            own["Authorization"] = f"Bearer {settings.api_key}"
        given = {name.lower() for name in settings.headers}
        self._headers = {name: value for name, value in own.items() if name.lower() not in given}
        self._headers |= settings.headers
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "StreamingClient":
        tls: ssl.SSLContext | bool = not self._settings.insecure
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=tls),
            timeout=aiohttp.ClientTimeout(total=None),  # ours covers the stream to its end
            headers=self._headers,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def wait_until_ready(self) -> None:
        """Return when `/health`, or where there is no such route `/v1/models`, answers 200.

        Raises:
            ServerNotReadyError: not within the time for it; says what came last.
        """
        deadline = time.monotonic() + self._settings.ready_timeout_s
        while True:
            try:
                limit_s = max(_READY_POLL_S, min(_GET_LIMIT_S, deadline - time.monotonic()))
                status, _ = await self._get("/health", limit_s)
                if status == 404:
                    status, _ = await self._get("/v1/models", limit_s)
                if status == 200:
                    return
                last = f"HTTP status {status}"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                last = _words(error)
                status = None
            if status in (401, 403):
                raise ServerNotReadyError(
                    f"{self._settings.root_url} lets nobody in without a key: {last}; "
                    "give --api-key or set OPENAI_API_KEY"
                )
            if time.monotonic() >= deadline:
                raise ServerNotReadyError(
                    f"{self._settings.root_url} is not ready after "
                    f"{self._settings.ready_timeout_s:g} s: {last}"
                )
            await asyncio.sleep(_READY_POLL_S)

    async def first_model(self) -> str:
        """The first model that the server names.

        Raises:
            ServerNotReadyError: it names none.
        """
        try:
            status, body = await self._get("/v1/models")
            if status == 200:
                return str(json.loads(body)["data"][0]["id"])
            reason = f"HTTP status {status}: {_text(body)}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = _words(error)
        except (ValueError, LookupError, TypeError):
            reason = "the answer is no list of models"
        raise ServerNotReadyError(
            f"{self._settings.root_url}/v1/models names no model ({reason}); give --model"
        )

    async def _get(self, path: str, limit_s: float = _GET_LIMIT_S) -> tuple[int, bytes]:
        assert self._session is not None
        url = self._settings.root_url + path
        async with asyncio.timeout(limit_s), self._session.get(url) as got:
            return got.status, await got.read()

    async def send(
        self, body: bytes, *, index: int, intended_ns: int, request_id: str
    ) -> RequestRecord:
        """Post a request and read its stream to the end; never raises for what the server does.

        A cancelled task gives a record too, and swallows the cancellation: the caller asked for
        the end of the request, which this is.
        """
        state = _StreamState()
        sent_ns = time.perf_counter_ns()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._stream(body, request_id, state)
            outcome, detail = Outcome.OK, ""
        except _EndedError as ended:
            outcome, detail = ended.outcome, str(ended)
        except TimeoutError:
            outcome = Outcome.TIMED_OUT
            detail = f"not over after {self._settings.timeout_s:g} s"
        except asyncio.CancelledError:
            outcome, detail = Outcome.CANCELLED, "while it was in flight"
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            outcome = Outcome.REFUSED if refused else Outcome.UNREACHABLE
            detail = _words(error)
        except (aiohttp.ClientError, OSError) as error:
            outcome, detail = Outcome.DISCONNECTED, _words(error)
        usage = state.usage or _Usage()
        details = usage.prompt_tokens_details
        return RequestRecord(
            index=index,
            request_id=request_id,
            intended_ns=intended_ns,
            sent_ns=sent_ns,
            chunk_ns=tuple(state.chunk_ns),
            end_ns=time.perf_counter_ns(),
            outcome=outcome,
            status=state.status,
            detail=detail,
            finish_reason=state.finish_reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
            num_events=state.num_events,
        )

    async def _stream(self, body: bytes, request_id: str, state: _StreamState) -> None:
        assert self._session is not None
        headers = {"X-Request-Id": request_id}
        async with self._session.post(
            self._settings.url,
            data=body,
            headers=headers,
            allow_redirects=False,  # one request is one request, and the key is not for others
        ) as response:
            state.status = response.status
            if response.status != 200:
                text = b""
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    text = await response.read()  # the status is known, whatever becomes of this
                raise _EndedError(Outcome.HTTP_ERROR, _text(text))
            if response.content_type == "application/json":
                raise _EndedError(Outcome.BAD_STREAM, "the answer is one JSON document, no stream")
            parser = EventParser()
            while chunk := await response.content.readany():
                now_ns = time.perf_counter_ns()
                try:
                    events = parser.feed(chunk)
                except EventFormatError as error:
                    raise _EndedError(Outcome.BAD_STREAM, str(error)) from error
                if events:
                    state.take(events, now_ns)
        if not state.done:
            # The chunked encoding may end properly where the stream within it does not.
            kind = (
                Outcome.DISCONNECTED if state.num_events or parser.pending else Outcome.BAD_STREAM
            )
            raise _EndedError(kind, "the answer ended without [DONE]")


def request_body(prompt: Prompt, settings: LoadSettings, model: str) -> bytes:
    """The JSON body that asks for this prompt, encoded.

    `extra_body` wins over a file's keys, and both over what the generator sets by itself.

    Raises:
        ConfigError: the endpoint cannot take such a prompt, or it is no valid text.
    """
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": settings.temperature,
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.endpoint == "chat":
        if prompt.token_ids is not None:
            raise ConfigError("chat takes no token ids; use --endpoint completions")
        body["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
        body["max_completion_tokens"] = prompt.max_tokens
    else:
        if prompt.messages is not None:
            raise ConfigError("completions take no messages; use --endpoint chat")
        body["prompt"] = prompt.text if prompt.token_ids is None else prompt.token_ids
        body["max_tokens"] = prompt.max_tokens
    try:
        return msgspec.json.encode(body | prompt.extra | settings.extra_body)
    except UnicodeEncodeError as error:
        raise ConfigError(f"a model's name or a prompt is no valid text: {error}") from error


def _text(data: bytes) -> str:
    return _line(data.decode(errors="replace"))


def _words(error: BaseException) -> str:
    return _line(str(error) or type(error).__name__)


def _line(text: str) -> str:
    """One line that neither a terminal nor an SVG file takes for commands."""
    text = " ".join(text.split())[:_MAX_DETAIL_CHARS]
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
