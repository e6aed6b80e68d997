"""`/docs`: what can be asked of this server, for people; `/openapi.json` as one page of HTML.

Knows OpenAPI's descriptions. Without scripts, and without anything from elsewhere: the usual
viewers have their scripts fetched from other hosts.
"""

import base64
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --muted: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 0.92em ui-monospace, Menlo, "DejaVu Sans Mono", monospace; }
h2 { margin: 2.2rem 0 0.3rem; padding-top: 0.8rem; border-top: 1px solid var(--line); }
h2 { font-size: 1.1rem; }
table { border-collapse: collapse; width: 100%; margin: 0.6rem 0; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 1rem 0.25rem 0; }
td { border-top: 1px solid var(--line); overflow-wrap: anywhere; }
td:first-child { overflow-wrap: normal; }
th, .muted { color: var(--muted); font-weight: normal; }
nav li { list-style: none; } nav ul { padding: 0; columns: 18rem; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": f"default-src 'self'; style-src 'sha256-{_STYLE_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_SCHEMAS = "#/components/schemas/"
_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "default": "default {}",
}


def make_router(app: FastAPI) -> APIRouter:
    """The page's route; the page is made when it is first asked for."""
    router = APIRouter(include_in_schema=False)
    page = functools.cache(lambda: api_page(app.openapi()))

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        """What can be asked of this server."""
        return HTMLResponse(page(), headers=_HEADERS)

    return router


def api_page(description: Mapping[str, Any]) -> str:
    """One page of HTML.

    Args:
        description: a document of OpenAPI 3.1.
    """
    title = f"{description['info']['title']} {description['info']['version']}"
    routes = list(_routes(description))
    schemas = description.get("components", {}).get("schemas", {})
    parts = [
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>',
        '<link rel="icon" href="favicon.ico">',
        f"<h1>{escape(title)}</h1>",
        '<p class="muted">For programs: <a href="openapi.json">openapi.json</a>. Where the server '
        "has keys, send one as <code>Authorization: Bearer KEY</code>.</p>",
        "<nav><ul>",
        *(f'<li><a href="#{_anchor(name)}"><code>{escape(name)}</code></a>' for name, _ in routes),
        "</ul></nav>",
        *(_section(name, operation) for name, operation in routes),
        *(_schema_section(name, schema) for name, schema in sorted(schemas.items())),
    ]
    return "\n".join(parts) + "\n"


def _routes(description: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            yield f"{method.upper()} {path}", operation


def _section(name: str, operation: Mapping[str, Any]) -> str:
    parts = [_heading(name), _text(operation.get("description", ""))]
    parameters = operation.get("parameters", [])
    if parameters:
        rows = [(one["name"], {**one["schema"], **one}, one["required"]) for one in parameters]
        parts.append(_fields(rows))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        parts.append(f"<p>Body: {_kind(body['schema'])}</p>")
    answers = operation["responses"].items()
    told = [f"{status} {one['description']}" for status, one in answers if status != "default"]
    parts.append(f'<p class="muted">{escape(" · ".join(told))}</p>')
    for status, answer in answers:
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        if status == "200" and "$ref" in schema:
            parts.append(f"<p>Answer: {_kind(schema)}</p>")
    return "\n".join(parts)


def _schema_section(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [(key, one, key in required) for key, one in schema.get("properties", {}).items()]
    return "\n".join([_heading(name), _text(schema.get("description", "")), _fields(rows)])


def _fields(rows: Sequence[tuple[str, Mapping[str, Any], bool]]) -> str:
    lines = ["<table><tr><th>field<th>type<th>"]
    for name, schema, is_required in rows:
        notes = [schema.get("description", "")]
        notes += ["Required."] if is_required else []
        notes += ["Deprecated."] if schema.get("deprecated") else []
        text = escape(" ".join(note for note in notes if note))
        lines.append(f"<tr><td><code>{escape(name)}</code><td>{_kind(schema)}<td>{text}")
    return "\n".join([*lines, "</table>"])


def _kind(schema: Mapping[str, Any]) -> str:
    """What a value is, in few words, linked to where it is described."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_SCHEMAS)
        return f'<a href="#{_anchor(name)}">{escape(name)}</a>'
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(repr(one))}</code>" for one in values)
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array" and schema.get("items"):
        kind = f"array of {_kind(schema['items'])}"
    bounds = [
        text.format(schema[key]) for key, text in _BOUNDS.items() if schema.get(key) is not None
    ]
    return kind + "".join(f", {escape(one)}" for one in bounds)


def _heading(name: str) -> str:
    return f'<h2 id="{_anchor(name)}"><code>{escape(name)}</code></h2>'


def _text(text: str) -> str:
    return f"<p>{escape(' '.join(text.split()))}</p>" if text else ""


def _anchor(name: str) -> str:
    return "".join(one if one.isalnum() else "-" for one in name)
