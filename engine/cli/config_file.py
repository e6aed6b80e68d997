"""`isinglass serve --config FILE`: settings in YAML, under the flags' names.

    model: ./SmolLM2-1.7B-Instruct
    port: 9000
    max-model-len: 4096
    served_model_name: [small, smollm2]

Knows names and the form of the file; not which values a setting may have.
"""

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError


def read_config_file(path: str, lists: Mapping[str, bool]) -> dict[str, Any]:
    """The settings of a file, by the names that flags have in Python.

    Args:
        path: of the YAML file.
        lists: every setting there is, and whether it takes several values; one alone is a list of
            one then.

    Raises:
        ConfigError: the file cannot be read, is no flat mapping, or has a setting twice, without a
            value, or one that there is not.
    """
    settings: dict[str, Any] = {}
    for key, value in _read_pairs(path):
        name = str(key).replace("-", "_")
        if name not in lists:
            raise ConfigError(f"{path}: unknown setting {str(key)!r}.{_hint(name, lists)}")
        if name in settings:
            raise ConfigError(f"{path}: {key} is set twice.")
        if value is None:
            raise ConfigError(f"{path}: {key} has no value; leave the line out for the default.")
        if isinstance(value, dict):
            raise ConfigError(
                f"{path}: {key} holds further settings; they all belong to the top level."
            )
        settings[name] = [value] if lists[name] and not isinstance(value, list) else value
    return settings


def _hint(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _read_pairs(path: str) -> list[tuple[Any, Any]]:
    import yaml  # type: ignore[import-untyped]

    try:
        text = Path(path).read_text(encoding="utf-8")
        # The node tree, since the plain loader lets the last of two equal keys win in silence.
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None or node.tag == "tag:yaml.org,2002:null":
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: expected lines of the form 'setting: value'.")
        loader = yaml.SafeLoader("")
        return [
            (loader.construct_object(key, deep=True), loader.construct_object(value, deep=True))
            for key, value in node.value
        ]
    except OSError as error:
        raise ConfigError(f"the config file cannot be read: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deep; settings belong to the top level.") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
