"""One worker in this process, on a thread of its own.

One thread makes every call to the worker: OpenMP keeps a pool of threads per calling thread, so
a second caller would double them; and steps run in the order in which they are handed over.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.executor.base import Executor
from engine.log import get_logger
from engine.types.kv_cache import KVCacheSpec
from engine.types.plan import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from engine.worker.worker import Worker
from instrumentation import Instrument, ThreadName, initialize_torch_profiler

logger = get_logger(__name__)

_SHARE_OF_GRACE = 0.8
"""How much of the time to stop in a profile may take to be written."""


class UniprocExecutor(Executor):
    """Executor of a single rank."""

    def __init__(self, config: EngineConfig, *, obs: Instrument) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._worker: Worker = self._thread.submit(
            lambda: Worker(config, obs=obs.for_thread(ThreadName.WORKER))
        ).result()
        self._launched: Future[None] | None = None
        self._grace_s = config.process.engine_shutdown_timeout_s

    @property
    def facts(self) -> dict[str, str]:
        worker = self._worker
        return {
            "dtype": str(worker.dtype).removeprefix("torch."),
            "device": str(worker.device),
            "attention_backend": worker.attention.name,
        }

    @property
    def model_config(self) -> ModelConfig:
        return self._worker.model_config

    @property
    def memory_bytes(self) -> dict[str, int]:
        return self._worker.memory_bytes()

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

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        launched, self._launched = self._launched, None
        assert launched is not None, "sample_tokens() without execute_model()"

        def sample() -> ModelRunnerOutput:
            launched.result()  # raises what the forward pass raised
            return self._worker.sample_tokens(grammar_output)

        return self._thread.submit(sample)

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        return [self._thread.submit(getattr(self._worker, method), *args).result()]

    def start_profile(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        # Part of it belongs to the thread that has imported torch, which is the caller's.
        initialize_torch_profiler()
        return super().start_profile(options)

    def shutdown(self) -> None:
        if self._worker.has_profile:
            self._finish_profile()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _finish_profile(self) -> None:
        """Let a profile be written that is running or being written."""
        timeout_s = self._grace_s * _SHARE_OF_GRACE
        try:
            finished = self._thread.submit(self._worker.finish_profile, timeout_s)
            is_written = finished.result(timeout_s)
        except (TimeoutError, RuntimeError):  # the worker hangs, or was shut down before
            is_written = False
        if not is_written:
            logger.warning("the profile was not written in %.1f s", timeout_s)
