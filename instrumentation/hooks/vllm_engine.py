"""The hook `vllm`: vLLM's engine recorded as if it were ours.

Knows which of vLLM's classes are watched, as of vLLM 0.32. Does not know what is recorded. Nothing
in vLLM's files changes, every method does and returns what it did, and what goes wrong in here is
counted and stays in here. A class is patched wherever its module is imported, but records are made
only in the process that runs an engine core or a worker.
"""

from types import ModuleType
from typing import Any

from instrumentation.hooks.fence import Fence, wrap
from instrumentation.hooks.vllm_core import CoreObserver, StartupTimes
from instrumentation.hooks.vllm_worker import observe_workers


def install(module: ModuleType) -> None:
    """Attach to one of the hook's targets.

    Raises:
        AttributeError: this vLLM has not what the hook attaches to.
    """
    fence = Fence("vllm")
    if module.__name__ == "vllm.v1.engine.core":
        _observe_cores(module.EngineCore, fence)
    else:
        observe_workers(module.Worker, fence)


def _observe_cores(engine_core: Any, fence: Fence) -> None:
    times = StartupTimes()

    def observe(begin: None, result: None, core: Any, *args: Any, **kwargs: Any) -> None:
        times.end()
        CoreObserver(core, fence).attach(times)

    def begin(*args: Any, **kwargs: Any) -> None:
        times.begin()

    if not wrap(engine_core, "__init__", fence=fence, before=begin, after=observe):
        raise AttributeError("vLLM's EngineCore has no __init__; the hook knows vLLM 0.32")
    wrap(
        engine_core,
        "_initialize_kv_caches",
        fence=fence,
        before=lambda *args, **kwargs: times.begin_kv_cache(),
        after=lambda *args, **kwargs: times.end_kv_cache(),
    )
