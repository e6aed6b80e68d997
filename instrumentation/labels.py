"""The label of a step: the one place that formats it and the one that parses it.

Knows the text form that traces, ranges, logs and tests share. Does not know how the four counts
come about.
"""

import re
from typing import NamedTuple

_PATTERN = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)", re.ASCII)
_EXPECTED_FORM = "execute_context_<requests>(<tokens>)_generation_<requests>(<tokens>)"


class StepLabel(NamedTuple):
    """The four counts that say what a step computed.

    A context request has no output token yet; a generation request has at least one.
    """

    num_context_requests: int
    num_context_tokens: int
    num_generation_requests: int
    num_generation_tokens: int


def format_step_label(label: StepLabel) -> str:
    """Write the label in the form `execute_context_1(4)_generation_5(5)`."""
    return (
        f"execute_context_{label.num_context_requests}({label.num_context_tokens})"
        f"_generation_{label.num_generation_requests}({label.num_generation_tokens})"
    )


def parse_step_label(text: str) -> StepLabel:
    """Read a label back; the exact inverse of `format_step_label`.

    Raises:
        ValueError: the text is not of that form, as a whole.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"not a step label: {text!r}; expected the form {_EXPECTED_FORM}")
    return StepLabel(*map(int, match.groups()))


def is_step_label(text: str) -> bool:
    """Whether `parse_step_label` reads the text."""
    return _PATTERN.fullmatch(text) is not None


def step_kind(label: StepLabel) -> str:
    """Name the kind of work in a step: `context`, `generation` or `mixed`.

    A step without any request counts as `generation`, the cheaper kind.
    """
    if not label.num_context_requests:
        return "generation"
    return "mixed" if label.num_generation_requests else "context"
