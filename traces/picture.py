"""A window of a run as one picture: threads, steps, a few requests and counters over time.

Knows what is drawn where, and in which colour. Does not know markup (`svg`). For reading a run in
full there is the Perfetto file; this is for pages of text.
"""

import os
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path

from instrumentation.labels import format_step_label, step_kind
from instrumentation.names import ThreadName
from instrumentation.record.request_records import RequestTimeline
from instrumentation.record.step_records import StepRecord
from traces.beginning import cut_at_beginning
from traces.journal_reader import Run, read_run
from traces.lanes import Slice
from traces.picture_texts import duration_text, fitting, step_texts
from traces.picture_window import CALLOUTS, LEFT, RIGHT, Window, pick, pick_called_out, ticks
from traces.request_slices import DECODE, DELIVERY, PREEMPTED, PREFILL, QUEUED, request_slices
from traces.requests import request_timelines
from traces.svg import Svg, text_width

WIDTH = 1000
_NAMES_X = LEFT - 10
_MIN_SLICE = 0.8
_GREY, _LIGHT_GREY = "#6b7280", "#eef0f4"
_PALE = "#e3e6ec"
_KIND_COLOURS = {"context": "#f0b23e", "mixed": "#e5803c", "generation": "#5b95d1"}
_REQUEST_COLOURS = {
    QUEUED: "#c3c8d2",
    PREFILL: _KIND_COLOURS["context"],
    DECODE: _KIND_COLOURS["generation"],
    PREEMPTED: "#d6554f",
    DELIVERY: "#7fbf9b",
}
_PHASE_COLOURS = {
    "receive": _PALE,
    "process_inputs": "#8a6cc0",
    "send": "#4aa3a0",
    "process_outputs": "#c56aa0",
    "intake": "#4aa3a0",
    "schedule": "#8a6cc0",
    "execute": "#e5803c",
    "wait": _PALE,
    "update": "#c56aa0",
    "publish": "#6b7280",
    "prepare": "#8a6cc0",
    "forward": "#2f7f86",
    "logits": "#6cb5ae",
    "sample": "#c56aa0",
    "readback": "#6b7280",
}
_INKS = {_PALE: "#4b5563", _KIND_COLOURS["context"]: "#4a3510"}
"""The colours of text on grounds that are too light for white."""


def write_picture(
    run_dir: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    begin_ms: float | None = None,
    end_ms: float | None = None,
) -> Path:
    """Draw a window of a run as an SVG file; times count from the begin of the first step.

    Raises:
        ValueError: the folder holds no readable journal, the run has no step, or the window is
            empty.
    """
    run, _ = cut_at_beginning(read_run(run_dir))
    picture = draw(run, begin_ms=begin_ms, end_ms=end_ms)
    path = Path(out)
    path.write_text(picture, encoding="utf-8")
    return path


def draw(run: Run, *, begin_ms: float | None = None, end_ms: float | None = None) -> str:
    """Draw a window of a run that has been read; without bounds, from first step to last."""
    steps = run.steps
    if not steps:
        raise ValueError(f"{run.folder} holds no step, so there is nothing to draw")
    for bound_ms in (begin_ms, end_ms):
        if bound_ms is not None and not isfinite(bound_ms):
            raise ValueError(f"{bound_ms} ms bounds no window; give a finite number")
    zero_ns = steps[0].begin_ns
    last_ns = max(step.end_ns for step in steps)
    begin_ns = zero_ns + round((begin_ms or 0.0) * 1e6)
    end_ns = last_ns if end_ms is None else zero_ns + round(end_ms * 1e6)
    if begin_ns >= min(end_ns, last_ns) or end_ns <= zero_ns:
        raise ValueError(
            f"the window from {(begin_ns - zero_ns) / 1e6} to {(end_ns - zero_ns) / 1e6} ms is "
            f"empty; the run's steps last {(last_ns - zero_ns) / 1e6} ms"
        )
    return _Picture(run, Window(zero_ns, begin_ns, end_ns)).draw()


