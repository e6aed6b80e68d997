"""Sending an HTTP request's prompts: what is done once, what is refused first, which ids."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import PromptError, QueueFullError
from engine.frontend.input_processor import ProcessedParams, ProcessedPrompt
from engine.frontend.queue_counter import QueueCounter
from engine.frontend.request_tracer import TEXT_COMPLETION
from engine.server.config import ServerConfig
from engine.server.http.errors import ApiError
from engine.server.http.served import Phase
from engine.server.openai.chat import create_chat_completion
from engine.server.openai.completions import create_completion
from engine.server.openai.protocol.chat import ChatCompletionRequest
from engine.server.openai.protocol.completion import CompletionRequest
from engine.server.openai.submission import Origin, Submission
from engine.server.state import ServerState
from engine.types.sampling import SamplingParams


class FakeEngine:
    """As much of an `AsyncLLM` as submissions ask; one token a letter."""

    model_name = "fake"
    attachment = None
    config = SimpleNamespace(
        model=SimpleNamespace(generation_config="vllm", max_model_len=100),
        scheduler=SimpleNamespace(max_num_seqs=0),  # no place is ever free
    )

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.sent: list[tuple[Any, Any, str]] = []
        self.closed: list[str] = []
        self.num_params = 0
        self.batches: list[list[Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.llm_engine = SimpleNamespace(
            queue=QueueCounter(),
            tokenizer=None,
            counting_rejections=self.counting_rejections,
            input_processor=SimpleNamespace(process_params=self.process_params),
        )

    @contextmanager
    def counting_rejections(self, **arrived: Any) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.refused.append(arrived)
            raise

    def process_params(self, params: SamplingParams) -> SamplingParams:
        self.num_params += 1
        return params.clone()

    async def with_texts(self, function: Any, *_: Any, num_characters: int = 0) -> Any:
        return function()

    async def process_prompts(self, prompts: Sequence[Any], params: Any) -> list[ProcessedPrompt]:
        self.batches.append(list(prompts))
        await self.gate.wait()
        return [ProcessedPrompt(one["prompt"], [7] * len(one["prompt"]), None) for one in prompts]

    async def submit(self, prompt: Any, params: Any, request_id: str, **_: Any) -> Any:
        if len(self.sent) == 3:
            raise PromptError("it is wrong", param="priority")
        self.sent.append((prompt, params, request_id))
        return SimpleNamespace(close=lambda: self.closed.append(request_id))

    def has_request(self, request_id: str) -> bool:
        return request_id in self.used

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    async def render_chat(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("rendered, though the queue is full")


def make_request(engine: Any, **limits: Any) -> Any:
    """As much of FastAPI's request as routes look at."""
    server = ServerState(engine, ServerConfig.from_kwargs(**limits))
    server.phase = Phase.READY
    told = {"request_id": "told", "arrival_ns": 5, "traceparent": None}
    return SimpleNamespace(
        scope={"state": told},
        state=SimpleNamespace(num_body_bytes=0),
        app=SimpleNamespace(state=SimpleNamespace(server=server)),
    )


def send(engine: Any, request: Any, texts: Sequence[str]) -> Any:
    body = CompletionRequest(prompt=list(texts), n=2)
    origin = Origin.of(request, engine, "cmpl", None)
    params = SamplingParams(n=2)
    submission = Submission(body, params, origin, TEXT_COMPLETION, {}, "prompt")
    admission = request.app.state.server.admission

    async def run() -> Any:
        with origin.reserve(
            request.app.state.server, 2 * len(texts), TEXT_COMPLETION, prompt="prompt"
        ) as room:
            assert admission.num_reserved == 2 * len(texts)
            prompts = [{"prompt": text} for text in texts]
            sending = asyncio.create_task(submission.send(engine, request, prompts, room))
            while not sending.done():  # each prompt is in the queue, or has room there, never both
                num_waiting = len(texts) - len(engine.sent)
                num_tokens = sum(map(len, texts[len(engine.sent) :]))
                assert admission.num_reserved == 2 * num_waiting
                assert admission.num_reserved_tokens == (2 * num_tokens if engine.sent else 0)
                await asyncio.sleep(0)
            return await sending

    try:
        return asyncio.run(run())
    finally:
        assert (admission.num_reserved, admission.num_reserved_tokens) == (0, 0)


