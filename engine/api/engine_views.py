"""What an engine lets one see while it runs: metrics, recordings, profiles, requests.

Knows how calls from other threads find their place between two steps. Does not know how anything is
recorded.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, Protocol

from engine.api.engine_host import EngineHost
from engine.api.run_dir import make_run_dir
from engine.config import EngineConfig
from engine.errors import ConfigError, IsinglassError
from engine.frontend.llm_engine import LLMEngine
from engine.frontend.observer import EngineObserver
from instrumentation import Metric, ProfileStatus, RequestReport, report_request
from instrumentation.audit import AuditLine, audit


class Caller(Protocol):
    """Makes a call at a moment at which the engine may be asked."""

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the function, and return what it returns."""


class EngineViews:
    """The part of `LLM` that looks, from `begin` on.

    Attributes:
        llm_engine: the engine.
        run_dir: folder with this run's journals, None while nothing has been recorded.
    """

    llm_engine: LLMEngine
    run_dir: str | None
    _host: EngineHost
    _observer: EngineObserver | None
    _between_steps: Caller

    def begin(self, host: EngineHost, *, between_steps: Caller) -> None:
        """Look at a started engine from now on; `between_steps` makes the calls."""
        self._host, self._between_steps = host, between_steps
        self.llm_engine, self.run_dir = host.llm_engine, host.run_dir
        self._observer = host.observer

    @property
    def observer(self) -> EngineObserver | None:
        """What sees every message of the core; None with disable_log_stats=True."""
        return self._observer

    @property
    def config(self) -> EngineConfig:
        """The settings in force."""
        return self.llm_engine.config

    def get_metrics(self) -> list[Metric]:
        """Every metric of the catalogue as it stands.

        Raises:
            IsinglassError: the engine was made with disable_log_stats=True.
        """
        if self._observer is None:
            raise IsinglassError("there are no metrics: disable_log_stats=True. Leave it out.")
        return self._observer.metrics.snapshot()

    @property
    def core_pid(self) -> int:
        """Process id of the engine core, for `kill -USR2`, `nsys` and the like."""
        return self.llm_engine.engine_core.core_pid

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus finds the metrics, None without `metrics_port`."""
        server = self._host.metrics_server
        return None if server is None else server.url

    def observability_audit(self) -> list[AuditLine]:
        """Each option of observability: on, off, or asked for without effect, and why."""
        return audit(self.config.observability, is_tracing=self.llm_engine.tracer.is_on)

    def start_trace(self, trace_dir: str | os.PathLike[str] | None = None) -> str:
        """Begin to record every step and request; returns the new folder of this run.

        Works at any time and any number of times, from other threads too while `generate` runs.

        Args:
            trace_dir: the folder that the run's own folder is made in; the setting `trace_dir` if
                None, else `runs` in the current folder.

        Raises:
            ConfigError: the folder cannot be made.
            IsinglassError: a recording is being written already, or nothing can be recorded.
            EngineDeadError: the core has died.
        """
        if trace_dir is None:
            trace_dir = self.config.observability.trace_dir or "runs"
        elif not isinstance(trace_dir, str | os.PathLike):
            raise ConfigError(f"trace_dir must be a path, got {trace_dir!r}")
        run_dir = make_run_dir(os.fspath(trace_dir))
        try:
            self._between_steps.call(lambda: self.llm_engine.controls.start_recording(run_dir))
        except BaseException:
            with contextlib.suppress(OSError):  # not empty: the journal says what happened
                os.rmdir(run_dir)
            raise
        self.run_dir = run_dir
        return run_dir

    def stop_trace(self) -> str | None:
        """End the recording; returns the folder of the run, None if nothing was being recorded.

        One that had ended by itself, at trace_max_bytes or on a full disk, is returned once too.

        Raises:
            EngineDeadError: the core has died; what was recorded until then is there.
        """
        was_recording = self._between_steps.call(self.llm_engine.controls.stop_recording)
        return self.run_dir if was_recording else None

    def start_profile(
        self,
        *,
        max_steps: int | None = None,
        max_bytes: int | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
    ) -> list[ProfileStatus]:
        """Profile with torch from the next step on, in every worker; returns their status, by rank.

        Works at any time, from other threads too while `generate` runs. The files are Chrome
        traces; in a run's folder, `isinglass trace convert` draws them below the steps.

        Args:
            max_steps: steps after which the profile ends by itself; `profiler_max_steps` if None.
            max_bytes: size at which it ends by itself; `profiler_max_bytes` if None.
            with_stack: record Python's calls too, which slows steps down.
            record_shapes: record the operators' shapes too.

        Raises:
            ConfigError: a limit is not positive.
            ProfilerError: a profile is running, or the folder cannot be written to.
            EngineDeadError: the core has died.
        """
        return self._between_steps.call(
            lambda: self.llm_engine.controls.start_profile(
                folder=self.run_dir,
                max_steps=max_steps,
                max_bytes=max_bytes,
                with_stack=with_stack,
                record_shapes=record_shapes,
            )
        )

    def stop_profile(self) -> list[ProfileStatus]:
        """End the profiles at once; their files are written while steps go on.

        Raises:
            ProfilerError: none is running.
            EngineDeadError: the core has died.
        """
        return self._between_steps.call(self.llm_engine.controls.stop_profile)

    def profile_status(self) -> list[ProfileStatus]:
        """How far each worker's last profile is, by rank: idle, running, exporting, done, failed.

        Raises:
            EngineDeadError: the core has died.
        """
        return self._between_steps.call(self.llm_engine.controls.profile_status)

    def dump_flight_record(self) -> str:
        """Have the core write its last steps to a file; returns the file's path.

        `isinglass flight show FILE` shows it, and every `isinglass trace` command reads it.

        Raises:
            IsinglassError: there is no flight recorder, or its file cannot be written.
            EngineDeadError: the core has died; the message names the record of its end.
        """
        return self._between_steps.call(self.llm_engine.controls.dump_flight_record)

    def request_timeline(self, request_id: str) -> RequestReport:
        """What became of a request and why, as far as it has got; `print` shows it as a table.

        Args:
            request_id: as in `RequestOutput.request_id`; with n > 1 followed by `/` and the index.
                The last thousand finished requests are remembered.

        Raises:
            IsinglassError: no such request is known, or the engine was made with
                disable_log_stats=True.
        """
        # The engine is kept only for as long as it takes to look the request up.
        return report_request(
            *self._between_steps.call(lambda: self.llm_engine.controls.find_request(request_id))
        )
