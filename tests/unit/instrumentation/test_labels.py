"""The step's label: one form, written and read back exactly."""

import random

import pytest

from instrumentation import StepLabel, format_step_label, parse_step_label, step_kind


def test_known_form() -> None:
    label = StepLabel(1, 4, 5, 5)
    assert format_step_label(label) == "execute_context_1(4)_generation_5(5)"
    assert parse_step_label("execute_context_1(4)_generation_5(5)") == label


def test_round_trip_of_random_labels() -> None:
    chance = random.Random(11)
    for _ in range(200):
        label = StepLabel(*(chance.randrange(10 ** chance.randint(1, 9)) for _ in range(4)))
        assert parse_step_label(format_step_label(label)) == label


@pytest.mark.parametrize(
    "text",
    [
        "",
        "execute_context_1(4)_generation_5",
        "execute_context_1(4)_generation_5(5) ",
        " execute_context_1(4)_generation_5(5)",
        "execute_context_1(4)_generation_5(5)\n",
        "execute_context_-1(4)_generation_5(5)",
        "execute_context_1(4)_generation_5(\N{ARABIC-INDIC DIGIT FIVE})",
        "execute_context_1_generation_5",
    ],
)
def test_other_forms_are_refused_with_the_expected_one(text: str) -> None:
    with pytest.raises(ValueError, match="expected the form execute_context_<requests>"):
        parse_step_label(text)


def test_kinds() -> None:
    assert step_kind(StepLabel(2, 30, 0, 0)) == "context"
    assert step_kind(StepLabel(0, 0, 3, 3)) == "generation"
    assert step_kind(StepLabel(1, 8, 1, 1)) == "mixed"
    assert step_kind(StepLabel(0, 0, 0, 0)) == "generation"
