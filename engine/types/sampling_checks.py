"""Checks of single sampling parameters: type and range in, a plain Python value out.

Knows how a wrong value is reported. Does not know which fields there are nor how they interact:
that is `engine.types.sampling`. Every function raises `SamplingParamsError`.
"""

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn, TypeGuard

import msgspec

from engine.errors import SamplingParamsError

MAX_LOGIT_BIAS: Final = 100.0
"""Logit biases are clamped to plus or minus this value, as in the OpenAI API."""

MAX_DEPTH: Final = 32
"""How deep `extra_args` may be nested."""

_MAX_TOKEN_ID: Final = 2**31 - 1
_SCALARS: Final = frozenset((int, float, bool, str))


class NamedArguments(msgspec.StructMeta):
    """Calls of the class with an unknown argument say which known one is near.

    The class says what its arguments are called, how one is given, and which field it is itself.
    """

    NOUN: str
    EXAMPLE: str
    PARAM: str | None
    REFUSED: Mapping[str, str] = {}
    """Arguments that vLLM has and that may only be None or False here: what to do instead."""

    def __call__(self, *arguments: Any, **values: Any) -> Any:
        if arguments:
            raise SamplingParamsError(
                f"{self.__name__} takes its values by name, such as {self.EXAMPLE}; got "
                f"{short(arguments[0])} without one."
            )
        for name, remedy in self.REFUSED.items():
            value = values.pop(name, None)
            if value is not None and value is not False:
                place = f"{self.PARAM}.{name}"
                raise SamplingParamsError(f"{place} is not supported; {remedy}.", param=place)
        fields = [name for name in self.__struct_fields__ if not name.startswith("_")]
        for name in values.keys() - set(fields):
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SamplingParamsError(f"unknown {self.NOUN} {name!r}.{hint}", param=self.PARAM)
        return super().__call__(**values)


def reject(name: str, value: object, allowed: str, remedy: str = "") -> NoReturn:
    """Raise the error of a field whose value is not allowed."""
    raise SamplingParamsError(
        f"{name} must be {allowed}, got {short(value)}{f'; {remedy}' if remedy else ''}.",
        param=name,
    )


def short(value: object) -> str:
    """The value as shown in messages: its repr, cut to a line."""
    try:
        text = repr(value)
    except Exception:  # too long an integer, too deep a list, or somebody else's repr
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 120 else text[:117] + "..."


def copied(value: Any, *, depth: int = 0) -> Any:
    """A deep copy of lists and dictionaries; what is nested too deep is left for the checks."""
    if depth > MAX_DEPTH:
        return value
    if isinstance(value, list):
        if set(map(type, value)) <= _SCALARS:
            return value.copy()
        return [copied(item, depth=depth + 1) for item in value]
    if isinstance(value, dict):
        return {key: copied(item, depth=depth + 1) for key, item in value.items()}
    return value


def encodable(text: str) -> bool:
    """Whether a text is free of lone surrogates, which no message can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_plain_integers(value: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of nothing but Python's own integers, and not empty.

    Such a list may hold a vocabulary or a long prompt, and need not be checked one by one, which
    takes ten times as long.
    """
    return type(value) is list and set(map(type, value)) == {int}


def checked_integer(name: str, value: object, low: int, high: int, allowed: str) -> int:
    """The value as a Python integer between two bounds; bool is refused."""
    # bool is an int in Python; logprobs=True is a caller's mistake, not a one.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        reject(name, value, allowed)
    number = int(value)
    if not low <= number <= high:
        reject(name, number, allowed)
    return number


def checked_real(name: str, value: object, low: float, high: float, allowed: str) -> float:
    """The value as a finite float between two bounds; bool is refused."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        reject(name, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        reject(name, value, allowed)
    if not (math.isfinite(number) and low <= number <= high):
        reject(name, value, allowed)
    return number


def _items(name: str, value: object) -> Iterable[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        reject(name, value, "None or a list")
    return value


def checked_strings(name: str, value: object) -> list[str]:
    """The distinct strings of a list, none of them empty; None is an empty list."""
    if value is None:
        return []
    strings: dict[str, None] = {}
    for item in _items(name, value):
        if not isinstance(item, str) or not item:
            reject(name, value, "None or a list of strings that are not empty")
        if not encodable(item):
            reject(name, value, "text without lone surrogates", "replace them")
        strings[item] = None
    return list(strings)


def checked_token_ids(name: str, value: object) -> list[int]:
    """The distinct token ids of any iterable of integers."""
    if is_plain_integers(value) and min(value) >= 0 and max(value) <= _MAX_TOKEN_ID:
        return list(dict.fromkeys(value))
    allowed = "a list of token ids (integers of at least 0)"
    token_ids = (
        checked_integer(name, item, 0, _MAX_TOKEN_ID, allowed) for item in _items(name, value)
    )
    return list(dict.fromkeys(token_ids))


def checked_token_sequences(name: str, value: object) -> list[list[int]]:
    """Sequences of token ids, none of them empty."""
    allowed = "None or a list of lists of token ids, none of them empty"
    sequences = []
    for item in _items(name, value):
        if isinstance(item, str | bytes | Mapping) or not isinstance(item, Iterable):
            reject(name, value, allowed)
        sequences.append(
            [checked_integer(name, token, 0, _MAX_TOKEN_ID, allowed) for token in item]
        )
        if not sequences[-1]:
            reject(name, value, allowed)
    return sequences


def checked_logit_bias(value: object) -> dict[int, float]:
    """Biases by token id, clamped to plus or minus `MAX_LOGIT_BIAS`."""
    if not isinstance(value, Mapping):
        reject("logit_bias", value, "None or a mapping of token id to bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # JSON objects have string keys: the OpenAI API sends {"50256": -100}.
        is_number = isinstance(key, str) and key.isdecimal() and len(key) <= 10
        token_id = int(key) if is_number else key
        token_id = checked_integer("logit_bias", token_id, 0, _MAX_TOKEN_ID, "keyed by token ids")
        number = checked_real("logit_bias", bias, -math.inf, math.inf, "of finite numbers")
        biases[token_id] = min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, number))
    return biases


def check_extra_args(value: object) -> None:
    """Refuse what cannot travel to the engine core."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        reject("extra_args", value, "None or a dictionary with string keys")
    _check_plain(value, 0)
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise SamplingParamsError(
            f"extra_args must hold values that MessagePack can carry, got {short(value)}: {error}.",
            param="extra_args",
        ) from error


def _check_plain(value: object, depth: int) -> None:
    """Refuse what would arrive as something else, or not at all."""
    if depth > MAX_DEPTH:
        raise SamplingParamsError(
            f"extra_args must not be nested deeper than {MAX_DEPTH} levels, or hold itself.",
            param="extra_args",
        )
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, MAX_DEPTH)
            _check_plain(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_plain(item, depth + 1)
    elif not (value is None or isinstance(value, bool | int | float | str | bytes)):
        raise SamplingParamsError(
            "extra_args must hold values that MessagePack can carry (None, booleans, numbers, "
            f"strings, bytes, lists, dictionaries), got {short(value)}, a {type(value).__name__}.",
            param="extra_args",
        )


def check_in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse token ids that the logits have no column for."""
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise SamplingParamsError(
            f"{name} must hold token ids below the vocabulary size {vocab_size}, "
            f"got {short(outside)}.",
            param=name,
        )
