"""From what the core sends to what the caller receives: text, logprobs, time lines.

Holds one `RequestState` per request in the core. Knows text; knows no socket.
"""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.frontend.input_processor import ProcessedPrompt
from engine.frontend.logprobs import LogprobsProcessor
from engine.frontend.parallel_sampling import ParentRequest
from engine.log import get_logger, set_served
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer
from engine.types.logprobs import LogprobsLists
from engine.types.messages import (
    CoreTimes,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.sampling import RequestOutputKind
from instrumentation import Instrument, RequestTimeline

logger = get_logger(__name__)


class RequestState:
    """All that the frontend keeps of one request (one sequence of it, with n > 1)."""

    __slots__ = (
        "detokenizer",
        "external_id",
        "index",
        "last_token_ns",
        "logprobs",
        "num_cached_tokens",
        "num_sent",
        "parent",
        "prompt",
        "request",
        "times",
    )

    def __init__(
        self,
        external_id: str,
        request: EngineCoreRequest,
        prompt: ProcessedPrompt,
        tokenizer: Tokenizer | None,
        *,
        parent: ParentRequest | None,
        index: int,
    ) -> None:
        params = request.sampling_params
        self.external_id = external_id
        self.request = request
        self.prompt = prompt
        self.parent = parent
        self.index = index
        self.detokenizer = IncrementalDetokenizer.create(tokenizer, params, prompt.token_ids)
        self.logprobs = LogprobsProcessor(
            tokenizer, params.logprobs, params.prompt_logprobs, prompt.token_ids
        )
        self.num_cached_tokens = 0
        self.num_sent = 0
        self.last_token_ns = 0
        self.times = CoreTimes()

    @property
    def output_kind(self) -> RequestOutputKind:
        """Which part of the output the caller wants when."""
        return self.request.sampling_params.output_kind

    def completion(
        self,
        finish_reason: str | None,
        stop_reason: int | str | None,
        metrics: RequestTimeline | None,
    ) -> CompletionOutput:
        """The sequence as the caller sees it now."""
        finished, delta = finish_reason is not None, self.output_kind is RequestOutputKind.DELTA
        token_ids, logprobs = self.detokenizer.output_token_ids, self.logprobs.logprobs
        since = self.num_sent if delta else 0
        self.num_sent = len(token_ids)
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.output_text(finished=finished, delta=delta),
            token_ids=token_ids[since:],
            cumulative_logprob=self.logprobs.cumulative_logprob,
            logprobs=None if logprobs is None else logprobs[since : len(token_ids)],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            metrics=metrics,
        )


@dataclass(slots=True)
class ProcessedOutputs:
    """What one message from the core means."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)
    """Core ids of requests that a stop string has ended here; the core does not know yet."""
    token_gaps_ns: list[int] = field(default_factory=list)
    """Time since the request's previous tokens, for each request with new ones but its first."""
    first_tokens: list[RequestTimeline] = field(default_factory=list)
    """Requests whose first token has just come, as far as they have got."""
    timelines: list[RequestTimeline] = field(default_factory=list)
    """Requests that have ended."""
    num_generation_tokens: int = 0


