"""Which route a path belongs to, under a bounded number of names, and which methods it has.

Knows the application's routes and their templates. A path that no route has is `other`, whatever it
is, so that strangers cannot make series.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi.routing import iter_route_contexts

from instrumentation.metrics.server import OTHER

ICON_PATH = "/favicon.ico"
"""What browsers ask for beside a page that names no icon."""
FILES_ROUTE = "/live/{file}"
"""One route for all of them, so that each has no series of its own."""
METRICS_PATHS = frozenset({"/metrics", "/load"})
"""Asked by scrapers and load balancers: no news in the log, and open without `guard_metrics`."""
_READING = frozenset({"GET", "HEAD"})
_NONE: frozenset[str] = frozenset()
_MAX_COMPARED = 128


class RouteNames:
    """Templates by path; made from the routes once they are all there.

    A route that can be read has HEAD beside GET, and each has OPTIONS, whether or not it says so.
    """

    def __init__(self, routes: Sequence[Any]) -> None:
        self._exact: dict[str, frozenset[str]] = {}
        self._patterns: list[tuple[Any, str, frozenset[str]]] = []
        for route in iter_route_contexts(routes):
            template = route.path
            if template is None:
                continue
            if route.methods is None:  # a mount
                self._patterns.append((route.path_regex, f"{template}/*", _complete(_READING)))
            elif "{" in template:
                self._patterns.append((route.path_regex, template, _complete(route.methods)))
            else:
                others = self._exact.get(template, _NONE)
                self._exact[template] = _complete(others.union(route.methods))

    def find(self, path: str, method: str) -> tuple[str, str]:
        """The template and the method; each is `other` where there is no such thing."""
        found = OTHER
        for template, methods in self._matches(path):
            if method in methods:
                return template, method
            found = template if found == OTHER else found
        return found, OTHER

    def methods(self, path: str) -> frozenset[str]:
        """All methods of a path; none where there is no such path."""
        matches = [methods for _, methods in self._matches(path)]
        return matches[0] if len(matches) == 1 else _NONE.union(*matches)

    def nearest(self, path: str) -> str | None:
        """The route that was probably meant by a path that no route has."""
        known = [*self._exact, *(template for _, template, _ in self._patterns)]
        near = difflib.get_close_matches(path[:_MAX_COMPARED], known, n=1)
        return near[0] if near else None

    def _matches(self, path: str) -> Iterator[tuple[str, frozenset[str]]]:
        methods = self._exact.get(path)
        if methods is not None:
            yield path, methods
            return
        for pattern, template, methods in self._patterns:
            if pattern.match(path):
                yield template, methods


def route_path(scope: Mapping[str, Any]) -> str:
    """The path of an ASGI scope as routes know it, without the prefix of a proxy."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    is_below = path == root or path.startswith(f"{root}/")
    return path[len(root) :] or "/" if is_below else path


def _complete(methods: Any) -> frozenset[str]:
    return frozenset(methods) | {"OPTIONS"} | (_READING if "GET" in methods else _NONE)
