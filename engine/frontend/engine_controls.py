"""What can be asked of an engine that is running: recordings, profiles, flight records, requests.

Knows which process does what. Does not know when a call may be made: the caller's thread makes
them one by one, between steps.
"""

import contextlib
import os
import tempfile
from typing import Any

import msgspec

from engine.errors import ConfigError, IsinglassError, RequestError
from engine.frontend.observer import EngineObserver
from engine.frontend.output_processor import OutputProcessor
from engine.transport.client import EngineCoreClient
from instrumentation import (
    NULL,
    Instrument,
    ObservabilityConfig,
    ProfileStatus,
    RequestTimeline,
    StepHistory,
)

_MAX_LIMIT = 1 << 50


class EngineControls:
    """Calls to the core and to this process's own instrument, as one.

    Attributes:
        early_end: which parts of the recording that was stopped last had ended before that, and
            why; empty for none.
    """

    def __init__(
        self,
        engine_core: EngineCoreClient,
        output_processor: OutputProcessor,
        *,
        obs: Instrument,
        observer: EngineObserver | None,
        settings: ObservabilityConfig,
    ) -> None:
        self._call = engine_core.call_utility
        self._output_processor = output_processor
        self._obs = obs
        self._observer = observer
        self._settings = settings
        self.early_end = ""

    def start_profile(
        self,
        *,
        folder: str | None = None,
        max_steps: int | None = None,
        max_bytes: int | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
    ) -> list[ProfileStatus]:
        """Profile with torch from the next step on, in every worker; returns their status, by rank.

        Args:
            folder: where the profiles go, unless `profiler_dir` is set; a new folder below the
                temporary folder if None.
            max_steps: steps after which the profile ends by itself; `profiler_max_steps` if None.
            max_bytes: size at which it ends by itself; `profiler_max_bytes` if None.
            with_stack: record Python's calls too, which slows steps down.
            record_shapes: record the operators' shapes too.

        Raises:
            ConfigError: a limit is not positive.
            ProfilerError: a profile is running, or the folder cannot be written to.
            EngineDeadError: the core has died.
        """
        settings = self._settings
        max_steps = settings.profiler_max_steps if max_steps is None else max_steps
        max_bytes = settings.profiler_max_bytes if max_bytes is None else max_bytes
        for name, limit in (("max_steps", max_steps), ("max_bytes", max_bytes)):
            is_whole = isinstance(limit, int) and not isinstance(limit, bool)
            if not is_whole or not 1 <= limit <= _MAX_LIMIT:
                raise ConfigError(
                    f"{name} of a profile must be a whole number from 1 to {_MAX_LIMIT}, "
                    f"got {limit!r}"
                )
        chosen = settings.profiler_dir or folder or tempfile.mkdtemp(prefix="isinglass-profile-")
        options = {
            # The core may work in another folder.
            "folder": os.path.abspath(os.path.expanduser(chosen)),
            "max_steps": int(max_steps),
            "max_bytes": int(max_bytes),
            "with_stack": bool(with_stack),
            "record_shapes": bool(record_shapes),
        }
        try:
            return self._profile_utility("start_profile", options)
        except BaseException:
            if not (settings.profiler_dir or folder):
                with contextlib.suppress(OSError):  # not empty: a part of a profile is there
                    os.rmdir(chosen)
            raise

    def stop_profile(self) -> list[ProfileStatus]:
        """End the profiles at once; their files are written while steps go on.

        Raises:
            ProfilerError: none is running.
            EngineDeadError: the core has died.
        """
        return self._profile_utility("stop_profile")

    def profile_status(self) -> list[ProfileStatus]:
        """How far each worker's last profile is, by rank.

        Raises:
            EngineDeadError: the core has died.
        """
        return self._profile_utility("profile_status")

    def _profile_utility(self, method: str, *args: Any) -> list[ProfileStatus]:
        answers = self._call(method, *args)
        return msgspec.convert(answers, list[ProfileStatus])

    def start_recording(self, run_dir: str) -> None:
        """Begin journals of this process and of the core in a folder.

        Raises:
            ConfigError: the folder cannot be written to.
            IsinglassError: one is being written already, or everything is off.
            EngineDeadError: the core has died.
        """
        if self._obs is NULL:
            raise IsinglassError(
                "nothing can be recorded: everything is off (disable_log_stats with "
                "flight_recorder_steps=0)"
            )
        try:
            if self._call("start_recording", run_dir):
                if self._obs.start_recording(run_dir):
                    return
                self._call("stop_recording")
        except OSError as error:
            self._call("stop_recording")
            raise ConfigError(f"cannot write a recording to {run_dir!r}: {error}") from error
        raise IsinglassError(
            "a recording is being written already; end it with stop_trace before another begins"
        )

    def stop_recording(self) -> bool:
        """End the journals; False if none was being written, and none had ended by itself before.

        `early_end` says which had, and why.
        """
        self.early_end = ""
        was_recording = self._obs.stop_recording()
        has_core_recorded, why = self._call("stop_recording")
        parts = {"the engine core's": why, "this process's": self._obs.early_end}
        self.early_end = "; ".join(
            f"{whose} part ended early: {why}" for whose, why in parts.items() if why
        )
        return has_core_recorded or was_recording or bool(self.early_end)

    def dump_flight_record(self) -> str:
        """Have the core write its last steps to a file; returns the path.

        Raises:
            IsinglassError: there is no flight recorder, or its file cannot be written.
            EngineDeadError: the core has died; the message names the record of its end.
        """
        path = self._call("dump_flight_record", "asked for by the caller")
        if path is None:
            raise IsinglassError(
                "there is no flight record: flight_recorder_steps is 0, or the file cannot be "
                "written (the log says why); see flight_dir"
            )
        return path

    def find_request(self, request_id: str) -> tuple[RequestTimeline, StepHistory, dict[int, str]]:
        """What a report of a request is made from, which any thread may do.

        Raises:
            RequestError: the id is no string.
            IsinglassError: no such request is known, it has several sequences, or there are no
                statistics.
        """
        if not isinstance(request_id, str):
            raise RequestError(
                f"request_id must be a string, as RequestOutput.request_id is; got {request_id!r}"
            )
        if self._observer is None:
            raise IsinglassError(
                "there are no time lines of requests: disable_log_stats=True. Leave it out."
            )
        history = self._observer.history
        found = self._output_processor.unfinished_timelines(request_id)
        finished = history.finished(request_id)
        if not found and finished is not None:
            found = [finished]
        parts = [one for one in history.finished_requests() if one.parent_id == request_id]
        if len(found) == 1 and not parts and found[0].request_id == request_id:
            return found[0], history, self._output_processor.names_by_num()
        if not found and not parts:
            raise IsinglassError(
                f"no request {request_id!r} is known: neither an unfinished one nor one of the "
                "last thousand that have ended"
            )
        ids = ", ".join(sorted(one.request_id for one in (*found, *parts)))
        raise IsinglassError(
            f"request {request_id!r} has several sequences; ask for one of them: {ids}"
        )
