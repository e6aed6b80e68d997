"""Structural tags: free text with constrained parts between tags, as Lark.

Formats are those of vLLM's structural tags. A text within tags ends where its end is first found,
and a trigger opens a tag wherever it is found. Besides them `text` is ours: what fits all of its
`patterns` and `matches` (ours; no user's expressions), and has none of its `excludes`.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from engine.structured.forms.lark import Rules, expression, flaw_of, quoted, text_without
from engine.structured.forms.schema_shapes import SchemaError

Format = dict[str, Any]

MAX_WHITESPACE: Final = 10
"""Most whitespace characters in a row between the parts of JSON. A model that has begun to indent
may otherwise go on for ever."""
_ESCAPES: Final = '"\\bfnrt'
"""What may follow a backslash: no `u`, so that a key is spelled in one way only."""
_TEXT_FORMATS: Final = ("const_string", "any_text", "regex", "text")


def json_options(*, is_compact: bool = False, max_whitespace: int = MAX_WHITESPACE) -> Format:
    """The library's options for JSON (`x-guidance`); compact: as `json.dumps` has it.

    They come last in a schema: before other keywords, they change how the library merges them.
    """
    if is_compact:
        spaces: Format = {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        }
    else:
        spaces = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{max_whitespace}}}"}
    return spaces | {"json_allowed_escapes": _ESCAPES}


def prepared_tag(tag: Format, prepare: Callable[[Format], Format]) -> Format:
    """A user's structural tag, checked, with its schemas prepared; the older form brought up.

    Raises:
        SchemaError: a part that is malformed, not supported or cannot be enforced.
    """
    if "structures" in tag and "format" not in tag:
        inner = _of_structures(tag)
    elif isinstance(tag.get("format"), dict):
        inner = tag["format"]
    else:
        raise SchemaError(
            "", 'must have a "format", or "structures" and "triggers" as in its older form'
        )
    inner = _prepared(inner, ".format", prepare)
    whole = {"type": "structural_tag", "format": inner}
    lark_of_tag(whole)
    return whole


def lark_of_tag(tag: Format) -> tuple[Rules, str]:
    """The rules of a structural tag, and what its text is.

    Raises:
        SchemaError: a part that is malformed, or not supported.
    """
    writer = _Writer()
    part = writer.part(tag["format"], ".format", [])
    return writer.rules, writer.body(part)


def _of_structures(tag: Format) -> Format:
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise SchemaError("", '"structures" and "triggers" must be lists')
    tags = []
    for index, one in enumerate(structures):
        if not isinstance(one, dict):
            raise SchemaError(f".structures[{index}]", "must have begin, schema and end")
        content = {"type": "json_schema", "json_schema": one.get("schema", True)}
        tags.append({"begin": one.get("begin"), "content": content, "end": one.get("end")})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _prepared(value: Any, path: str, prepare: Callable[[Format], Format]) -> Any:
    if isinstance(value, list):
        return [_prepared(one, f"{path}[{index}]", prepare) for index, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if value.get("type") == _OWN_FORMAT:
        raise SchemaError(f"{path}.type", _unknown(_OWN_FORMAT))
    found: Format = {}
    for key, item in value.items():
        where = f"{path}.{str(key)[:80]}"
        if key == "json_schema" and isinstance(item, dict):
            try:
                found[key] = prepare(item)
            except SchemaError as error:
                raise SchemaError(f"{where}{error.path}", error.message) from error
        else:
            found[key] = _prepared(item, where, prepare)
    return found


class _Part(NamedTuple):
    """A format as Lark: within a terminal where `is_regular`, else within a rule."""

    text: str
    is_regular: bool


class _Writer:
    def __init__(self) -> None:
        self.rules = Rules()

    def body(self, part: _Part) -> str:
        """A part as it stands within a rule."""
        return self.rules.terminal(part.text) if part.is_regular else part.text

    def part(self, form: Any, path: str, ends: list[str]) -> _Part:
        """A format with one of the ends behind it; with ends it is never regular."""
        kind = form.get("type") if isinstance(form, dict) else None
        if kind not in _FORMATS and kind != _OWN_FORMAT:
            raise SchemaError(f"{path}.type", _unknown(kind))
        write: Callable[[Format, str, list[str]], _Part] = getattr(self, f"_{kind}")
        return write(form, path, ends)

    def _ended(self, part: _Part, ends: list[str]) -> _Part:
        if not ends:
            return part
        end = " | ".join(map(quoted, ends))
        if part.is_regular:  # one lexeme, which is over where an end is found
            return _Part(self.rules.rule(f"({part.text}) ({end})", "[lazy]"), False)
        return _Part(f"{part.text} ({end})", False)

    def _const_string(self, form: Format, path: str, ends: list[str]) -> _Part:
        return self._ended(_Part(quoted(_string(form, "value", path)), True), ends)

    def _any_text(self, form: Format, path: str, ends: list[str]) -> _Part:
        return self._ended(_Part(text_without(_strings(form, "excludes", path)), True), ends)

    def _regex(self, form: Format, path: str, ends: list[str]) -> _Part:
        pattern = _string(form, "pattern", path)
        if flaw := flaw_of(pattern):
            raise SchemaError(f"{path}.pattern", flaw)
        return self._ended(_Part(expression(pattern), True), ends)

    def _text(self, form: Format, path: str, ends: list[str]) -> _Part:
        given = (*form.get("patterns", ()), *form.get("matches", ()))
        texts = [text_without(form.get("excludes", [])), *map(expression, given)]
        return self._ended(_Part(f"({' & '.join(texts)})", True), ends)

    def _json_schema(self, form: Format, path: str, ends: list[str]) -> _Part:
        schema = form.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise SchemaError(f"{path}.json_schema", "must be a JSON schema")
        most = form.get("max_whitespace_cnt", MAX_WHITESPACE)
        if not isinstance(most, int) or not 1 <= most <= MAX_WHITESPACE:
            raise SchemaError(f"{path}.max_whitespace_cnt", f"must be from 1 to {MAX_WHITESPACE}")
        options = json_options(is_compact=form.get("is_compact") is True, max_whitespace=most)
        name = self.rules.schema(schema | {"x-guidance": options})
        return self._ended(_Part(name, False), ends)

    def _grammar(self, form: Format, path: str, ends: list[str]) -> _Part:
        return self._ended(_Part(self.rules.grammar(_string(form, "grammar", path)), False), ends)

    def _sequence(self, form: Format, path: str, ends: list[str]) -> _Part:
        parts: list[_Part] = []
        elements = _list(form, "elements", path)
        for index, one in enumerate(elements):
            place, is_last = f"{path}.elements[{index}]", index == len(elements) - 1
            part = self.part(one, place, ends if is_last and not _is_text(one) else [])
            if part.is_regular and parts and parts[-1].is_regular:
                part = _Part(f"{parts.pop().text} {part.text}", True)
            parts.append(part)
        if _is_text(elements[-1]):
            parts[-1] = self._ended(parts[-1], ends)
        if len(parts) == 1:
            return parts[0]
        return _Part(self.rules.rule(" ".join(map(self.body, parts))), False)

    def _or(self, form: Format, path: str, ends: list[str]) -> _Part:
        elements = _list(form, "elements", path)
        places = [f"{path}.elements[{index}]" for index in range(len(elements))]
        if all(_is_text(one) for one in elements):
            parts = [self.part(one, place, []) for one, place in zip(elements, places, strict=True)]
            return self._ended(_Part(f"({' | '.join(one.text for one in parts)})", True), ends)
        parts = [self.part(one, place, ends) for one, place in zip(elements, places, strict=True)]
        return _Part(self.rules.rule(" | ".join(map(self.body, parts))), False)

    def _optional(self, form: Format, path: str, ends: list[str]) -> _Part:
        part = self.part(form.get("content"), f"{path}.content", ends)
        if not ends:
            return _Part(f"({part.text})?", part.is_regular)
        return _Part(f"({part.text} | {' | '.join(map(quoted, ends))})", False)

    def _tag(self, form: Format, path: str, ends: list[str]) -> _Part:
        begin = quoted(_string(form, "begin", path, may_be_empty=True))
        return _Part(f"{begin} {self._content(form, path, ends)}", False)

    def _content(self, form: Format, path: str, ends: list[str]) -> str:
        """A tag's content and its end, and one of the ends behind that."""
        end = form.get("end", "")
        own = end if isinstance(end, list) else [end]
        if not own or not all(isinstance(one, str) and (one or len(own) == 1) for one in own):
            raise SchemaError(f"{path}.end", "must be a string, or a list of some, none empty")
        if own == [""]:
            return self.body(self.part(form.get("content"), f"{path}.content", ends))
        part = self.part(form.get("content"), f"{path}.content", own)
        return self._ended(part, ends).text

    def _triggered_tags(self, form: Format, path: str, ends: list[str]) -> _Part:
        triggers = _strings(form, "triggers", path)
        if not triggers:
            raise SchemaError(f"{path}.triggers", "must be a list of strings that are not empty")
        excludes = [*_strings(form, "excludes", path), *ends]
        bodies: dict[str, list[str]] = {}
        for index, tag in enumerate(_list(form, "tags", path)):
            place = f"{path}.tags[{index}]"
            begin = _string(tag, "begin", place)
            found = [one for one in triggers if begin.startswith(one)]
            if not found:
                raise SchemaError(f"{place}.begin", "must begin with one of the triggers")
            trigger = min(found, key=len)  # it is found first
            rest = quoted(begin[len(trigger) :])
            bodies.setdefault(trigger, []).append(f"{rest} {self._content(tag, place, [])}")
        free = text_without(excludes)
        calls = []
        for trigger, texts in bodies.items():
            head = self.rules.rule(f"{free} {quoted(trigger)}", "[lazy]")
            calls.append(self.rules.rule(f"{head} ({' | '.join(texts)})"))
        call = self.rules.rule(" | ".join(calls))
        none = _Part(text_without([*excludes, *triggers]), True)
        rest = self.body(self._ended(none, ends))
        is_needed = form.get("at_least_one") is True
        if form.get("stop_after_first") is True:
            one = self.body(self._ended(_Part(call, False), ends))
            return _Part(one if is_needed else f"({one} | {rest})", False)
        return _Part(f"{call}{'+' if is_needed else '*'} {rest}", False)

    def _tags_with_separator(self, form: Format, path: str, ends: list[str]) -> _Part:
        tags = [
            self._tag(tag, f"{path}.tags[{index}]", []).text
            for index, tag in enumerate(_list(form, "tags", path))
        ]
        tag = self.rules.rule(" | ".join(tags))
        text = tag
        if form.get("stop_after_first") is not True:
            separator = quoted(_string(form, "separator", path, may_be_empty=True))
            text = f"{tag} ({separator} {tag})*"
        if form.get("at_least_one") is not True:
            text = f"({text})?"
        return self._ended(_Part(self.rules.rule(text), False), ends)


