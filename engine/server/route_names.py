"""Which route a path belongs to, under a bounded number of names.

Knows the application's routes and their templates. A path that no route has is `other`, whatever it
is, so that strangers cannot make series.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.routing import iter_route_contexts

OTHER = "other"
_READING = frozenset({"GET", "HEAD"})


class RouteNames:
    """Templates by path; made from the routes once they are all there."""

    def __init__(self, routes: Sequence[Any]) -> None:
        self._exact: dict[str, set[str]] = {}
        self._patterns: list[tuple[Any, str, set[str]]] = []
        for route in iter_route_contexts(routes):
            template = route.path
            if template is None:
                continue
            if route.methods is None:  # a mount
                self._patterns.append((route.path_regex, f"{template}/*", set(_READING)))
            elif "{" in template:
                self._patterns.append((route.path_regex, template, set(route.methods)))
            else:
                self._exact.setdefault(template, set()).update(route.methods)

    def find(self, path: str, method: str) -> tuple[str, str]:
        """The template and the method; each is `other` where there is no such thing."""
        methods = self._exact.get(path)
        if methods is not None:
            return path, method if method in methods else OTHER
        found = OTHER
        for pattern, template, allowed in self._patterns:
            if pattern.match(path):
                if method in allowed:
                    return template, method
                found = template
        return found, OTHER


def route_path(scope: Mapping[str, Any]) -> str:
    """The path of an ASGI scope as routes know it, without the prefix of a proxy."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"
