"""One worker in this process, on a thread of its own.

One thread makes every call to the worker: OpenMP keeps a pool of threads per calling thread, so
a second caller would double them; and steps run in the order in which they are handed over.
"""

from concurrent.futures import Future, ThreadPoolExecutor

from engine.config import EngineConfig
from engine.executor.base import Executor
from engine.types.kv_cache import KVCacheSpec
from engine.types.plan import ModelRunnerOutput, SchedulerOutput
from engine.worker.worker import Worker
from instrumentation import Instrument, ThreadName


class UniprocExecutor(Executor):
    """Executor of a single rank."""

    def __init__(self, config: EngineConfig, *, obs: Instrument) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._worker: Worker = self._thread.submit(
            lambda: Worker(config, obs=obs.for_thread(ThreadName.WORKER))
        ).result()
        self._launched: Future[None] | None = None

    @property
    def facts(self) -> dict[str, str]:
        worker = self._worker
        return {
            "dtype": str(worker.dtype).removeprefix("torch."),
            "device": str(worker.device),
            "attention_backend": worker.attention.name,
        }

    def load_model(self) -> None:
        self._thread.submit(self._worker.load_model).result()

    def get_kv_cache_spec(self) -> KVCacheSpec:
        return self._worker.get_kv_cache_spec()

    def determine_available_memory(self, *, max_model_len: int, max_num_batched_tokens: int) -> int:
        def build_and_measure() -> int:
            self._worker.build_runner(
                max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens
            )
            return self._worker.determine_available_memory()

        return self._thread.submit(build_and_measure).result()

    def initialize_cache(self, num_blocks: int) -> None:
        self._thread.submit(self._worker.initialize_cache, num_blocks).result()

    def warm_up(self) -> None:
        self._thread.submit(self._worker.warm_up).result()

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._launched = self._thread.submit(self._worker.execute_model, plan)

    def sample_tokens(self) -> Future[ModelRunnerOutput]:
        launched, self._launched = self._launched, None
        assert launched is not None, "sample_tokens() without execute_model()"

        def sample() -> ModelRunnerOutput:
            launched.result()  # raises what the forward pass raised
            return self._worker.sample_tokens()

        return self._thread.submit(sample)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
