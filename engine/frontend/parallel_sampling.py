"""n > 1: one request of the user is n requests of the engine that share the prompt's blocks."""

import msgspec

from engine.types.outputs import CompletionOutput
from engine.types.sampling import RequestOutputKind, SamplingParams


class ParentRequest:
    """Fans a request out and gathers its sequences."""

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self.request_id = request_id
        self.params = params
        self.unfinished = set(range(params.n))
        self.error: str | None = None  # of the first sequence that failed
        self._finished: list[CompletionOutput | None] = [None] * params.n

    def child_params(self, index: int) -> SamplingParams:
        """Parameters of one sequence: n is 1, and each has a seed of its own."""
        seed = self.params.seed
        return msgspec.structs.replace(
            self.params, n=1, seed=None if seed is None else (seed + index) & ((1 << 63) - 1)
        )

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
