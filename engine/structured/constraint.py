"""A constraint as the grammar library takes it: its text, its limits, and the grammar made of it.

Knows the library's compiler; knows no request and no process.
"""

import json
import re
from typing import Any, Final

import numpy as np

from engine.structured.forms.lark import Rules, expression, grammar_of_text, quoted
from engine.structured.forms.structural_tags import json_options, lark_of_tag

ConstraintKey = tuple[str, str, bool]
"""Kind, text, disable_any_whitespace."""

_GRAMMAR_ITEMS: Final = 10_000
_GRAMMAR_ROW_ITEMS: Final = 2_000
"""Few parser items for a token of a grammar: what is ambiguous fails within milliseconds."""
_SCHEMA_ITEMS: Final = 200_000
_SCHEMA_ROW_ITEMS: Final = 20_000
"""Many, for objects of hundreds of optional properties; schemas are not ambiguous."""
_UNBOUNDED: Final = ('"pattern"', '"patterns"', '"patternProperties"', '"grammar"')
"""Keys of what an expression, or a grammar, may be behind."""
_BYTES_PER_BYTE: Final = 100
_BASE_BYTES: Final = 256 << 10
"""Of a compiled grammar, and for each byte of its text: measured, after some use of it."""
_NO_ONE_OF: Final = (
    "'oneOf' is supported where no value can fit two of its schemas: say 'anyOf', or require of "
    "each a property with a 'const' of its own"
)
_QUOTES: Final = ("|", "^", *(f"{number} |" for number in range(10)))
"""What lines begin with that show where in the grammar something is."""


_EXPRESSION_ERROR: Final = re.compile(r"^error: (.+)$", re.MULTILINE)
_STATE: Final = re.compile("<state>|<non-verbose/>")
"""What the library's account of itself begins with."""


class ConstraintError(ValueError):
    """A constraint that the library cannot compile, or that no text but the empty one matches."""


def is_unbounded(key: ConstraintKey) -> bool:
    """Whether compiling may take for ever, or crash: what caps on schemas do not bound."""
    kind, text, _ = key
    return kind in ("regex", "grammar") or any(word in text for word in _UNBOUNDED)


def grammar_text(key: ConstraintKey) -> str:
    """A constraint in the library's own form.

    Raises:
        LarkError: a user's grammar that is malformed.
    """
    kind, text, is_compact = key
    if kind in ("json", "json_object"):
        schema = json.loads(text) if kind == "json" else {"type": "object"}
        options = {"x-guidance": json_options(is_compact=is_compact)}
        return json.dumps({"grammars": [{"json_schema": schema | options}]}, ensure_ascii=False)
    if kind == "grammar":
        return json.dumps({"grammars": [{"lark_grammar": grammar_of_text(text)}]})
    if kind == "structural_tag":
        rules, start = lark_of_tag(json.loads(text))
        return rules.text(start)
    rules = Rules()
    if kind == "regex":
        return rules.text(rules.terminal(expression(text)))
    assert kind == "choice", kind
    return rules.text(rules.terminal(" | ".join(map(quoted, json.loads(text)))))


def compiled(tokenizer: Any, key: ConstraintKey, text: str) -> Any:
    """The matcher of a constraint at its beginning, of which others are copied.

    Args:
        tokenizer: from `tokenizer_of`.
        text: from `grammar_text`.

    Raises:
        ConstraintError: see there.
    """
    from llguidance import LLMatcher, LLParserLimits

    has_grammar = key[0] in ("regex", "grammar") or '"grammar"' in key[1]
    limits = LLParserLimits(
        step_max_items=_GRAMMAR_ITEMS if has_grammar else _SCHEMA_ITEMS,
        max_items_in_row=_GRAMMAR_ROW_ITEMS if has_grammar else _SCHEMA_ROW_ITEMS,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise ConstraintError(message_of(matcher.get_error()))
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error() and not matcher.get_error().startswith("NoExtension"):
        raise ConstraintError(message_of(matcher.get_error()))
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    allowed = np.setdiff1d(allowed, tokenizer.eos_tokens)
    if matcher.is_error() or not len(allowed):
        raise ConstraintError("no text but the empty one matches it")
    # What recurs without an end looks as if it could begin.
    if not matcher.deep_copy().consume_token(int(allowed[0])):
        raise ConstraintError("it is unsatisfiable")
    return matcher


def num_bytes_of(text: str) -> int:
    """About what a compiled grammar takes; the library does not tell."""
    return _BASE_BYTES + _BYTES_PER_BYTE * len(text)


def message_of(error: str) -> str:
    """The library's message on one line, without the grammar that it quotes."""
    if "oneOf constraints are not supported" in error:
        return _NO_ONE_OF
    if error.startswith("NoExtension"):
        return "nothing may follow: a part of it is unsatisfiable"
    if found := _EXPRESSION_ERROR.search(error):
        return f"an expression in it is invalid: {found[1]}"
    error = _STATE.split(error, maxsplit=1)[0]
    if any(word in error for word in ("limits.", "lexer error", "Too many items")):
        reason = error.split(";")[0].strip()
        return f"it is too large, or can be matched in too many ways ({reason[:200]})"
    lines = map(str.strip, error.splitlines())
    text = " ".join(line for line in lines if line and not line.startswith(_QUOTES))
    return text.removeprefix("Error: ")[:500] or "the grammar library gives no reason"
