"""What a reference within a JSON schema points to: JSON pointers, as `$ref` writes them."""

from typing import Any, Final
from urllib.parse import unquote

_MAX_DIGITS: Final = 10
"""Of an index in a reference."""


def is_local(reference: str) -> bool:
    """Whether a reference points into the schema that has it."""
    return reference == "#" or reference.startswith("#/")


def pointed_at(root: Any, reference: str) -> Any:
    """The part of a schema that a local reference points to.

    Raises:
        LookupError: there is none.
    """
    target = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and key in target:
            target = target[key]
        elif (
            isinstance(target, list)
            and key.isdecimal()
            and len(key) < _MAX_DIGITS
            and int(key) < len(target)
        ):
            target = target[int(key)]
        else:
            raise LookupError(f"nothing is at {reference[:80]!r}")
    return target
