"""Recordings of a server as a whole: the core's part, and that of each frontend over it.

The frontend that is asked begins and ends the core's part and its own; it has the others do the
same in the same run folder, a file each. One that comes up meanwhile joins in. Knows no HTTP.
"""

from collections.abc import Sequence
from typing import Any

from engine.api.async_llm import AsyncLLM
from engine.errors import IsinglassError
from engine.log import get_logger
from engine.server.cluster.peers import PeerAnswers, Peers

logger = get_logger(__name__)

_TIMEOUT_S = 10.0
"""How long the others get: their files are complete when they answer."""


class ServerRecording:
    """Begins and ends recordings of one frontend, and of the others with it.

    Args:
        engine: this frontend's.
        peers: the other frontends, None where there are none.

    Attributes:
        run_dir: folder of the recording under way in this process, None without one.
    """

    def __init__(self, engine: AsyncLLM, peers: Peers | None) -> None:
        self._engine = engine
        self._peers = peers
        self.run_dir = None if engine.attachment is None else engine.attachment.run_dir

    async def start(self) -> dict[str, Any]:
        """Record everything from now on; says where, and of several frontends, which.

        Raises:
            ConfigError: the folder cannot be made.
            IsinglassError: a recording is being written already, or nothing can be recorded.
            EngineDeadError: the core has died.
        """
        self.run_dir = await self._engine.start_trace()
        told: dict[str, Any] = {"run_dir": self.run_dir}
        if self._peers is None:
            return told
        others = await self._peers.ask("join_recording", self.run_dir, timeout_s=_TIMEOUT_S)
        joined = [index for index, is_recording in others.by_index.items() if is_recording]
        return told | self._frontends(joined)

    async def stop(self) -> dict[str, Any] | None:
        """End it; says where it is, None if nothing was being recorded. A `note` says what of it
        had ended before, and why.

        Raises:
            EngineDeadError: the core has died; what was recorded until then is there.
        """
        began_here = self.run_dir
        others = PeerAnswers({}, ())
        try:
            run_dir = await self._engine.stop_trace()
        finally:  # the others write on, whether or not the core can be asked
            self.run_dir = None
            if self._peers is not None:
                others = await self._peers.ask("leave_recording", timeout_s=_TIMEOUT_S)
        early_end = {"note": self._engine.early_end} if self._engine.early_end else {}
        if self._peers is None:
            return None if run_dir is None else {"run_dir": run_dir} | early_end
        parts = {index: one for index, one in others.by_index.items() if one is not None}
        if run_dir is None and not parts:
            return None
        whole = began_here or next(iter(parts.values()), run_dir)
        frontends = self._frontends(list(parts), has_own=began_here is not None)
        return {"run_dir": whole} | early_end | frontends

    def answer_peers(self) -> None:
        """Let the other frontends begin and end this one's part."""
        assert self._peers is not None

        async def recording() -> str | None:
            return self.run_dir

        self._peers.answerers |= {
            "join_recording": self._join,
            "leave_recording": self._leave,
            "recording": recording,
        }

    async def catch_up(self) -> None:
        """Do as the others do, which may have begun, or ended, a recording before we came."""
        if self._peers is None:
            return
        before = self.run_dir
        others = (await self._peers.ask("recording")).by_index.values()
        if not others or self.run_dir != before:  # begun, or ended, since they answered
            return
        theirs = next((run_dir for run_dir in others if run_dir is not None), None)
        if theirs == before:
            return
        if before is not None:
            await self._leave()
        if theirs is not None:
            await self._join(theirs)

    async def _join(self, run_dir: str) -> bool:
        try:
            is_recording = await self._engine.join_recording(run_dir)
        except OSError as error:
            logger.error("nothing is recorded here: %s", error)
            return False
        except IsinglassError:  # it has not started yet, and then catches up
            return False
        if is_recording:
            self.run_dir = run_dir
        return is_recording

    async def _leave(self) -> str | None:
        run_dir, self.run_dir = self.run_dir, None
        try:
            return run_dir if await self._engine.leave_recording() else None
        except IsinglassError:  # it has not started yet, and then catches up
            self.run_dir = run_dir
            return None

    def _frontends(self, others: Sequence[int], *, has_own: bool = True) -> dict[str, Any]:
        """Whose requests the recording has, and whose it lacks."""
        assert self._peers is not None
        everybody = sorted([self._peers.index, *self._peers.others])
        recorded = sorted([*others, *([self._peers.index] if has_own else [])])
        fields: dict[str, Any] = {"recorded": recorded}
        lacking = [index for index in everybody if index not in recorded]
        if lacking:
            names = ", ".join(map(str, lacking))
            fields["note"] = f"lacks the requests of frontend {names}, which did not take part"
        return {"frontends": fields}
