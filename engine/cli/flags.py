"""Command-line flags from dataclass and struct fields, and their values back."""

import argparse
import ast
import inspect
import textwrap
import typing
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from engine.config import GROUPS
from engine.types.sampling import SamplingParams

_NOT_ON_COMMAND_LINE = frozenset(
    {"output_kind", "extra_args", "all_stop_token_ids", "bad_words_token_ids", "detokenize"}
)
_TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduler",
    "process": "processes and logs",
    "observability": "metrics, traces, profiles and the flight recorder",
}


def add_engine_flags(
    parser: argparse.ArgumentParser,
    *,
    skip: frozenset[str] = frozenset(),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """One flag per engine setting, in the configuration's groups.

    Args:
        parser: where to add them.
        skip: settings without a flag.
        defaults: what the command has in place of the configuration's own defaults.
    """
    for name, group in GROUPS.items():
        section = parser.add_argument_group(f"engine: {_TITLES[name]}")
        add_fields(section, group, skip=skip, defaults=defaults)
    parser.set_defaults(**defaults)


def add_fields(
    section: Any,
    group: type,
    *,
    skip: frozenset[str] = frozenset(),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """One flag per setting of one dataclass of settings, in a section of a command's help."""
    for spec in fields(group):
        if spec.name not in skip:
            _add_flag(
                section,
                spec.name,
                str(spec.type),
                defaults.get(spec.name, spec.default),
                spec.metadata["help"],
                spec.metadata["choices"],
            )


def engine_arguments(
    arguments: argparse.Namespace, *, skip: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The engine settings that were given, under their names."""
    names = [s.name for group in GROUPS.values() for s in fields(group) if s.name not in skip]
    given = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per sampling parameter."""
    section = parser.add_argument_group("sampling (as in vLLM; default: the model's own)")
    helps = field_docs(SamplingParams)
    hints = typing.get_type_hints(SamplingParams)
    defaults = dict(
        zip(
            SamplingParams.__struct_fields__[::-1],
            SamplingParams.__struct_defaults__[::-1],
            strict=False,
        )
    )
    for name in SamplingParams.__struct_fields__:
        if name not in _NOT_ON_COMMAND_LINE:
            _add_flag(section, name, str(hints[name]), defaults[name], helps[name], None)


def sampling_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, under their names."""
    given = {name: getattr(arguments, name, None) for name in SamplingParams.__struct_fields__}
    return {name: value for name, value in given.items() if value is not None}


def field_docs(kind: type) -> dict[str, str]:
    """The docstring below each annotated field of a class."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = ast.get_docstring(ast.Module([after], [])) if _is_text(after) else None
            docs[statement.target.id] = text or ""
    return docs


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _add_flag(
    section: Any,
    name: str,
    annotation: str,
    default: Any,
    help: str,
    choices: tuple[str, ...] | None,
) -> None:
    """The flag's kind follows from the annotation; an absent flag leaves the default in force."""
    flag = "--" + name.replace("_", "-")
    text = help.replace("%", "%%")
    if default not in (None, (), False, ""):
        shown = " ".join(default) if isinstance(default, tuple) else default
        text += f" (default: {shown})"
    common: dict[str, Any] = {"dest": name, "default": None, "help": text}
    if "bool" in annotation:
        section.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif "dict" in annotation:
        section.add_argument(flag, type=_pairs, metavar="ID=BIAS,…", **common)
    elif "list" in annotation or "tuple" in annotation:
        item = int if "list[int]" in annotation else str
        section.add_argument(
            flag, nargs="+", action="extend", type=item, metavar=item.__name__.upper(), **common
        )
    else:
        kind = float if "float" in annotation else int if "int" in annotation else str
        metavar = None if choices else kind.__name__.upper()
        section.add_argument(flag, type=kind, choices=choices, metavar=metavar, **common)


def _pairs(text: str) -> dict[int, float]:
    try:
        return {int(k): float(v) for k, _, v in (part.partition("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected TOKEN_ID=BIAS pairs with commas, such as 50=-100,7=2.5; got {text!r}"
        ) from None
