"""The command itself: runs a load with a progress bar, and leaves tables, files and JSON.

Knows terminal, files and signals. Does not know flags, nor what the figures mean.
"""

import asyncio
import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from engine.bench.measure import Objective, measure
from engine.bench.plot import draw
from engine.bench.prompts import PromptSource
from engine.bench.records import LoadRun
from engine.bench.report import print_report
from engine.bench.runner import run_load
from engine.bench.settings import LoadSettings
from engine.errors import ConfigError, IsinglassError

_MIN_WIDTH = 100


class ReportNotWrittenError(IsinglassError, OSError):
    """A file of the report could not be written; the report itself has been printed."""


def run(
    settings: LoadSettings,
    prompts: PromptSource,
    *,
    metrics: Sequence[str],
    percents: Sequence[float],
    objective: Objective | None,
    save: Path | None,
    save_detailed: bool,
    plot: Path | None,
    show_progress: bool,
) -> int:
    """Send the load, print the report and, as the last line, the JSON document.

    Ctrl-C once ends the load and reports what there is, twice ends at once. Returns the exit code.

    Raises:
        ConfigError: standard output is closed.
        ReportNotWrittenError: after the report, a file could not be written.
    """
    if sys.stdout is None:
        raise ConfigError("standard output is closed; there is nowhere to report to")
    _allow_many_connections()
    result = run_in_loop(settings, prompts, show_progress=show_progress and sys.stderr.isatty())
    document = measure(result, percents=percents, objective=objective)
    files: dict[Path, str] = {}
    if plot is not None:
        files[plot] = draw(result, document)
    if save is not None:
        files[save] = _saved(result, document, detailed=save_detailed)
    # Files first: whoever reads standard output may leave early.
    unwritten = _write(files)
    console = Console(width=None if sys.stdout.isatty() else _MIN_WIDTH)
    try:
        with console.capture() as report:  # by itself it would exit where the reader has left
            print_report(
                console,
                result,
                document,
                metrics=metrics,
                percents=percents,
                arrival=settings.arrival(),
            )
        print(f"{report.get()}{json.dumps(document)}", flush=True)
    finally:
        if unwritten:
            raise ReportNotWrittenError("; ".join(unwritten))
    if result.interrupted:
        return 130
    return 0 if document["completed"] else 1


def _saved(run: LoadRun, document: Mapping[str, object], *, detailed: bool) -> str:
    whole = dict(document)
    if detailed:
        whole["start_ns"] = run.start_ns
        whole["requests"] = [asdict(record) for record in run.records]
    return json.dumps(whole) + "\n"


def _write(files: Mapping[Path, str]) -> list[str]:
    """Write each file; returns which could not be written, and why."""
    unwritten = []
    for path, text in files.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            unwritten.append(f"cannot write {path}: {error.strerror or error}")
    return unwritten


def run_in_loop(
    settings: LoadSettings, prompts: PromptSource, *, show_progress: bool = False
) -> LoadRun:
    """`run_load` in an event loop of its own, on uvloop where that is installed."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run(settings, prompts, show_progress=show_progress))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # no wheel for this platform; the figures say what the client cost
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _run(settings: LoadSettings, prompts: PromptSource, *, show_progress: bool) -> LoadRun:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)  # the second one ends at once

    with tqdm(total=settings.num_prompts, unit=" requests", disable=not show_progress) as bar:

        def progress(num_over: int) -> None:
            bar.update(num_over - bar.n)

        try:
            return await run_load(
                settings,
                prompts,
                stop=stop,
                # Until then Ctrl-C ends the command: there is nothing to report.
                on_ready=lambda: loop.add_signal_handler(signal.SIGINT, interrupt),
                on_progress=progress,
            )
        finally:
            loop.remove_signal_handler(signal.SIGINT)


def _allow_many_connections() -> None:
    """Raise this process's limit on open files as far as it may: each request in flight is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
