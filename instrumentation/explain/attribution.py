"""Cost attribution: each step's time, shared among the requests that it served.

Knows the weights. Does not know where steps come from.

A request's weight in a step is `num_tokens * (EQUAL_COST_CONTEXT + context)`, where context is the
mean number of tokens that its tokens attend to. The first term stands for what every token costs
alike (the matrix products, or reading the weights), the second for attention and for reading the
KV cache, which grow with the context. The two are equal at a context of 4,096 tokens: roughly the
parameters of a decoder over twice its number of layers times its width, which is 3,900 for a model
of 135 million parameters and 30,000 for one of eight thousand million, where attention counts less
than it does here. Weights decide only how a step is divided; shares add up to it to the nanosecond.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from instrumentation.explain.step_history import HistoricStep
from instrumentation.record.step_records import StepRecord

EQUAL_COST_CONTEXT = 4096
"""Context, in tokens, at which attention costs as much as all the rest."""


class Share(NamedTuple):
    """What one request had of one step."""

    request_num: int
    num_tokens: int
    num_context_tokens: int
    """Tokens computed before the step, 0 where that is not known."""
    duration_ns: int
    """Its part of the step's duration."""


class Contexts:
    """Follows how many tokens each request has computed, from step to step.

    Begin at a request's admission to be exact; one that was admitted before counts from 0.
    """

    def __init__(self) -> None:
        self._num_computed: dict[int, int] = {}

    def advance(self, step: StepRecord) -> list[tuple[int, int, int]]:
        """Go past a step; returns (request_num, num_tokens, tokens computed before) of each."""
        computed = self._num_computed
        for preemption in step.preempted:
            computed.pop(preemption.request_num, None)
        for admission in step.admissions:
            computed[admission.request_num] = admission.num_hit_tokens
        parts = []
        for request_num, num_tokens in zip(step.scheduled[::2], step.scheduled[1::2], strict=True):
            before = computed.get(request_num, 0)
            parts.append((request_num, num_tokens, before))
            computed[request_num] = before + num_tokens
        for request_num in step.finished:
            computed.pop(request_num, None)
        return parts


def split(total: int, weights: Sequence[int]) -> list[int]:
    """Divide a whole number in proportion to weights, into whole numbers that add up to it.

    By largest remainder; among equal remainders the first come first. Without any weight, evenly.
    """
    assert total >= 0
    if not weights:
        return []
    if not any(weights):
        weights = [1] * len(weights)
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    remainders = [total * weight % whole for weight in weights]
    order = sorted(range(len(weights)), key=lambda index: -remainders[index])
    for index in order[: total - sum(parts)]:
        parts[index] += 1
    return parts


def share_step(parts: Sequence[tuple[int, int, int]], duration_ns: int) -> list[Share]:
    """Divide a step's duration among its requests, given as `Contexts.advance` does."""
    # Twice the weight: the mean context of n tokens behind c others is c + (n - 1) / 2.
    weights = [
        num_tokens * (2 * EQUAL_COST_CONTEXT + 2 * before + num_tokens - 1)
        for _, num_tokens, before in parts
    ]
    durations = split(max(0, duration_ns), weights)
    return [Share(*part, share_ns) for part, share_ns in zip(parts, durations, strict=True)]


def attribute(steps: Iterable[HistoricStep]) -> list[tuple[HistoricStep, list[Share]]]:
    """Share out every step; give them in the order in which they were planned."""
    contexts = Contexts()
    return [(one, share_step(contexts.advance(one.step), one.duration_ns)) for one in steps]


def cost_by_request(steps: Iterable[HistoricStep]) -> dict[int, int]:
    """Nanoseconds of worker time by request number; they add up to the steps' durations."""
    costs: dict[int, int] = {}
    for _, shares in attribute(steps):
        for share in shares:
            costs[share.request_num] = costs.get(share.request_num, 0) + share.duration_ns
    return costs
