"""Reasoning between tags: where it begins, where it ends, and what is none."""

import random

import pytest

from engine.errors import ConfigError
from engine.server.openai.reasoning.registry import (
    REASONING_FORMAT_NAMES,
    REASONING_FORMATS,
    find_reasoning_format,
)
from engine.server.openai.tools.template import read_template

CASES = [
    # format, begins within the reasoning, text, reasoning, content
    ("qwen3", False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", False, "\n<think>a</think>b", "a", "b"),
    ("qwen3", False, "<think>\n\n</think>\n\nYes. \n", "", "Yes. \n"),
    ("qwen3", False, "Yes.", "", "Yes."),
    ("qwen3", False, " \n Yes.", "", " \n Yes."),
    ("qwen3", False, " ", "", " "),
    ("qwen3", False, "", "", ""),
    ("qwen3", False, "A <think>b</think> c", "", "A <think>b</think> c"),
    ("qwen3", False, "<think>a</think> b </think> <think>c", "a", "b </think> <think>c"),
    ("qwen3", False, "<thin", "", "<thin"),
    ("qwen3", False, "<think>a < b </thin", "a < b </thin", ""),
    ("qwen3", False, "<think>a </think", "a </think", ""),
    ("qwen3", False, "<think>cut off \n", "cut off", ""),
    ("qwen3", False, "<think>", "", ""),
    ("qwen3", True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("qwen3", True, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", True, "</think>Yes.", "", "Yes."),
    ("qwen3", True, "<thi", "<thi", ""),
    ("qwen3", True, "never closed", "never closed", ""),
    ("deepseek_r1", True, "a\n\nb  c</think>d", "a\n\nb  c", "d"),
    ("mistral", False, "[THINK]a[/THINK]b", "a", "b"),
    (
        "granite",
        False,
        "Here's my thought process: a. Here is my response: b",
        "a.",
        "b",
    ),
]


def read(name: str, is_open: bool, parts: list[str]) -> tuple[str, str]:
    parser = REASONING_FORMATS[name].new_parser(is_open)
    pairs = [*map(parser.feed, parts), parser.finish()]
    return "".join(pair[0] for pair in pairs), "".join(pair[1] for pair in pairs)


@pytest.mark.parametrize(("name", "is_open", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content_whole_and_in_pieces(
    name: str, is_open: bool, text: str, reasoning: str, content: str
) -> None:
    assert read(name, is_open, [text]) == (reasoning, content)
    assert read(name, is_open, list(text)) == (reasoning, content)
    random_ = random.Random(text)
    for _ in range(10):
        place = random_.randrange(len(text) + 1)
        assert read(name, is_open, [text[:place], text[place:]]) == (reasoning, content)


def test_reasoning_is_streamed_while_the_model_writes_it() -> None:
    parser = REASONING_FORMATS["qwen3"].new_parser(False)
    assert parser.feed("<think>") == ("", "")
    assert parser.feed("Let me") == ("Let me", "")
    assert parser.feed(" see <") == (" see", "")
    assert parser.feed("b> ") == (" <b>", "")
    assert parser.feed("</think> x") == ("", "x")
    assert parser.feed(" <think>") == ("", " <think>")


@pytest.mark.parametrize(
    ("name", "prompt", "is_open", "is_closed"),
    [
        ("qwen3", "<|im_start|>assistant\n", False, False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True, False),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False, True),
        ("deepseek_r1", "<|Assistant|>", True, False),
        ("deepseek_r1", "<|Assistant|><think>\n", True, False),
        ("deepseek_r1", "<|Assistant|><think></think>", False, True),
        ("mistral", "[/INST][THINK]", True, False),
    ],
)
def test_the_prompts_end_says_whether_the_answer_begins_within(
    name: str, prompt: str, is_open: bool, is_closed: bool
) -> None:
    syntax = REASONING_FORMATS[name].syntax
    assert syntax.opens_in(prompt) is is_open
    assert syntax.is_closed_in(prompt) is is_closed


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>' if enable_thinking }}", "qwen3"),
        ("{% set content = content.split('</think>')[-1] %}", "qwen3"),
        ("[THINK]{{ thinking }}[/THINK]", "mistral"),
        ("{{ 'Here is my thought process:' }}", "granite"),
        ("{{ messages }}", None),
        ("", None),
    ],
)
def test_the_template_tells_the_format(template: str, name: str | None) -> None:
    found = find_reasoning_format("auto", read_template(template))
    assert (None if found is None else found.name) == name


def test_formats_are_found_by_name() -> None:
    facts = read_template("<think>")
    assert find_reasoning_format("none", facts) is None
    for name in REASONING_FORMAT_NAMES[2:]:
        assert find_reasoning_format(name, facts) is REASONING_FORMATS[name]
    with pytest.raises(ConfigError, match="reasoning_parser must be one of auto, none, deepseek"):
        find_reasoning_format("deepseek", facts)
