"""`isinglass serve`: the server on the command line. Flags come from the settings' own fields."""

import argparse
from dataclasses import fields

from engine.api.cli_flags import add_engine_flags, add_fields, engine_arguments
from engine.server.config import ServerConfig

_EXAMPLES = """\
examples:
  isinglass serve
  isinglass serve ./SmolLM2-1.7B-Instruct --port 9000 --max-model-len 4096
  isinglass serve --config serve.yaml --api-key-file keys.txt
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Mount the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible API",
        description="Serve a model over an OpenAI-compatible HTTP API.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", default=None, help="folder, .gguf file or hub name; default: embedded"
    )
    add_fields(parser.add_argument_group("server"), ServerConfig)
    add_engine_flags(parser, skip=frozenset({"model"}))
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve; returns the exit code."""
    from engine.server.serve import run_server

    given = {spec.name: getattr(arguments, spec.name) for spec in fields(ServerConfig)}
    config = ServerConfig.from_kwargs(**{k: v for k, v in given.items() if v is not None})
    return run_server(config, engine_arguments(arguments))
