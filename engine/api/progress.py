"""The progress bar of `LLM.generate`: prompts done, and tokens per second in and out."""

import contextlib
import sys
import time
from types import TracebackType

from engine.types.outputs import RequestOutput


class ProgressBar:
    """A tqdm bar, or nothing when it is not wanted."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar = None
        # A bar must never cost an output: without a terminal to write to there is none.
        if enabled and sys.stderr is not None and not sys.stderr.closed:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._began = time.monotonic()
        self._num_input_tokens = 0
        self._num_output_tokens = 0

    def advance(self, output: RequestOutput) -> None:
        """Count one finished request."""
        if self._bar is None or not output.finished:
            return
        self._num_input_tokens += len(output.prompt_token_ids)
        self._num_output_tokens += sum(len(one.token_ids) for one in output.outputs)
        elapsed_s = max(1e-9, time.monotonic() - self._began)
        self._bar.set_postfix_str(
            f"input: {self._num_input_tokens / elapsed_s:.0f} toks/s, "
            f"output: {self._num_output_tokens / elapsed_s:.0f} toks/s",
            refresh=False,
        )
        with contextlib.suppress(OSError, ValueError):
            self._bar.update(1)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()