_FORMATS: Final = (
    *("const_string", "json_schema", "regex", "grammar", "any_text", "sequence", "or"),
    *("optional", "tag", "triggered_tags", "tags_with_separator"),
)
_OWN_FORMAT: Final = "text"


def _unknown(kind: object) -> str:
    return f"must be one of {', '.join(_FORMATS)}, got {str(kind)[:80]!r}"


def _is_text(form: Any) -> bool:
    """Whether a format is regular by itself."""
    return isinstance(form, dict) and form.get("type") in _TEXT_FORMATS


def _string(form: Any, key: str, path: str, *, may_be_empty: bool = False) -> str:
    value = form.get(key) if isinstance(form, dict) else None
    if isinstance(value, str) and (value or may_be_empty or key == "value"):
        return value
    raise SchemaError(
        f"{path}.{key}", "must be a string" + ("" if may_be_empty else " that is not empty")
    )


def _strings(form: Format, key: str, path: str) -> list[str]:
    value = form.get(key, [])
    if isinstance(value, list) and all(isinstance(one, str) and one for one in value):
        return value
    raise SchemaError(f"{path}.{key}", "must be a list of strings that are not empty")


def _list(form: Format, key: str, path: str) -> list[Any]:
    value = form.get(key)
    if isinstance(value, list) and value:
        return value
    raise SchemaError(f"{path}.{key}", "must be a list that is not empty")
