"""Looks at the KV pool block by block for the live view, as often as that costs little.

Knows how the core's answer becomes what the page draws, and when to ask again. Knows no watcher.
"""

import asyncio
from typing import Any

import numpy as np

from engine.api.async_llm import AsyncLLM
from engine.errors import EngineDeadError, IsinglassError
from engine.log import get_logger

logger = get_logger(__name__)

_INTERVAL_S = 0.5
_IDLE_INTERVAL_S = 10.0
_SHARE = 200
"""A map is asked for again after at least this many times what the last one took."""


class BlockWatch:
    """The last block map, and when the next one is due.

    Attributes:
        shown: what has been told last, None before the first.
        has_stepped: whether the engine has done anything since the last map was asked for.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self.shown: dict[str, Any] | None = None
        self.has_stepped = True
        self.due_s = 0.0
        self._engine = engine
        self._new: dict[str, Any] | None = None
        self._call: asyncio.Task[None] | None = None
        self._has_failed = False
        """Whether the log has been told."""

    def ask(self, now_s: float) -> None:
        """Ask the core for a map, if it is time."""
        idle_s = 0.0 if self.has_stepped else _IDLE_INTERVAL_S
        if self._call is None and now_s >= self.due_s + idle_s:
            self.has_stepped = False
            self._call = asyncio.create_task(self._fetch(now_s), name="block map")

    def take(self) -> dict[str, Any] | None:
        """A map that has come since the last call, and is another one than that before."""
        new, self._new = self._new, None
        if new is None or new == self.shown:
            return None
        self.shown = new
        return new

    def forget(self) -> None:
        """Nobody knows the last map any more."""
        self.shown = None

    async def _fetch(self, now_s: float) -> None:
        try:
            answer = await self._engine.kv_block_map()
        except EngineDeadError:
            return  # the next round says so
        except IsinglassError as error:
            if not self._has_failed:
                logger.warning("the live view has no block map: %s", error)
            self._has_failed = True
            self.due_s = now_s + _IDLE_INTERVAL_S
            return
        finally:
            self._call = None
        took_s = answer["took_ns"] / 1e9
        self.due_s = now_s + max(_INTERVAL_S, _SHARE * took_s)
        codes = np.frombuffer(answer["codes"], dtype="<u2")
        self._new = {"runs": _runs(codes), "owners": answer["owners"]}


def _runs(codes: "np.ndarray[Any, np.dtype[np.uint16]]") -> list[int]:
    """Flat pairs: code, how many blocks in a row have it, ..."""
    begins = np.flatnonzero(np.diff(codes, prepend=codes[0] + 1))  # [num_runs]
    lengths = np.diff(begins, append=len(codes))  # [num_runs]
    return np.stack([codes[begins], lengths], axis=1).reshape(-1).tolist()