class OutputProcessor:
    """Owns the requests' states by the id that the core uses, and by the caller's id."""

    def __init__(self, tokenizer: Tokenizer | None, *, obs: Instrument) -> None:
        self.tokenizer = tokenizer
        self.obs = obs
        self._states: dict[str, RequestState] = {}
        self._children: dict[str, list[str]] = {}

    def __contains__(self, external_id: str) -> bool:
        return external_id in self._children

    @property
    def num_unfinished(self) -> int:
        """Sequences whose last output has not come yet."""
        return len(self._states)

    def unfinished_ids(self) -> list[str]:
        """The caller's ids of unfinished requests."""
        return list(self._children)

    def core_ids(self, external_ids: Iterable[str]) -> list[str]:
        """The core's ids of unfinished sequences of these requests; unknown ids are left out."""
        return [i for one in dict.fromkeys(external_ids) for i in self._children.get(one, ())]

    def add_request(
        self,
        external_id: str,
        request: EngineCoreRequest,
        prompt: ProcessedPrompt,
        *,
        parent: ParentRequest | None = None,
        index: int = 0,
    ) -> None:
        """Expect outputs of a request."""
        self._states[request.request_id] = RequestState(
            external_id, request, prompt, self.tokenizer, parent=parent, index=index
        )
        self._children.setdefault(external_id, []).append(request.request_id)

    def process_outputs(self, message: EngineCoreOutputs) -> ProcessedOutputs:
        """Turn the core's outputs into the caller's."""
        done = ProcessedOutputs()
        try:
            for output in message.outputs:
                state = self._states.get(output.request_id)
                if state is not None:  # else: ended here by a stop string, or aborted
                    set_served(state.external_id, state.request.traceparent)
                    self._process(state, output, message.timestamp_ns, done)
        finally:
            set_served(None)
        for timeline in done.timelines:
            self.obs.request(timeline)
        return done

    def unfinished_timelines(self, request_id: str) -> list[RequestTimeline]:
        """The lives so far of a request's unfinished sequences, or of its one `<id>/<index>`."""
        states = [self._states[core_id] for core_id in self._children.get(request_id, ())]
        if not states:
            external_id, _, index = request_id.rpartition("/")
            states = [
                self._states[core_id]
                for core_id in self._children.get(external_id, ())
                if str(self._states[core_id].index) == index
            ]
        return [_timeline(state, None) for state in states]

    def timelines_since(self, request_num: int) -> list[RequestTimeline]:
        """The lives so far of unfinished sequences with a higher number, the oldest first."""
        newest_first = itertools.takewhile(
            lambda state: state.request.request_num > request_num,
            reversed(self._states.values()),
        )
        return [_timeline(state, None) for state in newest_first][::-1]

    def progress(self) -> list[tuple[int, int]]:
        """Number and output tokens so far of every unfinished sequence."""
        return [
            (state.request.request_num, len(state.detokenizer.output_token_ids))
            for state in self._states.values()
        ]

    def names_by_num(self) -> dict[int, str]:
        """The caller's ids of unfinished sequences' requests, by the number in step records."""
        return {state.request.request_num: state.external_id for state in self._states.values()}

    def abandon(
        self, external_ids: Iterable[str], reason: FinishReason, *, error: str | None = None
    ) -> list[RequestTimeline]:
        """Expect nothing more of these requests; returns their time lines."""
        timelines = []
        for core_id in self.core_ids(external_ids):
            state = self._states[core_id]
            timelines.append(_timeline(state, str(reason), error=error))
            self.obs.request(timelines[-1])
            self._forget(state)
        return timelines

    def _process(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        timestamp_ns: int,
        done: ProcessedOutputs,
    ) -> None:
        state.num_cached_tokens = output.num_cached_tokens
        if output.times is not None:
            state.times = output.times
        if output.new_token_ids:
            self._count(state, output, timestamp_ns, done)
        if output.prompt_logprobs is not None:
            state.logprobs.update_prompt(output.prompt_logprobs)
        num_before = len(state.detokenizer.output_token_ids)
        reason, stop_reason = output.finish_reason, output.stop_reason
        stop = state.detokenizer.update(
            output.new_token_ids,
            finished=output.finished,
            stop_terminated=reason is FinishReason.STOP and _ends_in_stop_token(state, output),
        )
        if output.new_logprobs is not None:
            # Tokens behind a stop string are dropped, and their logprobs with them.
            num_kept = len(state.detokenizer.output_token_ids) - num_before
            state.logprobs.update_sample(
                LogprobsLists(*(part[:num_kept] for part in output.new_logprobs))
            )
        if stop is not None:
            if reason is None:
                done.to_abort.append(output.request_id)
            reason, stop_reason = FinishReason.STOP, stop
        if reason is None and state.output_kind is RequestOutputKind.FINAL_ONLY:
            return
        finish_reason, timeline = None, None
        if reason is not None:
            finish_reason = str(reason)
            timeline = _timeline(state, finish_reason, stop_reason=stop_reason, error=output.error)
            done.timelines.append(timeline)
            logger.debug(
                "request ended (%s) with %d tokens", finish_reason, timeline.num_generation_tokens
            )
            self._forget(state)
        completion = state.completion(finish_reason, stop_reason, timeline)
        request_output = _request_output(state, completion, output)
        if request_output is not None:
            done.request_outputs.append(request_output)

    def _count(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        timestamp_ns: int,
        done: ProcessedOutputs,
    ) -> None:
        done.num_generation_tokens += len(output.new_token_ids)
        if state.last_token_ns:
            done.token_gaps_ns.append(timestamp_ns - state.last_token_ns)
        state.last_token_ns = timestamp_ns
        if output.times is not None and output.times.first_token_ns == timestamp_ns:
            done.first_tokens.append(_timeline(state, None))

    def _forget(self, state: RequestState) -> None:
        core_id = state.request.request_id
        del self._states[core_id]
        siblings = self._children[state.external_id]
        siblings.remove(core_id)
        if not siblings:
            del self._children[state.external_id]


