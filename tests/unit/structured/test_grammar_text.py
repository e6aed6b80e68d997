"""Grammars as text: what the library prints must be what is looked for in it."""

import pytest
from xgrammar import Grammar

from engine.types import grammar_messages
from engine.types.grammar_messages import check_library
from engine.types.grammar_text import PROBE_SCHEMA, is_known_print

PRINTED = str(Grammar.from_json_schema(PROBE_SCHEMA))


def test_the_library_that_is_installed_prints_what_is_known() -> None:
    assert is_known_print(PRINTED)
    check_library()


@pytest.mark.parametrize(
    ("known", "other"),
    [
        (r"[^\"\\\r\n]", r"[^\\\"\r\n]"),
        (r"[^\0-\x1f", r"[^\x00-\x1f"),
        ("[A-Fa-f0-9]", "[0-9a-fA-F]"),
        ("json_string=true", "json_string=1"),
        ("Regex(", "Expression("),
        ("_addl_key_", "_other_key_"),
        (r"\xa9", r"\u00a9"),
        (r' | ("\\" basic_escape', r' | ("\x5c" basic_escape'),
    ],
)
def test_another_print_is_noticed(known: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its strings would otherwise stay open, and nobody would know."""
    assert known in PRINTED
    changed = PRINTED.replace(known, other)
    assert not is_known_print(changed)
    monkeypatch.setattr(grammar_messages, "_printed", lambda *arguments: changed)
    with pytest.raises(RuntimeError, match="in a form that is not known"):
        check_library()
