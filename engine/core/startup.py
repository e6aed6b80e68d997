"""How a core comes up: plugins, model, KV cache, warm-up, scheduler; each phase timed.

Knows the order and what each part needs of the ones before it. Knows no step.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from engine.config import EngineConfig
from engine.core.block_hash import BlockHasher
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.kv_cache_sizing import KVCacheSize, size_kv_cache
from engine.core.plugins import load_plugins
from engine.core.request import Request
from engine.core.scheduler import Scheduler, SchedulerLimits
from engine.executor.base import Executor
from engine.log import get_logger
from engine.resolve import Limits, resolve_limits
from engine.structured.manager import StructuredOutputManager
from instrumentation import Event, Instrument, StartupPhase

logger = get_logger(__name__)


class StartupTimes:
    """When each phase of start-up began and how long it took, by its label.

    Args:
        before_ns: begin and end of phases that were over before this object could time them.
    """

    def __init__(
        self, obs: Instrument, before_ns: Mapping[StartupPhase, tuple[int, int]] | None = None
    ) -> None:
        self._obs = obs
        self.durations_ns: dict[str, int] = {}
        self.begins_ns: dict[str, int] = {}
        for phase, (began_ns, ended_ns) in (before_ns or {}).items():
            self._keep(phase, began_ns, ended_ns)

    @contextmanager
    def phase(self, phase: StartupPhase) -> Iterator[None]:
        """Time one phase and report it."""
        began_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._keep(phase, began_ns, time.monotonic_ns())

    def _keep(self, phase: StartupPhase, began_ns: int, ended_ns: int) -> None:
        self.durations_ns[phase.label] = ended_ns - began_ns
        self.begins_ns[phase.label] = began_ns
        self._obs.startup(phase, began_ns, ended_ns)
        logger.debug("%s took %.3f s", phase.label, (ended_ns - began_ns) / 1e9)


class CoreParts(NamedTuple):
    """What a core is made of."""

    executor: Executor
    size: KVCacheSize
    scheduler: Scheduler
    block_hasher: BlockHasher | None
    """None without prefix caching."""
    structured_outputs: StructuredOutputManager[Request]


def bring_up(
    config: EngineConfig,
    executor_class: type[Executor],
    *,
    obs: Instrument,
    times: StartupTimes,
) -> CoreParts:
    """Load the model, find room for its KV cache, and make all parts of a core; or leave nothing.

    Raises:
        IsinglassError: the model, the settings or the memory are no good.
    """
    began_ns = time.monotonic_ns()
    with times.phase(StartupPhase.LOAD_PLUGINS):
        load_plugins()
    with ExitStack() as undo:  # in a process that lives on, what has been made would stay
        with times.phase(StartupPhase.LOAD_MODEL):
            executor = executor_class(config, obs=obs)
            undo.callback(executor.shutdown)
            executor.load_model()
        limits = resolve_limits(config, executor.model_config)
        size = _initialize_kv_cache(config, executor, limits, times)
        if size.max_model_len < limits.max_model_len:
            obs.event(Event.KV_REDUCED_MAX_MODEL_LEN, value=size.max_model_len)
        with times.phase(StartupPhase.WARMUP):
            executor.warm_up()
        with times.phase(StartupPhase.BUILD_SCHEDULER):
            parts = CoreParts(
                executor=executor,
                size=size,
                scheduler=_build_scheduler(config, limits, size, obs),
                block_hasher=(
                    BlockHasher(config.cache.block_size)
                    if config.cache.enable_prefix_caching
                    else None
                ),
                structured_outputs=StructuredOutputManager.create(
                    config, executor.model_config, obs=obs
                ),
            )
        undo.pop_all()
    logger.info(
        "init engine (profile, create kv cache, warm-up) took %.2f s",
        (time.monotonic_ns() - began_ns) / 1e9,
    )
    return parts


def _initialize_kv_cache(
    config: EngineConfig, executor: Executor, limits: Limits, times: StartupTimes
) -> KVCacheSize:
    with times.phase(StartupPhase.PROFILE):
        available = executor.determine_available_memory(
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
    with times.phase(StartupPhase.ALLOCATE_KV_CACHE):
        size = size_kv_cache(
            executor.get_kv_cache_spec(),
            available_bytes=available,
            num_blocks_override=config.cache.num_gpu_blocks_override,
            max_model_len=limits.max_model_len,
        )
        executor.initialize_cache(size.num_blocks)
    return size


def _build_scheduler(
    config: EngineConfig, limits: Limits, size: KVCacheSize, obs: Instrument
) -> Scheduler:
    cache, scheduler = config.cache, config.scheduler
    return Scheduler(
        SchedulerLimits(
            max_model_len=size.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            enable_chunked_prefill=scheduler.enable_chunked_prefill,
            long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
            scheduling_policy=scheduler.scheduling_policy,
        ),
        KVCacheManager(
            size.num_blocks, cache.block_size, enable_caching=cache.enable_prefix_caching
        ),
        clock=time.monotonic_ns,
        obs=obs,
    )
