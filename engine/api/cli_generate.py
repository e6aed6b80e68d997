"""`isinglass generate`: text to the terminal while it is made."""

import argparse
import sys

from engine.api.cli_flags import (
    add_engine_flags,
    add_sampling_flags,
    engine_arguments,
    sampling_arguments,
)
from engine.types.sampling import RequestOutputKind

_EXAMPLES = """\
examples:
  isinglass generate "Once upon a time" --max-tokens 64 --temperature 0
  isinglass generate --chat "Name three rivers." --temperature 0.8 --seed 7
  echo "A prompt from a pipe" | isinglass generate
  isinglass generate "A haiku:" --n 3 --temperature 0.9 --trace-dir runs
"""

# --seed is the request's; the engine's own matters only for requests that bring none.
_SKIPPED = frozenset({"seed"})


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Mount the command."""
    parser = commands.add_parser(
        "generate",
        help="generate text for prompts",
        description="Generate text for each prompt and print it while it is made.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="*", help="prompts; without any, standard input is one")
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message: use the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message for --chat")
    add_sampling_flags(parser)
    add_engine_flags(parser, skip=_SKIPPED, defaults={"log_level": "warning"})
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate and print; returns the exit code."""
    from engine.api.llm import LLM, chat_prompt
    from engine.errors import ConfigError

    prompts = arguments.prompt or [sys.stdin.read()]
    if arguments.system is not None and not arguments.chat:
        raise ConfigError("--system needs --chat")
    with LLM(**engine_arguments(arguments, skip=_SKIPPED)) as llm:
        params = llm.get_default_sampling_params().clone(
            output_kind=RequestOutputKind.DELTA, **sampling_arguments(arguments)
        )
        system = (
            [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
        )
        for number, text in enumerate(prompts):
            prompt = text
            if arguments.chat:
                messages = [*system, {"role": "user", "content": text}]
                prompt = chat_prompt(llm.get_tokenizer(), messages)
            llm.llm_engine.add_request(str(number), prompt, params)
        printer = _Printer(prompts, params.n, echo=not arguments.chat)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                for completion in output.outputs:
                    printer.add(
                        int(output.request_id),
                        completion.index,
                        completion.text,
                        ended=completion.finished(),
                    )
        if llm.run_dir is not None:
            print(
                f"\nrecorded in {llm.run_dir}\n"
                f"  isinglass trace summary {llm.run_dir}\n"
                f"  isinglass trace convert {llm.run_dir}",
                file=sys.stderr,
            )
    return 0


class _Printer:
    """Prints one sequence at a time as it grows; the others wait until it is done."""

    def __init__(self, prompts: list[str], n: int, *, echo: bool) -> None:
        self._prompts = prompts
        self._echo = echo
        self._order = [(prompt, index) for prompt in range(len(prompts)) for index in range(n)]
        self._text = dict.fromkeys(self._order, "")
        self._ended: set[tuple[int, int]] = set()
        self._current = -1
        self._next()

    def add(self, prompt: int, index: int, text: str, *, ended: bool) -> None:
        """Take in new text of one sequence."""
        key = (prompt, index)
        self._text[key] += text
        if ended:
            self._ended.add(key)
        self._flush()

    def _flush(self) -> None:
        while self._current < len(self._order):
            key = self._order[self._current]
            sys.stdout.write(self._text[key])
            self._text[key] = ""
            if key not in self._ended:
                break
            sys.stdout.write("\n")
            self._next()
        sys.stdout.flush()

    def _next(self) -> None:
        self._current += 1
        if self._current >= len(self._order):
            return
        prompt, index = self._order[self._current]
        many = len(self._order) > 1
        if many:
            sys.stdout.write(f"--- prompt {prompt + 1}, sequence {index + 1} ---\n")
        if self._echo:
            sys.stdout.write(self._prompts[prompt])
