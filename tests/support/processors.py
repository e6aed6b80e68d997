"""Logits processors as a user would write them; tests give them as classes and by name.

Imported by the engine core in its own process.
"""

from typing import Any

import torch

from engine import AdapterLogitsProcessor, LogitsProcessor, SamplingParams
from engine.log import get_logger
from engine.worker.logits_processor import BatchUpdate, RequestLogitsProcessor


class EvenTokensOnly(LogitsProcessor):
    """Forbids every odd token id, in all requests."""

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._started = False

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self._started = self._started or batch_update is not None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert self._started, "told of the batch before its first logits"
        logits[:, 1::2] = -torch.inf
        return logits


class OnlyToken(AdapterLogitsProcessor):
    """Lets a request that brings `only_token` in its extra_args say nothing else.

    With `after` as well, only once that many output tokens are there.
    """

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        token_id = (params.extra_args or {}).get("only_token", 0)
        if not isinstance(token_id, int):
            raise ValueError(f"only_token must be an integer, got {token_id!r}")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        extra = params.extra_args or {}
        if "only_token" not in extra:
            return None
        token_id, after = extra["only_token"], extra.get("after", 0)

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < after:
                return logits
            masked = torch.full_like(logits, -torch.inf)
            masked[token_id] = logits[token_id]
            return masked

        return process


class RepeatPrompt(AdapterLogitsProcessor):
    """Makes a request that brings `repeat_prompt` say its prompt again, token for token."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        if not (params.extra_args or {}).get("repeat_prompt"):
            return None

        def process(
            prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor
        ) -> torch.Tensor:
            logits[prompt_ids[len(output_ids) % len(prompt_ids)]] += 1000.0
            return logits

        return process


class FailsAfter(AdapterLogitsProcessor):
    """Fails a request that brings `fails_after` in its extra_args, after that many output tokens;
    by its `how`: raises, or returns None, or another width."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        extra = params.extra_args or {}
        if "fails_after" not in extra:
            return None
        after, how = extra["fails_after"], extra["how"]

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < after:
                return logits
            logits[0] = torch.nan
            if how == "raises":
                raise ZeroDivisionError("this request's callable raises")
            return None if how == "none" else logits[:1]  # type: ignore[return-value]

        return process


class TellsKernels(EvenTokensOnly):
    """Says in the log which kernels PyTorch has chosen in the engine core."""

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(config, device, is_pin_memory)
        matrix = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.nn.functional.linear(matrix, matrix)  # has oneDNN say what it runs on, if asked to
        found = torch.backends.cpu.get_cpu_capability()
        get_logger(__name__).info("the core's PyTorch has kernels for %s", found)


class Raises(EvenTokensOnly):
    """Has a defect."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("this processor always raises")
