"""Which client reaches the core: in this process, in one of its own, on an event loop.

Clients are imported where they are made: the in-process one brings the whole engine, and torch.
"""

from collections.abc import Callable

from engine.config import EngineConfig
from engine.transport.client import EngineCoreClient
from engine.types.attachment import CoreAttachment
from instrumentation import Instrument


def make_client(
    config: EngineConfig,
    *,
    run_dir: str | None,
    obs: Instrument,
    on_death: Callable[[], None] | None = None,
) -> EngineCoreClient:
    """The blocking client for the configuration; the core starts to boot, `wait_ready` is next.

    `on_death` is called once, from another thread, when the core's process ends unasked.
    """
    if config.process.enable_multiprocessing:
        from engine.transport.core_process import CoreProcess
        from engine.transport.mp_client import SyncMPClient

        return SyncMPClient(
            lambda: CoreProcess(config, run_dir=run_dir, obs=obs, on_death=on_death),
            timeout_s=config.process.engine_ready_timeout_s,
        )
    from engine.transport.inproc_client import InprocClient

    return InprocClient(config, run_dir=run_dir)


def make_async_mp_client(
    config: EngineConfig,
    *,
    run_dir: str | None,
    obs: Instrument,
    on_death: Callable[[], None] | None = None,
) -> EngineCoreClient:
    """The client for an event loop; otherwise as `make_client`."""
    from engine.transport.async_mp_client import AsyncMPClient
    from engine.transport.core_process import CoreProcess

    return AsyncMPClient(
        lambda: CoreProcess(config, run_dir=run_dir, obs=obs, on_death=on_death),
        timeout_s=config.process.engine_ready_timeout_s,
    )


def attach_client(
    attachment: CoreAttachment,
    config: EngineConfig,
    *,
    run_dir: str | None,
    obs: Instrument,
    on_death: Callable[[], None] | None = None,
) -> EngineCoreClient:
    """The client, for an event loop, of a core that another process owns."""
    from engine.transport.async_mp_client import AsyncMPClient
    from engine.transport.attached_core import AttachedCore

    return AsyncMPClient(
        lambda: AttachedCore(attachment, obs=obs, on_death=on_death),
        timeout_s=config.process.engine_ready_timeout_s,
    )
