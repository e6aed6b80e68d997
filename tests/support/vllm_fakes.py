"""The parts of vLLM that its hook attaches to, in small: core, scheduler, pool and worker.

Knows the names and the order of calls of vLLM 0.32. Does not know the hook. Each request takes one
block; which requests are preempted or fail is up to the test.
"""

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass(eq=False)
class FakeRequest:
    """A request as the scheduler holds it."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    arrival_time: float
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    trace_headers: dict[str, str] | None = None
    finished_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def get_finished_reason(self) -> str | None:
        return self.finished_reason


@dataclass(eq=False)
class FakeBlock:
    """A block of the pool."""

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    is_null: bool = False


def _fail_if(is_failing: bool) -> None:
    if is_failing:
        raise RuntimeError("the device is lost")


class FakePool:
    """A pool with vLLM's methods; block 0 is its placeholder."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [FakeBlock(number) for number in range(num_blocks)]
        self.blocks[0].is_null = True
        self.num_gpu_blocks = num_blocks
        self.free = self.blocks[1:]

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[FakeBlock]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block in taken:
            self._maybe_evict_cached_block(block)
            block.ref_cnt += 1
        return taken

    def _maybe_evict_cached_block(self, block: FakeBlock) -> bool:
        was_cached, block.block_hash = block.block_hash is not None, None
        return was_cached

    def touch(self, blocks: list[FakeBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free.append(block)

    def reset_prefix_cache(self) -> bool:
        for block in self.blocks:
            block.block_hash = None
        return True


class FakeQueue(list):
    """The waiting queue."""

    def peek_request(self) -> FakeRequest:
        return self[0]


@dataclass
class FakePlan:
    """What the scheduler answers."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass
class FakeScheduler:
    """First come first served, in chunks; one block a request, with a hash once it is freed."""

    pool: FakePool
    max_num_scheduled_tokens: int = 8
    max_num_running_reqs: int = 4
    requests: dict[str, FakeRequest] = field(default_factory=dict)
    waiting: FakeQueue = field(default_factory=FakeQueue)
    running: list[FakeRequest] = field(default_factory=list)
    blocks: dict[str, list[FakeBlock]] = field(default_factory=dict)
    preempt_next: bool = False
    fails_at: str = ""
    """The method that raises."""

    def __post_init__(self) -> None:
        self.kv_cache_manager = SimpleNamespace(
            block_pool=self.pool,
            get_block_ids=lambda request_id: ([b.block_id for b in self.blocks[request_id]],),
        )

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def add_request(self, request: FakeRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def _preempt_request(self, request: FakeRequest, timestamp: float) -> None:
        self._give_blocks_back(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.insert(0, request)

    def _give_blocks_back(self, request: FakeRequest) -> None:
        blocks = self.blocks.pop(request.request_id)
        for block in blocks:
            block.block_hash = request.request_id.encode()
        self.pool.free_blocks(reversed(blocks))

    def schedule(self, throttle_prefills: bool = False) -> FakePlan:
        _fail_if(self.fails_at == "schedule")
        budget, scheduled, new, resumed = self.max_num_scheduled_tokens, {}, [], {}
        if self.preempt_next and self.running:
            self._preempt_request(self.running.pop(), 0.0)
        for request in self.running:
            num_tokens = min(budget, request.num_tokens - request.num_computed_tokens)
            if num_tokens:
                scheduled[request.request_id] = num_tokens
                budget -= num_tokens
        while (
            self.waiting
            and budget
            and not self.preempt_next
            and len(self.running) < self.max_num_running_reqs
        ):
            request = self.waiting.pop(0)
            num_tokens = min(budget, request.num_tokens)
            if request.num_preemptions:
                resumed[request.request_id] = 0
            else:
                new.append(SimpleNamespace(req_id=request.request_id, num_computed_tokens=0))
            self.blocks[request.request_id] = self.pool.get_new_blocks(1)
            scheduled[request.request_id] = num_tokens
            budget -= num_tokens
            self.running.append(request)
        self.preempt_next = False
        for request_id, num_tokens in scheduled.items():
            self.requests[request_id].num_computed_tokens += num_tokens
        cached = SimpleNamespace(
            req_ids=list(resumed),
            resumed_req_ids=set(resumed),
            num_computed_tokens=[0] * len(resumed),
        )
        return FakePlan(scheduled, new, cached)

    def update_from_output(self, plan: FakePlan, sampled: Any) -> dict[int, Any]:
        _fail_if(self.fails_at == "update_from_output")
        outputs = []
        for request_id in plan.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.num_computed_tokens < request.num_tokens:
                continue
            request.num_output_tokens += 1
            if request.num_output_tokens == request.max_tokens:
                self._end(request, "length")
            outputs.append(
                SimpleNamespace(
                    request_id=request_id,
                    new_token_ids=[7],
                    finish_reason=request.finished_reason,
                    stop_reason=None,
                )
            )
        return {0: SimpleNamespace(outputs=outputs)}

    def _end(self, request: FakeRequest, reason: str) -> None:
        request.finished_reason = reason
        del self.requests[request.request_id]
        if request in self.running:
            self.running.remove(request)
            self._give_blocks_back(request)
        else:
            self.waiting.remove(request)

    def finish_requests(self, request_ids: list[str], status: str) -> list[FakeRequest]:
        found = [self.requests[one] for one in request_ids if one in self.requests]
        for request in found:
            self._end(request, status)
        return found


class FakeModel:
    """The worker's model."""

    def compute_logits(self, hidden: int) -> int:
        return hidden


class FakeRunner:
    """A model runner of the generation called V1."""

    def __init__(self) -> None:
        self.model = FakeModel()

    def get_model(self) -> FakeModel:
        return self.model

    def _update_states(self, plan: FakePlan) -> None: ...

    def _model_forward(self, num_tokens: int) -> int:
        return num_tokens

    def _sample(self, hidden: int) -> int:
        return self.model.compute_logits(hidden)


class FakeWorker:
    """A worker."""

    rank = 0

    def __init__(self) -> None:
        self.model_runner = FakeRunner()
        self.fails_at = ""

    def execute_model(self, plan: FakePlan) -> None:
        _fail_if(self.fails_at == "execute_model")
        self.model_runner._update_states(plan)
        self.hidden = self.model_runner._model_forward(plan.total_num_scheduled_tokens)

    def sample_tokens(self, grammar: None) -> int:
        _fail_if(self.fails_at == "sample_tokens")
        return self.model_runner._sample(self.hidden)


class FakeExecutor:
    """Runs its worker in the same thread."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    def execute_model(self, plan: FakePlan, non_block: bool = False) -> None:
        return self.worker.execute_model(plan)

    def sample_tokens(self, grammar: None, non_block: bool = False) -> int:
        return self.worker.sample_tokens(grammar)


def fake_modules() -> tuple[ModuleType, ModuleType]:
    """New modules under the names of the hook's targets, with classes of their own."""

    class Worker(FakeWorker):
        def execute_model(self, plan: FakePlan) -> None:
            return super().execute_model(plan)

        def sample_tokens(self, grammar: None) -> int:
            return super().sample_tokens(grammar)

    class EngineCore:
        def __init__(self, num_blocks: int = 16, *, overlaps: bool = False) -> None:
            self.vllm_config = SimpleNamespace(
                parallel_config=SimpleNamespace(data_parallel_rank=0)
            )
            self.model_executor = FakeExecutor(Worker())
            self._initialize_kv_caches()
            self.scheduler = FakeScheduler(FakePool(num_blocks))
            self.batch_queue: list[tuple[int, FakePlan]] = []
            self.fails_at_result = False
            self.step_fn = self.step_with_batch_queue if overlaps else self.step

        def _initialize_kv_caches(self) -> None: ...

        def step(self) -> tuple[Any, bool]:
            plan = self.scheduler.schedule()
            self.model_executor.execute_model(plan, non_block=True)
            sampled = self.model_executor.sample_tokens(None)
            return self.scheduler.update_from_output(plan, sampled), True

        def step_with_batch_queue(self) -> tuple[Any, bool]:
            plan = self.scheduler.schedule()
            self.model_executor.execute_model(plan, non_block=True)
            sampled = self.model_executor.sample_tokens(None, non_block=True)
            self.batch_queue.append((sampled, plan))
            if len(self.batch_queue) < 2:
                return None, True
            sampled, plan = self.batch_queue.pop(0)
            _fail_if(self.fails_at_result)  # as a future's result does
            return self.scheduler.update_from_output(plan, sampled), True

        def shutdown(self) -> str:
            return "shut down"

    core_module = ModuleType("vllm.v1.engine.core")
    core_module.EngineCore = EngineCore
    worker_module = ModuleType("vllm.v1.worker.gpu_worker")
    worker_module.Worker = Worker
    return core_module, worker_module
