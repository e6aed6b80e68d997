"""How the frontend reaches an engine core: the contract, and the core in the same process.

Knows messages; knows no text and no scheduler.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from engine.config import EngineConfig
from engine.transport.interrupts import deferred_interrupts
from engine.types.attachment import CoreAttachment
from engine.types.messages import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
)
from instrumentation import Instrument


class EngineCoreClient(ABC):
    """Adds requests to a core and takes outputs from it."""

    uninterrupted: Callable[[], AbstractContextManager[None]] = staticmethod(deferred_interrupts)
    """Makes the block in which a message is sent or taken in, which Ctrl-C must not leave."""

    @staticmethod
    def make_client(
        config: EngineConfig,
        *,
        run_dir: str | None,
        obs: Instrument,
        on_death: Callable[[], None] | None = None,
    ) -> "EngineCoreClient":
        """The blocking client for the configuration; the core starts to boot, `wait_ready` is next.

        `on_death` is called once, from another thread, when the core's process ends unasked.
        """
        # Imported here: the in-process client brings the whole engine, torch included.
        if config.process.enable_multiprocessing:
            from engine.transport.core_process import CoreProcess
            from engine.transport.mp_client import SyncMPClient

            return SyncMPClient(
                lambda: CoreProcess(config, run_dir=run_dir, obs=obs, on_death=on_death),
                timeout_s=config.process.engine_ready_timeout_s,
            )
        from engine.transport.inproc_client import InprocClient

        return InprocClient(config, run_dir=run_dir)

    @staticmethod
    def make_async_mp_client(
        config: EngineConfig,
        *,
        run_dir: str | None,
        obs: Instrument,
        on_death: Callable[[], None] | None = None,
    ) -> "EngineCoreClient":
        """The client for an event loop; otherwise as `make_client`."""
        from engine.transport.async_mp_client import AsyncMPClient
        from engine.transport.core_process import CoreProcess

        return AsyncMPClient(
            lambda: CoreProcess(config, run_dir=run_dir, obs=obs, on_death=on_death),
            timeout_s=config.process.engine_ready_timeout_s,
        )

    @staticmethod
    def attach_client(
        attachment: CoreAttachment,
        config: EngineConfig,
        *,
        run_dir: str | None,
        obs: Instrument,
        on_death: Callable[[], None] | None = None,
    ) -> "EngineCoreClient":
        """The client, for an event loop, of a core that another process owns."""
        from engine.transport.async_mp_client import AsyncMPClient
        from engine.transport.attached_core import AttachedCore

        return AsyncMPClient(
            lambda: AttachedCore(attachment, obs=obs, on_death=on_death),
            timeout_s=config.process.engine_ready_timeout_s,
        )

    @property
    @abstractmethod
    def core_pid(self) -> int:
        """Process id of the core."""

    @abstractmethod
    def wait_ready(self) -> EngineCoreReadyResponse:
        """Wait until the core is up.

        Raises:
            EngineStartError: it did not come up in time, died, or speaks another version.
            IsinglassError: what stopped it, under its own name (ModelError, ConfigError, ...).
        """

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the core."""

    @abstractmethod
    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests; each answers with one last output that says abort."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """Wait for the next outputs. Only call it while requests are unfinished.

        Raises:
            EngineDeadError: the core has died.
        """

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Call one of the core's utility methods and wait for its result."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the core and leave nothing behind; harmless when called twice."""
