"""The files of the live page, read once; no path that a client gives is ever opened.

They need no key, so that a browser can show the page and ask for one; the stream does.
"""

from pathlib import Path
from typing import NamedTuple

from engine.server.http.route_names import ICON_PATH

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOLDER = Path(__file__).parent / "page"


class PageFile(NamedTuple):
    """One file of the page."""

    media_type: str
    content: bytes


def page_files() -> dict[str, PageFile]:
    """All files of the page, by path."""
    files = {
        f"/live/{path.name}": PageFile(_TYPES[path.suffix], path.read_bytes())
        for path in sorted(_FOLDER.iterdir())
        if path.suffix in _TYPES
    }
    files["/"] = files.pop("/live/page.html")
    files[ICON_PATH] = files["/live/icon.svg"]
    return files


PUBLIC_PATHS = frozenset(page_files())
"""What is served without a key."""