def test_parameters_are_processed_once_and_prompts_together() -> None:
    engine = FakeEngine()
    request = make_request(engine)
    assert len(send(engine, request, ["a", "bb", "ccc"])) == 3
    assert engine.num_params == 1
    assert engine.batches == [[{"prompt": "a"}, {"prompt": "bb"}, {"prompt": "ccc"}]]
    prompts, params, ids = zip(*engine.sent, strict=True)
    assert [len(prompt.token_ids) for prompt in prompts] == [1, 2, 3]
    assert {type(one) for one in params} == {ProcessedParams}
    assert list(ids) == ["cmpl-told-0", "cmpl-told-1", "cmpl-told-2"]
    assert (request.state.num_prompt_tokens, request.state.response_id) == (6, "cmpl-told")


def test_what_fails_on_the_way_leaves_nothing_running() -> None:
    engine = FakeEngine()
    with pytest.raises(ApiError) as caught:
        send(engine, make_request(engine), "abcde")
    assert (caught.value.status, caught.value.param) == (400, "priority")
    assert engine.closed == ["cmpl-told-0", "cmpl-told-1", "cmpl-told-2"]


def test_an_id_in_use_is_not_given_again() -> None:
    engine = FakeEngine()
    request = make_request(engine)
    assert Origin.of(request, engine, "cmpl", None).response_id == "cmpl-told"
    assert Origin.of(request, engine, "cmpl", "wanted").response_id == "cmpl-wanted"
    for wanted in (None, "wanted"):
        begins = f"cmpl-{wanted or 'told'}"
        for used in (begins, f"{begins}-0", f"{begins}-2"):
            engine.used = {used}
            given = Origin.of(request, engine, "cmpl", wanted, num_prompts=3).response_id
            assert given.startswith(f"{begins}-")
            assert len(given) == len(begins) + 9


def test_a_full_queue_refuses_before_anything_is_rendered_or_tokenized() -> None:
    engine = FakeEngine()
    engine.llm_engine.queue.add(1, 10)
    request = make_request(engine, max_num_queued_reqs=2)
    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], n=2)
    text = CompletionRequest(prompt=["a", "b"], add_special_tokens=False)
    for route, body in ((create_chat_completion, chat), (create_completion, text)):
        with pytest.raises(QueueFullError, match="1 requests wait"):
            asyncio.run(route(body, request))
    assert not engine.batches
    assert [one["request_id"] for one in engine.refused] == ["chatcmpl-told", "cmpl-told"]
    with pytest.raises(ApiError, match="alone has 3 requests") as caught:
        asyncio.run(create_completion(CompletionRequest(prompt=["a"] * 3), request))
    assert caught.value.param == "prompt"
    with pytest.raises(ApiError, match=r"alone has 3 requests \(n=3\)") as caught:
        asyncio.run(create_chat_completion(chat.model_copy(update={"n": 3}), request))
    assert caught.value.param == "n"


def test_what_is_on_its_way_through_the_tokenizer_counts() -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.gate.clear()
        request = make_request(engine, max_num_queued_reqs=2)
        body = CompletionRequest(prompt=["aa", "b"], add_special_tokens=False)
        first = asyncio.create_task(create_completion(body, request))
        while not engine.batches and not first.done():
            await asyncio.sleep(0)
        plain = {"add_special_tokens": False}
        together = [{"prompt": "aa"} | plain, {"prompt": "b"} | plain]
        assert engine.batches == [together]  # since they are long in sum or not
        with pytest.raises(QueueFullError, match="2 requests wait"):
            await create_completion(body, request)
        engine.gate.set()
        await first
        engine.sent.clear()
        await create_completion(body, request)

    asyncio.run(run())
