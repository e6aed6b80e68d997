"""A fence around each logits processor that a user brings.

Knows what may go wrong in foreign code: it raises, or returns something that is not the logits.
Whatever does is named after the processor's class. Does not know how a request is ended: a
processor that serves single requests (`AdapterLogitsProcessor`) reports which rows have failed,
and any other failure ends the engine, since the whole batch has passed through that code.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from engine.errors import LogitsProcessorError
from engine.worker.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    TensorKind,
    load_logits_processors,
    told,
)

Result = TypeVar("Result")


class ProcessorGuard(LogitsProcessor):
    """Runs one processor and checks what comes back.

    Every method raises `LogitsProcessorError` where the processor's own raises.
    """

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor
        self._name = type(processor).__qualname__

    def is_argmax_invariant(self) -> bool:
        """What the processor says."""
        return bool(self._run("is_argmax_invariant", self._processor.is_argmax_invariant))

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Pass the update on."""
        self._run("update_state", lambda: self._processor.update_state(batch_update))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Pass the logits on, float32 [batch_size, vocab_size], and take only such ones back."""
        expected = TensorKind.of(logits)
        result = self._run("apply", lambda: self._processor.apply(logits))
        if complaint := expected.complaint_about(result):
            raise LogitsProcessorError(f"logits processor {self._name}: apply {complaint}")
        return result

    def take_failures(self) -> dict[int, str]:
        """Rows whose requests have failed since the last call, each with the reason."""
        return self._run("take_failures", self._processor.take_failures)

    def _run(self, method: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except (Exception, SystemExit) as error:  # sys.exit() must not end the core silently
            raise LogitsProcessorError(
                f"logits processor {self._name}: {method} raised {told(error)}"
            ) from error


def build_logits_processors(
    specs: Sequence[str | type[LogitsProcessor]], config: Any, device: torch.device
) -> list[LogitsProcessor]:
    """Make one processor of each class.

    Raises:
        ConfigError: no such class, or not a processor.
        LogitsProcessorError: a constructor raises.
    """
    processors = []
    for kind in load_logits_processors(specs):
        try:
            processors.append(kind(config, device, False))
        except (Exception, SystemExit) as error:
            raise LogitsProcessorError(
                f"logits processor {kind.__qualname__}: its constructor raised {told(error)}"
            ) from error
    return processors