class _Picture:
    def __init__(self, run: Run, window: Window) -> None:
        self._run = run
        self._window = window
        begin, end = window.seconds(window.begin_ns), window.seconds(window.end_ns)
        self._svg = Svg(
            width=WIDTH,
            title=f"A run from {begin:.3f} s to {end:.3f} s",
            description="Tracks over time: caller, core loop, worker, requests, counters.",
        )
        self._y = 14.0
        self._names_seen: set[str] = set()

    def draw(self) -> str:
        """Draw everything from the top down."""
        self._draw_scale()
        self._draw_thread(ThreadName.CALLER, "caller")
        self._draw_thread(ThreadName.CORE_LOOP, "core loop")
        self._draw_steps()
        self._draw_thread(ThreadName.WORKER, "phases")
        self._draw_requests()
        self._draw_counter("running requests", "#5b95d1", lambda step: step.num_running)
        self._draw_counter("KV blocks used", "#8a6cc0", lambda step: step.num_blocks_used)
        self._draw_legend()
        return self._svg.render(self._y + 8)

    def _draw_scale(self) -> None:
        """Write the times along the top; the lines below them are drawn by each track."""
        for time_ns in ticks(self._window):
            text = f"{self._window.seconds(time_ns):.9f}".rstrip("0").rstrip(".") + " s"
            last_x = WIDTH - 4 - text_width(text, 10.5) / 2
            self._svg.text(
                min(self._window.x(time_ns), last_x),
                self._y + 10,
                text,
                size=10.5,
                fill=_GREY,
                anchor="middle",
            )
        self._y += 20

    def _ground(
        self, name: str, height: float, *, gap: float, size: float = 11.5, note: str = ""
    ) -> float:
        """Name a track and lay its ground; returns where it begins, and moves on below it."""
        y = self._y
        self._svg.rect(LEFT, y, RIGHT - LEFT, height, fill="#f8f9fb", tip=name)
        for time_ns in ticks(self._window):
            x = self._window.x(time_ns)
            self._svg.path([(x, y), (x, y + height)], stroke=_LIGHT_GREY)
        name_y = y + height / 2 + size * 0.35
        if note:
            name_y -= 6
            self._svg.text(_NAMES_X, name_y + 12, note, size=10, anchor="end", fill=_GREY)
        self._svg.text(
            _NAMES_X,
            name_y,
            fitting(name, size, _NAMES_X - 6),
            size=size,
            anchor="end",
            weight=600 if size > 11 else 400,
            fill="#2b303b" if size > 11 else _GREY,
        )
        self._y += height + gap
        return y

    def _slice(
        self, piece: Slice, y: float, height: float, *, fill: str, kind: str, texts: Iterable[str]
    ) -> None:
        """Draw a slice with the first of the texts that fits."""
        x, end_x = self._window.x(piece.begin_ns), self._window.x(piece.end_ns)
        width = max(end_x - x, _MIN_SLICE)
        # A hair between neighbours, where there is room for one.
        drawn_width = width - 0.6 if width > 4 else width
        tip = f"{piece.name}: {(piece.end_ns - piece.begin_ns) / 1e6:,.3f} ms"
        radius = 2 if width > 8 else 0
        self._svg.rect(
            x, y, drawn_width, height, fill=fill, kind=f"slice {kind}", tip=tip, radius=radius
        )
        size = 10.5
        for text in texts:
            if text_width(text, size, weight=600) + 1 <= width:
                ink = _INKS.get(fill, "#ffffff")
                self._svg.text(
                    x + width / 2,
                    y + height / 2 + size * 0.36,
                    text,
                    size=size,
                    fill=ink,
                    anchor="middle",
                    weight=600,
                )
                break

    def _draw_thread(self, thread_name: ThreadName, title: str) -> None:
        """Draw the phases of a thread; of several workers, those of the first."""
        threads = [
            (process.header.rank, thread)
            for process, thread in self._run.threads()
            if thread.name == thread_name
        ]
        if not threads:
            return
        _, thread = min(threads, key=lambda pair: pair[0])
        is_worker = thread_name is ThreadName.WORKER
        height = 12 if is_worker else 18
        size = 10.5 if is_worker else 11.5
        y = self._ground(title, height, gap=14 if is_worker else 6, size=size)
        # Longest first, so that what is drawn wider than it is stays on top.
        spans = sorted(thread.phase_spans(), key=lambda span: span.begin_ns - span.end_ns)
        for phase, begin_ns, end_ns in spans:
            if self._window.holds(begin_ns, end_ns):
                name = phase.label
                self._names_seen.add(name)
                piece = Slice(name, begin_ns, end_ns)
                fill, texts = _PHASE_COLOURS[name], (name,)
                self._slice(piece, y, height, fill=fill, kind="phase", texts=texts)

    def _draw_steps(self) -> None:
        """Draw the steps of the worker, coloured by kind."""
        steps = self._run.steps_of_first_worker
        if not steps:
            return
        height = 30
        y = self._ground("worker", height, gap=2)
        for step in steps:
            if self._window.holds(step.begin_ns, step.end_ns):
                piece = Slice(format_step_label(step.label), step.begin_ns, step.end_ns)
                kind = step_kind(step.label)
                self._names_seen.add(kind)
                fill = _KIND_COLOURS[kind]
                texts = step_texts(step.label)
                self._slice(piece, y, height, fill=fill, kind="step", texts=texts)

    def _draw_requests(self) -> None:
        timelines, num_others = pick(request_timelines(self._run), self._window)
        called_out = pick_called_out(timelines, self._window)
        height = 13
        for timeline in timelines:
            name = f"request {timeline.request_id}"
            y = self._ground(name, height, gap=3, size=10.5)
            for piece in request_slices(timeline):
                if self._window.holds(piece.begin_ns, piece.end_ns):
                    self._names_seen.add(piece.name)
                    fill = _REQUEST_COLOURS[piece.name]
                    self._slice(piece, y, height, fill=fill, kind="request", texts=())
            self._draw_end(timeline, y, height)
            if timeline is called_out:
                self._draw_callouts(timeline, y + height)
        if num_others:
            text = f"and {num_others:,} more requests, which the Perfetto file has"
            self._svg.text(LEFT, self._y + 10, text, size=10, fill=_GREY)
            self._y += 14
        self._y += 8

    def _draw_end(self, timeline: RequestTimeline, y: float, height: float) -> None:
        """Say how a request ended, behind its end where there is room, else before it."""
        end_ns = max(timeline.end_ns, timeline.delivered_ns)
        num_tokens = timeline.num_generation_tokens
        text = f"{timeline.finish_reason}, {num_tokens} token{'s' * (num_tokens != 1)}"
        x = self._window.x(end_ns) + 6
        if end_ns >= self._window.end_ns:
            return
        if x + text_width(text, 10) <= RIGHT:
            self._svg.text(x, y + height / 2 + 3.5, text, size=10, fill=_GREY)
        elif self._window.x(timeline.first_token_ns) < x - text_width(text, 10) - 20:
            self._svg.text(x - 14, y + height / 2 + 3.5, text, size=10, fill="#fff", anchor="end")

    def _draw_callouts(self, timeline: RequestTimeline, y: float) -> None:
        """Name the parts of a request's life, with an arrow from each name to its slice.

        A text that would meet the arrow to its right stands below that one's, whose arrow is then
        the shorter: no line crosses a text.
        """
        intervals_ns = {
            QUEUED: timeline.queue_ns,
            PREFILL: timeline.prefill_ns,
            DECODE: timeline.decode_ns,
        }
        pieces = {
            name: max(
                (piece for piece in request_slices(timeline) if piece.name == name),
                key=self._window.shown_width,
            )
            for name in CALLOUTS
        }
        next_x, level, deepest = float(WIDTH), 0, 0
        for name, (title, help_text) in reversed(CALLOUTS.items()):
            arrow_x = self._window.callout_x(pieces[name])
            heading = f"{title} {duration_text(intervals_ns[name])}"
            x = arrow_x + 10
            width = max(text_width(heading, 11.5, weight=600), text_width(help_text, 10.5))
            level = level + 1 if x + width > next_x - 6 else 0
            below = y + 32 * level
            corner = [(x - 4, below + 17), (arrow_x, below + 17), (arrow_x, y + 3)]
            self._svg.path(corner, stroke="#2b303b")
            tip = [(arrow_x - 3, y + 6.5), (arrow_x, y + 0.5), (arrow_x + 3, y + 6.5)]
            self._svg.path(tip, fill="#2b303b", kind="arrow")
            self._svg.text(x, below + 21, heading, size=11.5, weight=600)
            self._svg.text(x, below + 34, help_text, size=10.5, fill=_GREY)
            next_x, deepest = arrow_x, max(deepest, level)
        self._y += 38 + 32 * deepest

    def _draw_counter(self, name: str, colour: str, value_of: Callable[[StepRecord], int]) -> None:
        """Draw a counter as an area; it holds from one step's begin to the next one's."""
        height = 26
        steps = self._run.steps
        values = [(step.begin_ns, value_of(step)) for step in steps]
        before = [value for time_ns, value in values if time_ns <= self._window.begin_ns]
        shown = [(self._window.begin_ns, before[-1] if before else 0)] + [
            pair for pair in values if self._window.begin_ns < pair[0] < self._window.end_ns
        ]
        peak = max(value for _, value in shown)
        y = self._ground(name, height, gap=6, size=10.5, note=f"at most {peak:,}")
        base = y + height
        points = [(self._window.x(shown[0][0]), base)]
        for time_ns, value in shown:
            x = self._window.x(time_ns)
            points.append((x, points[-1][1]))
            points.append((x, base - (height - 4) * value / max(peak, 1)))
        last_ns = min(self._window.end_ns, max(step.end_ns for step in steps))
        points.append((self._window.x(last_ns), points[-1][1]))
        self._svg.path([*points, (points[-1][0], base)], fill=f"{colour}40", kind="counter")
        self._svg.path(points[1:], stroke=colour, width=1.3)

    def _draw_legend(self) -> None:
        self._y += 6
        self._svg.text(
            RIGHT,
            self._y + 9,
            "number on a step: requests served; slices under a pixel are drawn as one",
            size=10,
            fill=_GREY,
            anchor="end",
        )
        self._draw_swatches("steps", _KIND_COLOURS)
        self._draw_swatches("requests", _REQUEST_COLOURS)
        self._draw_swatches("phases", _PHASE_COLOURS)

    def _draw_swatches(self, title: str, colours: dict[str, str]) -> None:
        self._svg.text(_NAMES_X, self._y + 9, title, size=10.5, anchor="end", fill=_GREY)
        x: float = LEFT
        for name, colour in colours.items():
            if name not in self._names_seen:
                continue
            width = text_width(name, 10) + 21
            if x + width > RIGHT:
                x, self._y = LEFT, self._y + 16
            self._svg.rect(x, self._y, 10, 10, fill=colour, radius=2)
            self._svg.text(x + 14, self._y + 9, name, size=10)
            x += width
        self._y += 17