def _ends_in_stop_token(state: RequestState, output: EngineCoreOutput) -> bool:
    """Whether the last token is one that says stop; a structured output may stop without one."""
    ids = output.new_token_ids
    return bool(ids) and ids[-1] in state.request.sampling_params.all_stop_token_ids


def _request_output(
    state: RequestState, completion: CompletionOutput, output: EngineCoreOutput
) -> RequestOutput | None:
    """The caller's view; None while a final-only request with n > 1 is incomplete."""
    parent = state.parent
    if parent is not None and parent.error is None:
        parent.error, parent.error_kind = output.error, output.error_kind
    completions = [completion] if parent is None else parent.gather(completion)
    if not completions:
        return None
    delta = state.output_kind is RequestOutputKind.DELTA
    logprobs = state.logprobs
    return RequestOutput(
        request_id=state.external_id,
        prompt=state.prompt.text,
        prompt_token_ids=state.prompt.token_ids,
        outputs=completions,
        finished=completion.finished() if parent is None else parent.finished,
        prompt_logprobs=logprobs.pop_prompt_logprobs() if delta else logprobs.prompt_logprobs,
        num_cached_tokens=output.num_cached_tokens,
        metrics=completions[0].metrics,
        error=output.error if parent is None else parent.error,
        error_kind=output.error_kind if parent is None else parent.error_kind,
    )


def _timeline(
    state: RequestState,
    finish_reason: str | None,
    *,
    stop_reason: int | str | None = None,
    error: str | None = None,
) -> RequestTimeline:
    """The request's life so far, from the core's stamps and our own."""
    request, times, parent = state.request, state.times, state.parent
    now_ns = time.monotonic_ns()
    is_constrained = request.sampling_params.structured_outputs is not None
    may_await_grammar = is_constrained and not times.queued_ns
    return RequestTimeline(
        request_id=state.external_id if parent is None else f"{state.external_id}/{state.index}",
        request_num=request.request_num,
        parent_id=None if parent is None else state.external_id,
        index=state.index,
        arrival_ns=request.arrival_ns,
        queued_ns=times.queued_ns,
        first_scheduled_ns=times.first_scheduled_ns,
        first_token_ns=times.first_token_ns,
        last_token_ns=state.last_token_ns,
        delivered_ns=now_ns,
        preemptions=times.preemptions,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=state.num_cached_tokens,
        num_generation_tokens=len(state.detokenizer.output_token_ids),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=error,
        traceparent=request.traceparent,
        grammar_ready_ns=now_ns if may_await_grammar else times.grammar_ready_ns,
    )
