"""What counts as a refused request, and how often."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import EngineDeadError, PromptError, QueueFullError
from engine.frontend.request_intake import RequestIntake


@pytest.fixture
def seen() -> list[tuple[str, Any]]:
    """Who was told of which error."""
    return []


@pytest.fixture
def intake(seen: list[tuple[str, Any]]) -> RequestIntake:
    """One that nothing is sent through."""
    nothing: Any = None
    observer: Any = SimpleNamespace(observe_rejection=lambda error: seen.append(("count", error)))
    tracer: Any = SimpleNamespace(reject=lambda error, **_: seen.append(("trace", error)))
    return RequestIntake(
        nothing,
        nothing,
        input_processor=nothing,
        output_processor=nothing,
        queue=nothing,
        tracer=tracer,
        observer=observer,
        obs=nothing,
    )


def test_a_refusal_is_counted_once_whoever_lets_it_pass(
    intake: RequestIntake, seen: list[tuple[str, Any]]
) -> None:
    errors = [PromptError("too long"), QueueFullError("full", retry_after_s=1)]
    for error in errors:
        with (
            pytest.raises(type(error)),
            intake.counting_rejections(),
            intake.counting_rejections(),
        ):
            raise error
    assert seen == [(kind, error) for error in errors for kind in ("count", "trace")]


def test_a_refusal_in_other_words_is_counted_as_what_it_was(
    intake: RequestIntake, seen: list[tuple[str, Any]]
) -> None:
    refusal = PromptError("too long")
    with pytest.raises(ZeroDivisionError), intake.counting_rejections():
        raise ZeroDivisionError from refusal
    assert seen == [("count", refusal), ("trace", refusal)]


def test_faults_and_a_dead_engine_refuse_nobody(
    intake: RequestIntake, seen: list[tuple[str, Any]]
) -> None:
    for error in (ZeroDivisionError(), EngineDeadError("dead")):
        with pytest.raises(type(error)), intake.counting_rejections():
            raise error
    assert not seen
