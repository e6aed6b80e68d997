"""`isinglass serve`: the server on the command line. Flags come from the settings' own fields."""

import argparse
import functools
import os
import threading
from dataclasses import Field, fields
from typing import Any

from engine.cli.config_file import read_config_file
from engine.cli.flags import add_engine_flags, add_fields, engine_arguments
from engine.config import GROUPS, check_setting
from engine.errors import ConfigError
from engine.server.config import ServerConfig
from engine.server.process.stop_signals import ended_by_signals

_DESCRIPTION = """\
Serve a model over an OpenAI-compatible HTTP API.

It listens at once. /health says 503 until the engine is up, and requests get 503 with Retry-After;
a line that begins with "ready:" then says what was decided. SIGTERM or Ctrl-C lets running requests
end (--shutdown-timeout); a second signal ends everything at once.
"""

_EXAMPLES = """\
examples:
  isinglass serve                                        the embedded model at 127.0.0.1:8000
  isinglass serve ./SmolLM2-1.7B-Instruct --port 9000 --max-model-len 4096
  isinglass serve --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile c.pem --ssl-keyfile k.pem
  isinglass serve --max-num-queued-reqs 64               refuse with 429 rather than let wait
  isinglass serve --config serve.yaml --port 9000        flags win over the file

exit codes: 0 ended by a signal; 1 a setting is wrong, or the engine did not start, or died; 2 wrong
usage; 130 or 143 a second signal cut requests off.
"""

_ENGINE_DEFAULTS = {"max_logprobs": 20}
"""What a server has in place of the engine's own defaults: clients are not its owner."""

_SECTIONS = {
    "host": "server: where it listens",
    "served_model_name": "server: how the model is presented",
    "api_key": "server: who may use it",
    "max_body_bytes": "server: what it refuses",
    "shutdown_timeout": "server: how it ends",
    "enable_debug_routes": "server: what it shows",
}
"""Title of each section of the help, by the first of its settings."""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Mount the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible API",
        usage="isinglass serve [MODEL] [--config FILE] [options]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", default=None, help="folder, .gguf file or hub name; default: embedded"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of settings, one a line, under the names of these flags; flags win over it",
    )
    names = [spec.name for spec in fields(ServerConfig)]
    starts = [names.index(name) for name in _SECTIONS]
    for title, start, end in zip(
        _SECTIONS.values(), starts, [*starts[1:], len(names)], strict=True
    ):
        others = frozenset(names) - set(names[start:end])
        add_fields(parser.add_argument_group(title), ServerConfig, skip=others)
    add_engine_flags(
        parser, skip=frozenset({"model", "enable_multiprocessing"}), defaults=_ENGINE_DEFAULTS
    )
    # Seen in the help only: what is None here was not given, and the file may say something else.
    parser.set_defaults(**dict.fromkeys(_ENGINE_DEFAULTS))
    lists = {
        action.dest: action.nargs == "+"
        for action in parser._actions
        if action.dest not in ("help", "config")
    }
    parser.set_defaults(handler=functools.partial(run, lists=lists))


def run(arguments: argparse.Namespace, *, lists: dict[str, bool]) -> int:
    """Serve; returns the exit code."""
    _open_standard_streams()
    with ended_by_signals():  # what is imported here takes seconds
        return _run(arguments, lists)


def _run(arguments: argparse.Namespace, lists: dict[str, bool]) -> int:
    from engine.server.process.serve import run_server
    from engine.server.process.threads import leave

    if arguments.config is not None:
        rules = {
            spec.name: spec for kind in (ServerConfig, *GROUPS.values()) for spec in fields(kind)
        }
        for name, value in read_config_file(arguments.config, lists).items():
            if getattr(arguments, name) is None:
                _check_setting_of_file(arguments.config, rules[name], value)
                setattr(arguments, name, value)
    given: dict[str, Any] = {
        spec.name: getattr(arguments, spec.name) for spec in fields(ServerConfig)
    }
    config = ServerConfig.from_kwargs(**{k: v for k, v in given.items() if v is not None})
    others = threading.enumerate()  # of a program that calls `main`
    code = run_server(config, _ENGINE_DEFAULTS | engine_arguments(arguments))
    return leave(code, others=others)


def _check_setting_of_file(path: str, rule: "Field[Any]", value: Any) -> None:
    """Refuse a wrong value where it is still known to be the file's."""
    as_set = tuple(value) if isinstance(value, list) and "tuple" in str(rule.type) else value
    try:
        check_setting(rule.name, as_set, rule.type, rule.metadata)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _open_standard_streams() -> None:
    """Fill descriptors 0 to 2 where they are closed, lest a socket becomes somebody's output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
