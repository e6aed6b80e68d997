"""argparse with short errors: one line, what was probably meant, and where the list is.

Knows command lines in general, and what vLLM's users are used to; no command.
"""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_ONE_DEVICE = "this engine runs on one device"

VLLM_HINTS = {
    "--model": "the model is the first argument, without a flag",
    "--disable-log-requests": "requests are logged by the access log; see --disable-access-log",
    "--enable-log-requests": "they are, by the access log; see --disable-access-log",
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "--quantization": "weights are used as the checkpoint has them, GGUF included",
    "--enable-lora": "LoRA adapters are not supported",
    "--trust-remote-code": "code of a checkpoint is never run",
    "--host": "give --base-url",
    "--backend": "any OpenAI-compatible server; see --endpoint",
    "--save-result": "--save FILE",
}
"""What to do instead of a flag that vLLM's users know and a command does not have."""


class CommandParser(argparse.ArgumentParser):
    """A parser, and that of every command below it, whose errors do not print all its usage.

    An option is taken by its whole name only: a slip must not become another one.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """See argparse; a command refuses what it does not know, since it alone knows its flags."""
        found, extra = super().parse_known_args(args, namespace)
        if extra and self._subparsers is None:
            self.error(self._unknown(extra))
        return found, extra

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with exit code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see `{self.prog} --help`)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _did_you_mean(str(value), map(str, action.choices or ()))
            raise

    def _unknown(self, extra: Sequence[str]) -> str:
        flags = [one.partition("=")[0] for one in extra if one.startswith("-")]
        if not flags:
            return f"too many arguments: {' '.join(extra)}"
        name = flags[0]
        if name in VLLM_HINTS and name not in self._option_string_actions:
            return f"unknown option {name}: {VLLM_HINTS[name]}"
        return f"unknown option {name}{_did_you_mean(name, self._option_string_actions)}"


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
