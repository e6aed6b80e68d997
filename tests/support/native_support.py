"""Whether the native kernels run on this machine; shared by their tests."""

import pytest

from engine.errors import ConfigError
from engine.native.library import load_library


def _reason() -> str:
    try:
        load_library()
    except ConfigError as error:
        return str(error)
    return ""


REASON = _reason()
needs_native = pytest.mark.skipif(bool(REASON), reason=f"no native kernels: {REASON}")
