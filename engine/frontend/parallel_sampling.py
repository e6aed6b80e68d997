"""n > 1: one request of the user is n requests of the engine that share the prompt's blocks."""

import copy

from msgspec.structs import force_setattr

from engine.types.outputs import CompletionOutput
from engine.types.sampling import RequestOutputKind, SamplingParams


class ParentRequest:
    """Fans a request out and gathers its sequences."""

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self.request_id = request_id
        self.params = params
        self.unfinished = set(range(params.n))
        self.error: str | None = None  # of the first sequence that failed
        self.error_kind: str | None = None
        self._finished: list[CompletionOutput | None] = [None] * params.n

    def child_params(self, index: int) -> SamplingParams:
        """Parameters of one sequence: n is 1, and each has a seed of its own."""
        child = copy.copy(self.params)  # they have been checked, which may take long
        force_setattr(child, "n", 1)
        if child.seed is not None:
            force_setattr(child, "seed", (child.seed + index) & ((1 << 63) - 1))
        return child

    def gather(self, output: CompletionOutput) -> list[CompletionOutput]:
        """Take in one sequence's output; returns what is to be shown now.

        Streams show each sequence as it comes; a final-only request shows all of them once.
        """
        if output.finished():
            self.unfinished.discard(output.index)
        if self.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            return [output]
        self._finished[output.index] = output
        if self.unfinished:
            return []
        return [output for output in self._finished if output is not None]

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return not self.unfinished
