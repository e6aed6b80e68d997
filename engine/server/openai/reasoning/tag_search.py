"""Tags in a text that comes in pieces: where the first one is, and what may yet become one.

Knows nothing of what tags mean.
"""

from collections.abc import Sequence


def num_held_back(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of the text that may be the beginning of a tag."""
    held = 0
    for tag in tags:
        place = text.find(tag[0], max(0, len(text) - len(tag) + 1))
        while place >= 0:
            if tag.startswith(text[place:]):
                held = max(held, len(text) - place)
                break
            place = text.find(tag[0], place + 1)
    return held


def first_tag(text: str, tags: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Where the earliest tag of the text is, and which; the longest of those at one place.

    Args:
        start: there is none before this place.
    """
    found = [(text.find(tag, start), -len(tag), tag) for tag in tags]
    place, _, tag = min((one for one in found if one[0] >= 0), default=(-1, 0, ""))
    return (place, tag) if tag else None
