"""Doubles for the engine's tests: requests, a worker without a model, an executor around it.

The fake model's next token is a pure function of all tokens before it, so that any history of
steps can be compared with `reference_output`. Its KV cache holds one number per slot, which stands
for the whole prefix up to that token: a slot that is missing, stale or another request's shows.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.locate import resolve_model
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.scheduler import Scheduler, SchedulerLimits
from engine.executor.base import Executor
from engine.types.kv_cache import KVCacheSpec
from engine.types.messages import EngineCoreRequest
from engine.types.plan import GrammarOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.types.sampling import SamplingParams
from instrumentation import Instrument, RequestTimeline, WorkerStepRecord
from instrumentation.testing import FakeClock

EOS = 0
VOCAB_SIZE = 12


def sampling_params(**fields: Any) -> SamplingParams:
    """Greedy parameters that end at `EOS`, unless told otherwise."""
    ignore_eos = fields.get("ignore_eos", False)
    return SamplingParams(**({"temperature": 0.0} | fields)).update_from_model(
        () if ignore_eos else (EOS,)
    )


def message(
    request_id: str,
    prompt: Sequence[int],
    *,
    num: int = 0,
    arrival_ns: int = 1,
    priority: int = 0,
    cache_salt: str | None = None,
    params: SamplingParams | None = None,
    **fields: Any,
) -> EngineCoreRequest:
    """A request as the frontend sends it; other fields are sampling parameters."""
    return EngineCoreRequest(
        request_id=request_id,
        request_num=num,
        prompt_token_ids=list(prompt),
        sampling_params=params or sampling_params(**fields),
        arrival_ns=arrival_ns,
        priority=priority,
        cache_salt=cache_salt,
    )


def make_request(
    request_id: str, prompt: Sequence[int], *, block_size: int | None = 4, **fields: Any
) -> Request:
    """A request as the core keeps it; `block_size` None leaves its blocks without hashes."""
    hasher = None if block_size is None else BlockHasher(block_size)
    return Request(message(request_id, prompt, **fields), hasher)


def prefix_value(token_ids: Iterable[int]) -> int:
    """What the fake cache holds for the last of these tokens."""
    value = 1
    for token_id in token_ids:
        value = zlib.crc32(token_id.to_bytes(4, "little"), value)
    return value


def next_token(token_ids: Sequence[int], params: SamplingParams, num_output_tokens: int) -> int:
    """The token that the fake model selects behind these."""
    token_id = prefix_value(token_ids) % VOCAB_SIZE
    if num_output_tokens < params.min_tokens and token_id in params.all_stop_token_ids:
        return VOCAB_SIZE - 1
    return token_id


def reference_output(
    prompt: Sequence[int], params: SamplingParams, max_model_len: int
) -> tuple[list[int], str]:
    """Output tokens and finish reason of a request that is served alone, in one piece."""
    output: list[int] = []
    while True:
        tokens = [*prompt, *output]
        output.append(next_token(tokens, params, len(output)))
        if output[-1] in params.all_stop_token_ids and len(output) >= params.min_tokens:
            return output, "stop"
        limit = params.max_tokens
        if len(tokens) + 1 >= max_model_len or (limit is not None and len(output) >= limit):
            return output, "length"


class _WorkerRequest:
    """What the worker knows of one request."""

    def __init__(self, data: NewRequestData) -> None:
        self.params = data.sampling_params
        self.num_prompt_tokens = len(data.prompt_token_ids)
        self.token_ids = [*data.prompt_token_ids, *data.output_token_ids]
        self.block_ids = list(data.block_ids)
        self.num_computed_tokens = data.num_computed_tokens


class FakeWorker:
    """Runs plans as the model runner does: all rows write their slots, then each reads its own."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.requests: dict[str, _WorkerRequest] = {}
        self.num_steps = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; AssertionError where the plan does not fit what the worker knows."""
        self.num_steps += 1
        assert plan.step == self.num_steps, "steps must run in order"
        for request_id in plan.finished_req_ids:
            self.requests.pop(request_id, None)
        for data in plan.scheduled_cached_reqs:
            known = self.requests[data.req_id]
            known.block_ids += data.new_block_ids
            known.num_computed_tokens = data.num_computed_tokens
        for new in plan.scheduled_new_reqs:
            assert new.req_id not in self.requests, "a known request sent as a new one"
            self.requests[new.req_id] = _WorkerRequest(new)
        planned = [d.req_id for d in plan.scheduled_cached_reqs]
        planned += [d.req_id for d in plan.scheduled_new_reqs]
        assert sorted(planned) == sorted(plan.num_scheduled_tokens)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._write(self.requests[request_id], num_tokens)
        sampled = [self._sample(self.requests[r], n) for r, n in plan.num_scheduled_tokens.items()]
        record = WorkerStepRecord(step=plan.step, begin_ns=1, end_ns=2)
        return ModelRunnerOutput(list(plan.num_scheduled_tokens), sampled, record=record)

    def _slot(self, request: _WorkerRequest, position: int) -> int:
        return (
            request.block_ids[position // self.block_size] * self.block_size
            + position % self.block_size
        )

    def _write(self, request: _WorkerRequest, num_tokens: int) -> None:
        begin = request.num_computed_tokens
        assert num_tokens > 0
        assert begin + num_tokens <= len(request.token_ids), "computing a token nobody knows"
        value = prefix_value(request.token_ids[:begin])
        for position in range(begin, begin + num_tokens):
            value = zlib.crc32(request.token_ids[position].to_bytes(4, "little"), value)
            self.slots[self._slot(request, position)] = value

    def _sample(self, request: _WorkerRequest, num_tokens: int) -> list[int]:
        end = request.num_computed_tokens + num_tokens
        value = 1
        for position, token_id in enumerate(request.token_ids[:end]):
            value = zlib.crc32(token_id.to_bytes(4, "little"), value)
            held = self.slots[self._slot(request, position)]
            assert held == value, f"the slot of position {position} holds another prefix"
        if end < len(request.token_ids):
            return []
        num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
        token_id = next_token(request.token_ids, request.params, num_output_tokens)
        request.token_ids.append(token_id)
        return [token_id]


class _Deferred(Future[ModelRunnerOutput]):
    """A result that is computed when it is asked for, after those handed over before it."""

    def __init__(self, run: Callable[[], ModelRunnerOutput]) -> None:
        super().__init__()
        self._run = run

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            self.set_result(self._run())
        return super().result(timeout)


class FakeExecutor(Executor):
    """A `FakeWorker` as an executor; `lazy` runs each step only when its result is awaited."""

    num_blocks_available = 64
    lazy = False

    def __init__(self, config: EngineConfig, *, obs: Instrument) -> None:
        self.config = config
        self.calls: list[str] = ["init"]
        self.worker: FakeWorker | None = None
        self.plans: list[SchedulerOutput] = []
        self.grammar_outputs: list[GrammarOutput | None] = []

    @property
    def facts(self) -> dict[str, str]:
        return {"dtype": "float32", "device": "cpu", "attention_backend": "fake"}

    @property
    def model_config(self) -> ModelConfig:
        model = self.config.model
        return read_model_config(resolve_model(model.model, model.revision, model.download_dir))

    @property
    def memory_bytes(self) -> dict[str, int]:
        return {"weights": 1, "kv_cache": 2, "graphs": 0, "activations": 3, "other": 4}

    def load_model(self) -> None:
        self.calls.append("load_model")

    def get_kv_cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec(self.config.cache.block_size, 1, (1,), (8,), 4)

    def determine_available_memory(self, *, max_model_len: int, max_num_batched_tokens: int) -> int:
        self.calls.append("determine_available_memory")
        return self.num_blocks_available * self.get_kv_cache_spec().block_bytes

    def initialize_cache(self, num_blocks: int) -> None:
        self.calls.append("initialize_cache")
        self.worker = FakeWorker(num_blocks, self.config.cache.block_size)

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.plans.append(plan)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        self.grammar_outputs.append(grammar_output)
        plan, worker = self.plans[-1], self.worker
        assert worker is not None
        deferred = _Deferred(lambda: worker.execute(plan))
        if not self.lazy:
            deferred.result()
        return deferred

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        return []

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class LazyFakeExecutor(FakeExecutor):
    """A `FakeExecutor` that is as late as it may be."""

    lazy = True


def make_scheduler(
    *,
    num_blocks: int = 1000,
    block_size: int = 4,
    enable_caching: bool = True,
    obs: Instrument | None = None,
    **limits: Any,
) -> Scheduler:
    """A scheduler over a fresh pool; `limits` are fields of `SchedulerLimits`."""
    defaults = {"max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    extra = {} if obs is None else {"obs": obs}
    return Scheduler(
        SchedulerLimits(**(defaults | limits)),
        KVCacheManager(num_blocks, block_size, enable_caching=enable_caching),
        clock=FakeClock(tick_ns=1),
        **extra,
    )


def run_step(scheduler: Scheduler, worker: FakeWorker) -> tuple[SchedulerOutput, Any, Any] | None:
    """One synchronous step; returns plan, record and outputs, or None if there was none."""
    planned = scheduler.schedule()
    if planned is None:
        return None
    plan, record = planned
    outputs = scheduler.update_from_output(plan, worker.execute(plan), record)
    scheduler.check_integrity()
    return plan, record, outputs


def write_model_folder(folder: Path, **changes: Any) -> Path:
    """A folder with the config.json of a small model, and no weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "eos_token_id": EOS,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


class FakeRequests:
    """The frontend's requests, as far as anybody asks for them."""

    def __init__(self) -> None:
        self.unfinished: dict[int, RequestTimeline] = {}

    def timelines_since(self, request_num: int) -> list[RequestTimeline]:
        return [one for num, one in self.unfinished.items() if num > request_num]

    def progress(self) -> list[tuple[int, int]]:
        return [(num, one.num_generation_tokens) for num, one in self.unfinished.items()]

    def names_by_num(self) -> dict[int, str]:
        return {num: one.request_id for num, one in self.unfinished.items()}
