"""Classes as names, so that only plain values cross to the core.

A class given to the engine (a logits processor) is sent as `module:QualifiedName`. One that the
caller's script defines belongs to `__main__`; the core then loads that script's file under the
name `__mp_main__`, as multiprocessing does, and the script needs a `__main__` guard.
"""

import os
import sys
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.types.sampling_checks import short


def portable_classes(config: EngineConfig) -> tuple[dict[str, dict[str, Any]], str | None]:
    """The configuration as plain values, and the script that the core must load, if any.

    Raises:
        ConfigError: a class that another process cannot import.
    """
    settings = config.to_dict()
    names = [_name_of(spec) for spec in config.model.logits_processors]
    settings["model"]["logits_processors"] = names
    if not any(name.startswith("__mp_main__:") for name in names):
        return settings, None
    main_path = getattr(sys.modules["__main__"], "__file__", None)
    if main_path is None or not os.path.isfile(main_path):  # a script from standard input has one
        raise ConfigError(
            "a logits processor defined in an interactive session or a script from standard input "
            "cannot be imported by the engine core. Put it into a module, or use "
            "enable_multiprocessing=False."
        )
    return settings, main_path


def _name_of(spec: Any) -> str:
    if isinstance(spec, str):
        return spec
    if not isinstance(spec, type):
        raise ConfigError(
            "logits_processors must hold classes or their names ('package.module:Class'), got "
            f"{short(spec)}. Give the class itself, not an instance or a function: the engine core "
            "makes the instance."
        )
    if "<locals>" in spec.__qualname__:
        raise ConfigError(
            f"logits processor {spec.__qualname__} is defined inside a function, so the engine "
            "core cannot import it. Put it at the top level of a module that can be imported."
        )
    module = "__mp_main__" if spec.__module__ == "__main__" else spec.__module__
    return f"{module}:{spec.__qualname__}"
