"""NVTX: our phases and steps as ranges that Nsight Systems, or any other such tool, shows.

Knows the `nvtx` package and when a tool listens. Does not know who has phases. The package is
imported only when NVTX is on, so it costs nothing otherwise.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

DOMAIN = "isinglass"
_INJECTION = "NVTX_INJECTION64_PATH" if sys.maxsize > 1 << 32 else "NVTX_INJECTION32_PATH"


class NVTXRanges:
    """Ranges in the domain `isinglass`; one object serves all threads.

    Every name is registered with the tool once and kept for the life of the process: phases, layers
    and the distinct step labels.
    """

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._handles: dict[str, Any] = {}
        self.push = domain.push_range
        self.pop = domain.pop_range

    def prepare(self, name: str) -> Any:
        """A name as the tool's own string."""
        handle = self._handles.get(name)
        if handle is None:
            handle = self._handles[name] = self._domain.get_event_attributes(name)
        return handle


class NVTXChoice(NamedTuple):
    """Whether ranges are emitted; if not, why."""

    ranges: NVTXRanges | None
    reason: str


def choose_nvtx(setting: str, environment: Mapping[str, str] = os.environ) -> NVTXChoice:
    """Carry out `nvtx` = off, on or auto (on where a tool has announced itself).

    Never raises for want of a tool or of the package: the reason says what is missing.
    """
    if setting == "off":
        return NVTXChoice(None, "nvtx=off")
    is_announced = bool(environment.get(_INJECTION))
    if setting == "auto" and not is_announced:
        return NVTXChoice(None, f"no tool is attached ({_INJECTION} is not set)")
    try:
        import nvtx
    except ImportError as error:
        return NVTXChoice(None, f"the package nvtx cannot be imported ({error}); pip install nvtx")
    if not nvtx.enabled():
        return NVTXChoice(None, "NVTX_DISABLE is set")
    domain = nvtx.get_domain(DOMAIN)
    # Without a listener the package hands out a stand-in of another class.
    if not isinstance(domain, nvtx.Domain):
        where = f"the tool at {environment[_INJECTION]}" if is_announced else "no tool"
        verb = "does not listen to this domain" if is_announced else "is attached"
        return NVTXChoice(None, f"{where} {verb}; start the process under one, as `nsys profile`")
    return NVTXChoice(NVTXRanges(domain), "a tool listens")
