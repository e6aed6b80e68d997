"""`LLMEngine` over a client that only notes what it is told: what is sent, kept and let go of."""

import gc
import itertools
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import SamplingParams
from engine.config import EngineConfig
from engine.errors import EngineDeadError, PromptError, SamplingParamsError
from engine.frontend.llm_engine import LLMEngine
from engine.frontend.observer import EngineObserver
from engine.transport.client import EngineCoreClient
from engine.types.messages import (
    PROTOCOL_VERSION,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
)
from instrumentation import NULL, ConsoleStatus, Counter, Metrics, StartupPhase

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
SETTLED_LENGTH = 96


class NotingClient(EngineCoreClient):
    """Notes what is sent; answers nothing."""

    def __init__(self) -> None:
        self.sent: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.is_dead = False
        self.num_shutdowns = 0

    @property
    def core_pid(self) -> int:
        return 0

    def wait_ready(self) -> EngineCoreReadyResponse:
        return EngineCoreReadyResponse(
            version=PROTOCOL_VERSION,
            num_gpu_blocks=8,
            block_size=16,
            max_model_len=SETTLED_LENGTH,
            max_num_batched_tokens=64,
            dtype="float32",
            device="cpu",
            attention_backend="fake",
            kv_cache_bytes=1,
            startup_ns={"load_model": 5},
        )

    def add_request(self, request: EngineCoreRequest) -> None:
        if self.is_dead:
            raise EngineDeadError("the core is gone")
        self.sent.append(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    def get_output(self) -> EngineCoreOutputs:
        raise EngineDeadError("the core is gone")

    def call_utility(self, method: str, *args: Any) -> Any:
        raise AssertionError(method)

    def shutdown(self) -> None:
        self.num_shutdowns += 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return tmp_path


def make_engine(
    folder: Path, client: NotingClient, *, observer: EngineObserver | None = None, **settings: Any
) -> LLMEngine:
    config = EngineConfig.from_kwargs(model=str(folder), skip_tokenizer_init=True, **settings)
    return LLMEngine(config, obs=NULL, observer=observer, make_client=lambda *_, **__: client)


def rejections(observer: EngineObserver) -> dict[str, float]:
    """How many requests were refused, by the error."""
    return {
        one.labels["error"]: one.value
        for one in observer.metrics.snapshot()
        if isinstance(one, Counter) and one.name.endswith("requests_rejected_total") and one.value
    }


def test_samples_are_sent_one_by_one_and_counted_as_waiting(folder: Path) -> None:
    client = NotingClient()
    engine = make_engine(folder, client)
    params = SamplingParams(n=3, temperature=1.0, max_tokens=4, seed=7)
    engine.add_request("many", [5, 6, 7], params)
    engine.add_request("one", [8, 9], SamplingParams(max_tokens=4))
    assert [request.request_id for request in client.sent] == [
        *("many/0-0", "many/1-1", "many/2-2", "one-3")
    ]
    assert len({request.request_num for request in client.sent}) == 4
    assert len({request.sampling_params.seed for request in client.sent[:3]}) == 3
    assert (engine.queue.num_requests, engine.queue.num_tokens) == (4, 3 * 3 + 2)
    engine.discard_request(["many"])
    assert client.aborted == ["many/0-0", "many/1-1", "many/2-2"]
    assert (engine.queue.num_requests, engine.queue.num_tokens) == (1, 2)
    assert engine.has_unfinished_requests()


def test_the_core_has_the_last_word_on_the_length(folder: Path) -> None:
    engine = make_engine(folder, NotingClient())
    assert engine.config.model.max_model_len == SETTLED_LENGTH
    with pytest.raises(PromptError, match=str(SETTLED_LENGTH)):
        engine.add_request("long", [5] * (SETTLED_LENGTH + 1), SamplingParams())
    assert not engine.has_unfinished_requests()


def test_an_id_belongs_to_one_unfinished_request(folder: Path) -> None:
    client = NotingClient()
    engine = make_engine(folder, client)
    engine.add_request("same", [5], SamplingParams())
    with pytest.raises(PromptError, match="'same' belongs to an unfinished request"):
        engine.add_request("same", [6], SamplingParams())
    assert len(client.sent) == 1
    engine.discard_request(["same"])
    engine.add_request("same", [6], SamplingParams())
    assert len(client.sent) == 2


def test_what_is_refused_is_counted(folder: Path) -> None:
    client = NotingClient()
    labels = {"model_name": "m", "engine": "0"}
    observer = EngineObserver(Metrics(labels), ConsoleStatus())
    engine = make_engine(folder, client, observer=observer)
    with pytest.raises(SamplingParamsError):
        engine.add_request("outside", [5], SamplingParams(allowed_token_ids=[64]))
    with pytest.raises(PromptError):
        engine.add_request("empty", [], SamplingParams())
    assert rejections(observer) == {"SamplingParamsError": 1, "PromptError": 1}
    assert not client.sent


def test_a_dead_core_loses_every_request_at_once(folder: Path) -> None:
    client = NotingClient()
    engine = make_engine(folder, client)
    engine.add_request("lost", [5], SamplingParams())
    client.is_dead = True
    with pytest.raises(EngineDeadError):
        engine.add_request("late", [6], SamplingParams())
    assert not engine.has_unfinished_requests()
    assert engine.queue.num_requests == 0
    with pytest.raises(EngineDeadError):
        engine.step()


def test_the_frontend_times_its_own_phases(folder: Path) -> None:
    engine = make_engine(folder, NotingClient())
    assert list(engine.startup_spans_ns) == [
        StartupPhase.RESOLVE_CONFIG,
        StartupPhase.SPAWN,
        StartupPhase.TOKENIZER,
        StartupPhase.WAIT_READY,
    ]
    spans = list(engine.startup_spans_ns.values())
    assert all(begin_ns <= end_ns for begin_ns, end_ns in spans)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))


def test_an_engine_that_does_not_come_up_is_taken_down(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = NotingClient()

    def fail() -> EngineCoreReadyResponse:
        raise EngineDeadError("no")

    monkeypatch.setattr(client, "wait_ready", fail)
    with pytest.raises(EngineDeadError):
        make_engine(folder, client)
    assert client.num_shutdowns == 1


def test_an_engine_goes_with_its_last_reference(folder: Path) -> None:
    """Its core ends with it, which must not wait for the garbage collector."""
    engine = make_engine(folder, NotingClient())
    engine.add_request("unfinished", [5], SamplingParams())
    gc.disable()
    try:
        kept = weakref.ref(engine)
        del engine
        assert kept() is None
    finally:
        gc.enable()
