"""What an `AsyncLLM` lets one see while it runs: metrics, recordings, profiles, blocks, requests.

Knows how the calls of `EngineViews`, which wait, are made off the event loop. Does not know how
requests are served.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from engine.api.engine_host import EngineHost
from engine.api.engine_views import EngineViews
from engine.errors import IsinglassError
from engine.frontend.observer import EngineObserver
from engine.transport.async_mp_client import AsyncMPClient
from instrumentation import Metric, ProfileStatus, RequestReport


class AsyncViews:
    """The part of `AsyncLLM` that looks. Whoever inherits it calls `_begin_views` at the start."""

    _engine_views: EngineViews | None = None

    @property
    def run_dir(self) -> str | None:
        """Folder with this run's journals, None while nothing has been recorded."""
        return None if self._engine_views is None else self._engine_views.run_dir

    @property
    def observer(self) -> EngineObserver | None:
        """What sees every message; None before the start, and with disable_log_stats=True."""
        return None if self._engine_views is None else self._engine_views.observer

    def get_metrics(self) -> list[Metric]:
        """Every metric of the catalogue as it stands.

        Raises:
            IsinglassError: the engine was made with disable_log_stats=True, or has not started.
        """
        return self._views.get_metrics()

    def request_timeline(self, request_id: str) -> RequestReport:
        """See `LLM.request_timeline`."""
        return self._views.request_timeline(request_id)

    async def kv_block_map(self) -> dict[str, Any]:
        """The KV pool block by block: see `engine.core.block_map`.

        Raises:
            EngineDeadError: the core has died.
        """
        return await self._client.call_utility_async("kv_block_map")

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests are running.

        Raises:
            EngineDeadError: the core has died.
        """
        return await self._client.call_utility_async("reset_prefix_cache")

    async def warm_up_structured_outputs(self) -> None:
        """Get ready for the first structured output, in the background.

        Raises:
            EngineDeadError: the core has died.
        """
        await self._client.call_utility_async("warm_up_structured_outputs")

    async def start_trace(self, trace_dir: str | os.PathLike[str] | None = None) -> str:
        """See `LLM.start_trace`."""
        return await asyncio.to_thread(self._views.start_trace, trace_dir)

    async def stop_trace(self) -> str | None:
        """See `LLM.stop_trace`."""
        return await asyncio.to_thread(self._views.stop_trace)

    @property
    def early_end(self) -> str:
        """Which parts of the recording that was stopped last had ended before that, and why."""
        return self._views.llm_engine.controls.early_end

    async def join_recording(self, run_dir: str) -> bool:
        """Record this process's part of what another frontend over the same core has begun to
        record; False if nothing can be recorded here, or something is already.

        Raises:
            OSError: the folder cannot be written to.
        """
        views = self._views
        is_recording = await asyncio.to_thread(views.llm_engine.obs.start_recording, run_dir)
        if is_recording:
            views.run_dir = run_dir
        return is_recording

    async def leave_recording(self) -> bool:
        """End this process's part alone; False if nothing was being recorded."""
        return await asyncio.to_thread(self._views.llm_engine.obs.stop_recording)

    async def start_profile(self, **options: Any) -> list[ProfileStatus]:
        """See `LLM.start_profile`."""
        return await asyncio.to_thread(lambda: self._views.start_profile(**options))

    async def stop_profile(self) -> list[ProfileStatus]:
        """See `LLM.stop_profile`."""
        return await asyncio.to_thread(self._views.stop_profile)

    async def profile_status(self) -> list[ProfileStatus]:
        """See `LLM.profile_status`."""
        return await asyncio.to_thread(self._views.profile_status)

    async def dump_flight_record(self) -> str:
        """See `LLM.dump_flight_record`."""
        return await asyncio.to_thread(self._views.dump_flight_record)

    @property
    def _views(self) -> EngineViews:
        if self._engine_views is None:
            raise IsinglassError("the engine has not started yet: await start() first.")
        return self._engine_views

    @property
    def _client(self) -> AsyncMPClient:
        client = self._views.llm_engine.engine_core
        assert isinstance(client, AsyncMPClient)
        return client

    def _begin_views(self, host: EngineHost) -> None:
        views = EngineViews()
        views.begin(host, between_steps=_AtOnce())
        self._engine_views = views


class _AtOnce:
    """Makes the calls of `EngineViews` in the thread that asks, which waits for the loop."""

    def call(self, function: Callable[[], Any]) -> Any:
        return function()
