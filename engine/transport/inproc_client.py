"""The core in the caller's own process: for debugging, and for many very short calls."""

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import EngineDeadError
from engine.executor.uniproc import UniprocExecutor
from engine.transport.client import EngineCoreClient
from engine.types.messages import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
)
from instrumentation import Role
from instrumentation.setup import setup


class InprocClient(EngineCoreClient):
    """Steps the core from `get_output`. An exception of a step ends the engine, as it would end
    the process."""

    def __init__(self, config: EngineConfig, *, run_dir: str | None) -> None:
        # The core keeps a journal of its own, as it does in a process of its own.
        obs = setup(config.observability, role=Role.CORE, run_dir=run_dir)
        try:
            self._core = EngineCore(config, UniprocExecutor, obs=obs)
        except BaseException:
            obs.close()
            raise
        self._ready: deque[EngineCoreOutputs] = deque()
        self._death: EngineDeadError | None = None

    @property
    def core_pid(self) -> int:
        return os.getpid()

    def wait_ready(self) -> EngineCoreReadyResponse:
        return self._core.ready_response()

    def add_request(self, request: EngineCoreRequest) -> None:
        self._ensure_alive()
        self._core.add_request(self._core.prepare_request(request))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._ensure_alive()
        packages = self._core.abort_requests(request_ids)
        if packages and not self._core.has_work():
            for client, idle in self._core.idle_outputs().items():
                packages[client].idle_cached_blocks = idle.idle_cached_blocks
                packages[client].grammars = idle.grammars
        self._ready.extend(packages.values())

    def get_output(self) -> EngineCoreOutputs:
        self._ensure_alive()
        while not self._ready:
            try:
                self._ready.extend(self._core.step().values())
            except Exception as error:
                path = self._core.record_failure(error)
                where = f" Its last steps: isinglass flight show {path}" if path else ""
                self._death = EngineDeadError(f"a step failed: {error!r}.{where}")
                raise self._death from error
        return self._ready.popleft()

    def call_utility(self, method: str, *args: Any) -> Any:
        self._ensure_alive()
        return self._core.call_utility(method, list(args))

    def shutdown(self) -> None:
        self._death = self._death or EngineDeadError("the engine has been shut down")
        self._core.shutdown()

    def _ensure_alive(self) -> None:
        if self._death is not None:
            raise self._death
