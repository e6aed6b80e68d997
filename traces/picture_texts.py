"""The words of the picture: what is written of a step, a track and a duration.

Knows how much room there is. Does not know where it is.
"""

from instrumentation.labels import StepLabel, format_step_label
from traces.svg import text_width


def step_texts(label: StepLabel) -> tuple[str, ...]:
    """What may be written on a step, the longest first."""
    num_requests = label.num_context_requests + label.num_generation_requests
    text = format_step_label(label)
    return text, text.removeprefix("execute_"), str(num_requests)


def fitting(name: str, size: float, room: float) -> str:
    """A track's name as far as there is room for it: its end, which tells requests apart."""
    if text_width(name, size) <= room:
        return name
    text = end = name.removeprefix("request ")
    while text_width(text, size) > room:
        end = end[1:]
        text = f"…{end}"
    return text


def duration_text(duration_ns: int) -> str:
    """A duration in milliseconds, or in seconds from one on."""
    return f"{duration_ns / 1e9:.2f} s" if duration_ns >= 1e9 else f"{duration_ns / 1e6:.0f} ms"
