"""A run as one SVG picture, readable in a browser without anything else.

Three panels: every request's time to first token along time, failures as crosses; tokens per
second and requests in flight along time; the cumulative distributions of the latencies.
Knows how to draw. Does not know how figures come about.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax import saxutils

from engine.bench.measure import first_chunk_ms, latencies_ms
from engine.bench.records import LoadRun, Outcome
from engine.bench.timeline import in_flight_per_bin, tokens_per_bin

_WIDTH, _PANEL_HEIGHT, _TOP = 960, 220, 70
_LEFT, _RIGHT, _GAP = 64, 64, 64
_NUM_BINS = 120
_COLORS = {"ttft": "#2563eb", "tpot": "#059669", "itl": "#d97706", "e2el": "#7c3aed"}
_BAD, _TOKENS, _IN_FLIGHT = "#dc2626", "#93c5fd", "#0f172a"
_STYLE = """\
  svg { background: #fff; font: 12px system-ui, sans-serif; fill: #334155; }
  .title { font-size: 17px; font-weight: 600; fill: #0f172a; }
  .panel { font-weight: 600; fill: #0f172a; }
  .grid { stroke: #e2e8f0; } .axis { stroke: #94a3b8; }
"""


@dataclass(frozen=True, slots=True)
class _Axis:
    """A scale from values to pixels, linear or logarithmic."""

    low: float
    high: float
    from_px: float
    to_px: float
    log: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value, cut to the axis."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.from_px + share * (self.to_px - self.from_px), 1)

    def ticks(self) -> list[float]:
        """Round values along the axis: 1, 2, 5 and their multiples by ten."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [10.0**power * digit for power in decades for digit in (1, 2, 5)]
            return [value for value in values if self.low <= value <= self.high]
        raw = (self.high - self.low) / 6
        power = 10 ** math.floor(math.log10(raw))
        step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= raw)
        count = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(math.ceil(self.low / step), count + 1)]


def draw(run: LoadRun, document: Mapping[str, Any]) -> str:
    """The picture, as the text of an SVG file."""
    height = _TOP + 3 * (_PANEL_HEIGHT + _GAP)
    settings = document["settings"]
    title = f"{document['model_id']} at {settings['base_url']}"
    facts = (
        f"{document['completed']} of {document['num_prompts']} requests, "
        f"{document['output_throughput']:,.1f} output tokens/s, at most "
        f"{document['max_concurrent_requests']} in flight, {document['duration']:.1f} s"
    )
    body = [
        *_text(_LEFT, 28, title, style="title"),
        *_text(_LEFT, 48, facts),
        *_requests_panel(run, _TOP),
        *_time_panel(run, _TOP + _PANEL_HEIGHT + _GAP),
        *_distribution_panel(run, _TOP + 2 * (_PANEL_HEIGHT + _GAP)),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">\n'
        f"<title>{_escape(title)}</title>\n<style>\n{_STYLE}</style>\n"
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _escape(text: str) -> str:
    """Text as XML may hold it: no control characters, whatever a server calls its model."""
    plain = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return saxutils.escape(plain)


def _requests_panel(run: LoadRun, top: float) -> Iterable[str]:
    """A dot per request: when it was due, and its time to first token from then."""
    yield from _text(
        _LEFT, top + 12, "time to first token, from when each request was due (ms)", style="panel"
    )
    points = [
        ((record.intended_ns - run.start_ns) / 1e9, first_chunk_ms(record, record.intended_ns))
        for record in run.records
        if record.outcome is Outcome.OK
    ]
    known = [(at, value) for at, value in points if value is not None]
    x, y = _time_axis(run), _vertical([value for _, value in known], top)
    yield from _grid(x, y, top, _seconds, _milliseconds)
    for at, value in known:
        yield (
            f'<circle cx="{x.place(at)}" cy="{y.place(value)}" r="2.5" fill="{_COLORS["ttft"]}" '
            'fill-opacity="0.6"/>'
        )
    for record in run.records:
        if record.outcome is not Outcome.OK:
            at = x.place((record.intended_ns - run.start_ns) / 1e9)
            label = _escape(f"{record.request_id}: {record.outcome} {record.detail}")
            yield (
                f'<path d="M{at - 4} {top + 22}l8 8m0 -8l-8 8" stroke="{_BAD}" stroke-width="2">'
                f"<title>{label}</title></path>"
            )


def _time_panel(run: LoadRun, top: float) -> Iterable[str]:
    """Tokens per second as an area, requests in flight as a line with a scale of its own."""
    bin_s, tokens = tokens_per_bin(run, num_bins=_NUM_BINS)
    in_flight = in_flight_per_bin(run, num_bins=_NUM_BINS)
    yield from _text(_LEFT, top + 12, "output tokens/s (area, left)", style="panel")
    yield from _text(
        _WIDTH - _RIGHT, top + 12, "requests in flight (line, right)", style="panel", anchor="end"
    )
    x, y = _time_axis(run), _vertical(tokens, top)
    yield from _grid(x, y, top, _seconds, lambda value: f"{value:,.4g}")
    steps = "".join(
        f"L{x.place(number * bin_s)} {y.place(value)}H{x.place((number + 1) * bin_s)}"
        for number, value in enumerate(tokens)
    )
    bottom = y.from_px
    yield f'<path d="M{_LEFT} {bottom}{steps}L{_WIDTH - _RIGHT} {bottom}Z" fill="{_TOKENS}"/>'
    other = _vertical(in_flight, top)
    line = " ".join(
        f"{x.place((number + 0.5) * bin_s)},{other.place(value)}"
        for number, value in enumerate(in_flight)
    )
    yield f'<polyline points="{line}" fill="none" stroke="{_IN_FLIGHT}" stroke-width="1.5"/>'
    for value in other.ticks():
        yield from _text(_WIDTH - _RIGHT + 8, other.place(value) + 4, f"{value:g}")


def _distribution_panel(run: LoadRun, top: float) -> Iterable[str]:
    """Share of requests (of gaps, for ITL) below each latency, on a logarithmic scale."""
    yield from _text(_LEFT, top + 12, "share below a latency (ms, logarithmic)", style="panel")
    groups = latencies_ms([one for one in run.records if one.outcome is Outcome.OK])
    curves = {name: [value for value in sorted(groups[name]) if value > 0] for name in _COLORS}
    values = [value for curve in curves.values() for value in curve]
    if not values:
        return
    low, high = min(values), max(values)
    x = _Axis(low * 0.9, high * 1.1, _LEFT, _WIDTH - _RIGHT, log=True)
    y = _Axis(0.0, 1.0, top + _PANEL_HEIGHT, top + 30)
    yield from _grid(x, y, top, _milliseconds, lambda value: f"{value:.0%}")
    for number, (name, curve) in enumerate(curves.items()):
        if not curve:
            continue
        points = " ".join(f"{x.place(value)},{y.place(share)}" for value, share in _thinned(curve))
        yield (
            f'<polyline points="{points}" fill="none" stroke="{_COLORS[name]}" stroke-width="2"/>'
        )
        place = _WIDTH - _RIGHT - 60 * (len(curves) - number) + 24
        color = _COLORS[name]
        yield f'<rect x="{place - 14}" y="{top + 3}" width="10" height="10" fill="{color}"/>'
        yield from _text(place, top + 12, name.upper())


def _thinned(ordered: Sequence[float], limit: int = 400) -> Iterable[tuple[float, float]]:
    """Points of a cumulative distribution, evenly many along its shares."""
    count = len(ordered)
    for number in range(min(count, limit)):
        index = number * (count - 1) // max(min(count, limit) - 1, 1)
        yield ordered[index], (index + 1) / count


def _time_axis(run: LoadRun) -> _Axis:
    return _Axis(0.0, max((run.end_ns - run.start_ns) / 1e9, 1e-3), _LEFT, _WIDTH - _RIGHT)


def _vertical(values: Sequence[float], top: float) -> _Axis:
    highest = max(values, default=0.0) or 1.0
    return _Axis(0.0, highest * 1.05, top + _PANEL_HEIGHT, top + 30)


def _grid(
    x: _Axis,
    y: _Axis,
    top: float,
    x_label: Callable[[float], str],
    y_label: Callable[[float], str],
) -> Iterable[str]:
    bottom = top + _PANEL_HEIGHT
    for value in y.ticks():
        at = y.place(value)
        yield f'<path class="grid" d="M{_LEFT} {at}H{_WIDTH - _RIGHT}"/>'
        yield from _text(_LEFT - 8, at + 4, y_label(value), anchor="end")
    for value in x.ticks():
        at = x.place(value)
        yield f'<path class="axis" d="M{at} {bottom}v4"/>'
        yield from _text(at, bottom + 18, x_label(value), anchor="middle")
    yield f'<path class="axis" d="M{_LEFT} {bottom}H{_WIDTH - _RIGHT}"/>'


def _text(
    x: float, y: float, text: str, *, style: str | None = None, anchor: str = "start"
) -> Iterable[str]:
    kind = "" if style is None else f' class="{style}"'
    yield f'<text x="{x}" y="{y}" text-anchor="{anchor}"{kind}>{_escape(text)}</text>'


def _seconds(value: float) -> str:
    return f"{value:g} s"


def _milliseconds(value: float) -> str:
    return f"{value:,.4g}"
