"""Gives requests their grammars, and steps their bitmasks.

Grammars are shared by requests with the same constraint and kept for later ones. A request whose
grammar is being compiled waits; a constraint that cannot be compiled ends its requests and no
others. Knows requests and constraints; knows no queue and no logits. Belongs to the core's thread.
"""

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.structured.compiler import Compiled, ConstraintCompiler
from engine.structured.constraint import ConstraintKey
from engine.structured.matching import Grammar, end_mask_of, num_words
from engine.structured.vocabulary import load_vocabulary
from engine.types.messages import ErrorKind
from engine.types.plan import GrammarOutput
from engine.types.sampling import SamplingParams
from instrumentation import Event, GrammarOutcome, GrammarTotals, Instrument

_NUM_FAILURES_KEPT: Final = 256


class Bound(Protocol):
    """What is to be known of a request."""

    @property
    def request_id(self) -> str:
        """Its name."""

    @property
    def sampling_params(self) -> SamplingParams:
        """With its constraint."""

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""

    grammar: Grammar | None


BoundT = TypeVar("BoundT", bound=Bound)


class GrammarFailure(NamedTuple):
    """Why a request gets no grammar, and whose fault that is."""

    error: str
    kind: ErrorKind


class StructuredOutputManager(Generic[BoundT]):
    """Compiled grammars by constraint, and who waits for which.

    Args:
        compiler: makes grammars, in its own time.
        vocab_size: width of the logits.
        end_token_ids: the model's end tokens.
        cache_bytes: most that grammars kept for later requests may take.
    """

    def __init__(
        self,
        compiler: ConstraintCompiler,
        *,
        vocab_size: int,
        end_token_ids: Iterable[int],
        cache_bytes: int,
        obs: Instrument,
    ) -> None:
        self.compiler = compiler
        self.obs = obs
        self._num_words = num_words(vocab_size)
        self._end_mask = end_mask_of([i for i in end_token_ids if i < vocab_size], vocab_size)
        self._cache_bytes = cache_bytes
        self._grammars: OrderedDict[ConstraintKey, Compiled] = OrderedDict()
        self._failures: OrderedDict[ConstraintKey, GrammarFailure] = OrderedDict()
        self._waiting: dict[ConstraintKey, dict[str, BoundT]] = {}
        self._refused: list[tuple[BoundT, GrammarFailure]] = []
        self._num_bytes = 0
        self._num_hits = self._num_misses = self._compile_ns = self._num_forced = 0
        self._outcomes = [0] * len(GrammarOutcome)
        self._totals: GrammarTotals | None = None
        """As last told; None since a count has changed."""

    @classmethod
    def create(
        cls, config: EngineConfig, facts: ModelConfig, *, obs: Instrument
    ) -> "StructuredOutputManager":
        """The manager of an engine's core; starts nothing yet."""
        model, scheduler = config.model, config.scheduler
        load = partial(
            load_vocabulary,
            model=model.model,
            revision=model.revision,
            download_dir=model.download_dir,
            tokenizer=model.tokenizer,
            vocab_size=facts.vocab_size,
            end_token_ids=list(facts.eos_token_ids),
        )
        return cls(
            ConstraintCompiler(load, timeout_s=scheduler.structured_outputs_timeout_s),
            vocab_size=facts.vocab_size,
            end_token_ids=facts.eos_token_ids,
            cache_bytes=scheduler.structured_outputs_cache_bytes,
            obs=obs,
        )

    @property
    def has_pending(self) -> bool:
        """Whether requests wait for grammars, or for being told that there will be none."""
        return bool(self._waiting or self._refused)

    @property
    def totals(self) -> GrammarTotals | None:
        """Counts since start-up, None before the first request with a constraint."""
        if self._totals is None and self._num_hits + self._num_misses:
            self._totals = self._make_totals()  # which most steps leave as they are
        return self._totals

    def _make_totals(self) -> GrammarTotals:
        return GrammarTotals(
            self._num_hits,
            self._num_misses,
            self._compile_ns,
            tuple(self._outcomes),
            len(self._grammars),
            self._num_bytes,
            self._num_forced,
        )

    def warm_up(self) -> None:
        """Get ready for the first constraint, in the background."""
        self.compiler.warm_up()

    def begin(self, request: BoundT) -> bool:
        """Give a request that has just come its grammar; False where it has to wait for one."""
        params = request.sampling_params.structured_outputs
        if params is None:
            return True
        self._totals = None
        key = params.key
        compiled, failure = self._grammars.get(key), self._failures.get(key)
        self._num_hits += compiled is not None or failure is not None
        if compiled is not None:
            self._grammars.move_to_end(key)
            self._give(request, compiled)
            return True
        if failure is not None:
            self._failures.move_to_end(key)
            self._refused.append((request, failure))
            return False
        self._num_misses += 1
        if key not in self._waiting:
            self.compiler.submit(key)
        self._waiting.setdefault(key, {})[request.request_id] = request
        return False

    def take(self) -> list[tuple[BoundT, GrammarFailure | None]]:
        """Requests whose wait is over, each with the reason if it gets no grammar."""
        settled: list[tuple[BoundT, GrammarFailure | None]] = list(self._refused)
        self._refused.clear()
        if self._waiting:
            for result in self.compiler.take():
                settled += self._settle(result)
        # Whoever was aborted in the meantime has its last output already.
        return [(request, failure) for request, failure in settled if not request.is_finished]

    def forget(self, request: BoundT) -> None:
        """The request has ended before it got its grammar."""
        params = request.sampling_params.structured_outputs
        if params is None or request.grammar is not None:
            return
        key = params.key
        requests = self._waiting.get(key, {})
        requests.pop(request.request_id, None)
        if not requests and self._waiting.pop(key, None) is not None:
            self.compiler.withdraw(key)
            self._outcomes[GrammarOutcome.WITHDRAWN] += 1
            self._totals = None

    def grammar_output(self, requests: Iterable[BoundT | None]) -> GrammarOutput | None:
        """The bitmask of a step in which these requests sample; None where it binds nobody.

        Those that have ended meanwhile (None) have no row: what the step samples for them is void.
        """
        bound = [request for request in requests if request is not None]
        if not bound:
            return None
        num_forced = 0
        bitmask = np.empty((len(bound), self._num_words), dtype=np.int32)
        for row, request in enumerate(bound):
            assert request.grammar is not None
            request.grammar.write_mask(bitmask[row])
            num_forced += request.grammar.is_forced
        if num_forced:
            self._num_forced += num_forced
            self._totals = None
        return GrammarOutput([request.request_id for request in bound], bitmask)

    def close(self) -> None:
        """Stop compiling."""
        self.compiler.close()

    def _settle(self, result: Compiled) -> list[tuple[BoundT, GrammarFailure | None]]:
        """Keep a result, and tell whoever waited for it."""
        self._totals = None
        requests = self._waiting.pop(result.key, {}).values()
        if requests:  # or it counts as withdrawn
            self._outcomes[result.outcome] += 1
        self._compile_ns += result.duration_ns
        if result.outcome is GrammarOutcome.COMPILED:
            self._keep(result)
            for request in requests:
                self._give(request, result)
            return [(request, None) for request in requests]
        is_engines_fault = result.outcome is GrammarOutcome.UNAVAILABLE
        failure = GrammarFailure(
            f"structured_outputs.{result.key[0]} cannot be used: {result.error}",
            ErrorKind.ENGINE if is_engines_fault else ErrorKind.INPUT,
        )
        self.obs.event(
            Event.GRAMMAR_FAILED,
            next(iter(requests)).request_id if requests else "",
            value=result.duration_ns,
            detail=f"{result.outcome.label}: {failure.error}",
        )
        if not is_engines_fault:
            self._failures[result.key] = failure
            if len(self._failures) > _NUM_FAILURES_KEPT:
                self._failures.popitem(last=False)
        return [(request, failure) for request in requests]

    def _keep(self, result: Compiled) -> None:
        if result.num_bytes > self._cache_bytes or result.key in self._grammars:
            return
        self._grammars[result.key] = result
        self._num_bytes += result.num_bytes
        while self._num_bytes > self._cache_bytes:
            _, oldest = self._grammars.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def _give(self, request: BoundT, compiled: Compiled) -> None:
        request.grammar = Grammar(
            compiled.grammar.deep_copy(),
            self._end_mask,
            ignore_eos=request.sampling_params.ignore_eos,
        )
