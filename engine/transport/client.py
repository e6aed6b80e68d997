"""How the frontend reaches an engine core: the contract.

Knows messages; knows no text and no scheduler.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from engine.transport.interrupts import deferred_interrupts
from engine.types.messages import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
)


class EngineCoreClient(ABC):
    """Adds requests to a core and takes outputs from it."""

    uninterrupted: Callable[[], AbstractContextManager[None]] = staticmethod(deferred_interrupts)
    """Makes the block in which a message is sent or taken in, which Ctrl-C must not leave."""

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
