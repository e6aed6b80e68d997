"""`isinglass generate`: text to the terminal while it is made."""

import argparse
import sys

from engine.cli.flags import (
    add_engine_flags,
    add_sampling_flags,
    engine_arguments,
    sampling_arguments,
)
from engine.cli.logprobs import logprob_lines
from engine.errors import ConfigError, PromptError
from engine.types.logprobs import PromptLogprobs
from engine.types.outputs import CompletionOutput
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
    from engine.api.chat import chat_prompt
    from engine.api.llm import LLM

    if sys.stdout is None:
        raise ConfigError("standard output is closed; there is nowhere to print to")
    prompts = arguments.prompt or [_read_standard_input()]
    if arguments.system is not None and not arguments.chat:
        raise ConfigError("--system needs --chat")
    with LLM(**engine_arguments(arguments, skip=_SKIPPED)) as llm:
        if llm.metrics_url is not None:
            print(f"metrics at {llm.metrics_url}", file=sys.stderr)
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
        errors = []
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                if output.error is not None:
                    errors.append(f"prompt {int(output.request_id) + 1}: {output.error}")
                if output.prompt_logprobs:
                    printer.add_prompt_logprobs(int(output.request_id), output.prompt_logprobs)
                for completion in output.outputs:
                    printer.add(int(output.request_id), completion)
        for error in errors:
            print(f"isinglass: error: {error}", file=sys.stderr)
        if llm.run_dir is not None:
            print(
                f"\nrecorded in {llm.run_dir}\n"
                f"  isinglass trace summary {llm.run_dir}\n"
                f"  isinglass trace convert {llm.run_dir}",
                file=sys.stderr,
            )
    return 1 if errors else 0


def _read_standard_input() -> str:
    """The one prompt of a command without prompts.

    Raises:
        PromptError: it is closed, or no text.
    """
    if sys.stdin is None:
        raise PromptError("there is no prompt, and standard input is closed; give one of them")
    try:
        # Whatever the locale says, which decides how standard input would decode.
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise PromptError(
            f"standard input is not UTF-8 text (byte {error.start}); convert it, for example with "
            "iconv"
        ) from error


class _Printer:
    """Prints one sequence at a time as it grows; the others wait until it is done.

    Log probabilities, where asked for, follow behind the sequence's text, those of the prompt
    behind its first sequence's.
    """

    def __init__(self, prompts: list[str], n: int, *, echo: bool) -> None:
        self._prompts = prompts
        self._echo = echo
        self._order = [(prompt, index) for prompt in range(len(prompts)) for index in range(n)]
        self._text = dict.fromkeys(self._order, "")
        self._ended: set[tuple[int, int]] = set()
        self._prompt_lines: dict[int, list[str]] = {}
        self._lines: dict[tuple[int, int], list[str]] = {key: [] for key in self._order}
        self._current = -1
        self._next()

    def add(self, prompt: int, completion: CompletionOutput) -> None:
        """Take in what is new of one sequence."""
        key = (prompt, completion.index)
        self._text[key] += completion.text
        self._lines[key] += logprob_lines(completion.logprobs or ())
        if completion.finished():
            self._ended.add(key)
        self._flush()

    def add_prompt_logprobs(self, prompt: int, logprobs: PromptLogprobs) -> None:
        """Take in the log probabilities of a prompt, once."""
        if prompt not in self._prompt_lines:
            self._prompt_lines[prompt] = ["prompt logprobs:", *logprob_lines(logprobs)]

    def _flush(self) -> None:
        while self._current < len(self._order):
            key = self._order[self._current]
            sys.stdout.write(self._text[key])
            self._text[key] = ""
            if key not in self._ended:
                break
            sys.stdout.write("\n")
            lines = list(self._prompt_lines.get(key[0], ())) if key[1] == 0 else []
            if self._lines[key]:
                lines += ["logprobs:", *self._lines[key]]
            sys.stdout.writelines(f"{line}\n" for line in lines)
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
