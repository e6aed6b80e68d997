"""Output processor: streams against final outputs, stop strings, n > 1, time lines, giving up."""

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.frontend.input_processor import ProcessedPrompt
from engine.frontend.output_processor import OutputProcessor, ProcessedOutputs
from engine.frontend.parallel_sampling import ParentRequest
from engine.text.tokenizer import Tokenizer
from engine.types.logprobs import LogprobsLists
from engine.types.messages import (
    CoreTimes,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from engine.types.outputs import RequestOutput
from engine.types.sampling import RequestOutputKind, SamplingParams
from instrumentation import RequestTimeline
from instrumentation.testing import Recorder

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
TEXT = "Once upon a time, in a läñd of 你好 and 👩‍🚀, the end. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={}, chat_templates={}, source="test")


class Core:
    """Stands for the engine core: sends what it is told to an output processor."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.recorder = Recorder()
        self.processor = OutputProcessor(tokenizer, obs=self.recorder)
        self.now_ns = 1_000
        self.num = 0
        self.prompt = ProcessedPrompt("Say: ", [1, 2, 3], None)

    def add(self, external_id: str = "r", **fields: Any) -> list[str]:
        """Add a request, fanned out if n > 1; returns the core's ids."""
        params = SamplingParams(**({"max_tokens": None} | fields))
        parent = ParentRequest(external_id, params) if params.n > 1 else None
        core_ids = []
        for index in range(params.n):
            request = EngineCoreRequest(
                f"{external_id}-{self.num}",
                self.num,
                self.prompt.token_ids,
                params if parent is None else parent.child_params(index),
                arrival_ns=100,
                traceparent="00-1-2-01",
            )
            self.num += 1
            self.processor.add_request(
                external_id, request, self.prompt, parent=parent, index=index
            )
            core_ids.append(request.request_id)
        return core_ids

    def send(self, *outputs: EngineCoreOutput) -> ProcessedOutputs:
        """One message, a little later than the one before."""
        self.now_ns += 10
        return self.processor.process_outputs(EngineCoreOutputs(list(outputs), self.now_ns))

    def times(self, **changes: Any) -> CoreTimes:
        values = {
            "queued_ns": 150,
            "first_scheduled_ns": 300,
            "first_token_ns": self.now_ns + 10,
            "last_token_ns": self.now_ns + 10,
        }
        return CoreTimes(**(values | changes))

    def stream(
        self, core_id: str, token_ids: list[int], cuts: list[int], **last: Any
    ) -> list[RequestOutput]:
        """Send tokens in pieces; `last` are fields of the last output."""
        outputs: list[RequestOutput] = []
        edges = [0, *sorted(cuts), len(token_ids)]
        for begin, end in pairwise(edges):
            fields = last if end == len(token_ids) else {}
            piece = token_ids[begin:end]
            if not piece and not fields:
                continue
            outputs += self.send(EngineCoreOutput(core_id, piece, **fields)).request_outputs
        return outputs


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def lists_of(token_ids: list[int]) -> LogprobsLists:
    """Logprobs that say of each token its own id."""
    columns = np.array([[t, t + 1] for t in token_ids], dtype=np.int32)
    return LogprobsLists(columns, -columns.astype(np.float32), np.ones(len(token_ids), np.int32))


@pytest.mark.parametrize("seed", range(8))
def test_deltas_together_are_the_cumulative_and_the_final_output(
    tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    token_ids = encode(tokenizer, TEXT)
    token_ids += [rng.randrange(256) for _ in range(seed * 3)]  # not UTF-8, mostly
    cuts = [rng.randrange(1, len(token_ids)) for _ in range(30)]
    fields: dict[str, Any] = {"logprobs": 1, "ignore_eos": True}
    if seed % 2:
        fields |= {"stop": ["the end", "nowhere"], "include_stop_str_in_output": seed % 4 == 1}
    seen: dict[RequestOutputKind, list[RequestOutput]] = {}
    for kind in RequestOutputKind:
        core = Core(tokenizer)
        (core_id,) = core.add(output_kind=kind, **fields)
        outputs: list[RequestOutput] = []
        edges = [0, *sorted(set(cuts)), len(token_ids)]
        for begin, end in pairwise(edges):
            piece = token_ids[begin:end]
            reason = FinishReason.LENGTH if end == len(token_ids) else None
            one = EngineCoreOutput(core_id, piece, lists_of(piece), finish_reason=reason)
            outputs += core.send(one).request_outputs
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert core.processor.num_unfinished == 0
        seen[kind] = outputs
    (final,) = (o.outputs[0] for o in seen[FINAL_ONLY])
    last = seen[CUMULATIVE][-1].outputs[0]
    assert len(seen[CUMULATIVE]) == len(seen[DELTA]) > 5
    text, ids, logprobs = "", [], []
    for delta, cumulative in zip(seen[DELTA], seen[CUMULATIVE], strict=True):
        text += delta.outputs[0].text
        ids += delta.outputs[0].token_ids
        logprobs += list(delta.outputs[0].logprobs or [])
        assert cumulative.outputs[0].text == text
        assert list(cumulative.outputs[0].token_ids) == ids
    assert text == last.text == final.text
    assert ids == list(last.token_ids) == list(final.token_ids)
    assert logprobs == last.logprobs == final.logprobs
    assert len(logprobs) == len(ids)
    assert final.cumulative_logprob == last.cumulative_logprob == pytest.approx(-sum(ids))
    if seed % 2:
        assert (final.finish_reason, final.stop_reason) == ("stop", "the end")
        assert text == TEXT[: TEXT.index("the end")] + ("the end" if seed % 4 == 1 else "")
    else:
        assert (final.finish_reason, final.stop_reason) == ("length", None)
        assert ids == token_ids
        assert text.startswith(TEXT)


def test_an_output_shown_earlier_does_not_change_later(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    (core_id,) = core.add(logprobs=0)
    token_ids = encode(tokenizer, "abc")
    shown = []
    for token_id in token_ids:
        output = EngineCoreOutput(core_id, [token_id], lists_of([token_id]))
        shown += core.send(output).request_outputs
    assert [o.outputs[0].text for o in shown] == ["a", "ab", "abc"]
    assert [len(o.outputs[0].token_ids) for o in shown] == [1, 2, 3]
    assert [len(o.outputs[0].logprobs or []) for o in shown] == [1, 2, 3]


def test_a_stop_string_ends_the_request_here_and_aborts_it_in_the_core(
    tokenizer: Tokenizer,
) -> None:
    core = Core(tokenizer)
    stopped, other = core.add("a", stop=["STOP"])[0], core.add("b")[0]
    token_ids = encode(tokenizer, "one STOP two")
    done = core.send(
        EngineCoreOutput(stopped, token_ids, times=core.times()),
        EngineCoreOutput(other, token_ids, times=core.times()),
    )
    assert done.to_abort == [stopped]
    first, second = done.request_outputs
    assert (first.request_id, first.finished, first.outputs[0].text) == ("a", True, "one ")
    assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("stop", "STOP")
    assert (second.finished, second.outputs[0].text) == (False, "one STOP two")
    assert "a" not in core.processor
    # What the core sends until it knows, and its answer to the abort, are not for the caller.
    late = core.send(
        EngineCoreOutput(stopped, [5]),
        EngineCoreOutput(stopped, [], finish_reason=FinishReason.ABORT),
    )
    assert (late.request_outputs, late.timelines, late.num_generation_tokens) == ([], [], 0)
    assert [timeline.finish_reason for timeline in core.recorder.timelines] == ["stop"]


def test_a_stop_string_in_the_cores_last_output_aborts_nothing(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    (core_id,) = core.add(stop=["STOP"])
    last = EngineCoreOutput(
        core_id, encode(tokenizer, "one STOP"), finish_reason=FinishReason.LENGTH
    )
    done = core.send(last)
    assert done.to_abort == []
    completion = done.request_outputs[0].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "STOP")


def test_the_text_of_a_stop_token_is_left_out_but_the_token_counts(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    token_ids = encode(tokenizer, "abc!")
    for include, text in ((False, "abc"), (True, "abc!")):
        (core_id,) = core.add(stop_token_ids=[token_ids[-1]], include_stop_str_in_output=include)
        done = core.send(
            EngineCoreOutput(
                core_id, token_ids, finish_reason=FinishReason.STOP, stop_reason=token_ids[-1]
            )
        )
        completion = done.request_outputs[0].outputs[0]
        assert completion.text == text
        assert list(completion.token_ids) == token_ids
        assert completion.stop_reason == token_ids[-1]


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    core = Core(None)
    (core_id,) = core.add(output_kind=DELTA)
    outputs = core.stream(core_id, [5, 6, 7], [1, 2], finish_reason=FinishReason.LENGTH)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [[5], [6], [7]]
    assert {o.outputs[0].text for o in outputs} == {""}


def test_prompt_and_cached_tokens_are_told(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    (core_id,) = core.add()
    done = core.send(EngineCoreOutput(core_id, [5], num_cached_tokens=2))
    output = done.request_outputs[0]
    assert (output.prompt, output.prompt_token_ids) == ("Say: ", [1, 2, 3])
    assert output.num_cached_tokens == 2


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_prompt_logprobs_come_once_in_deltas_and_always_otherwise(
    tokenizer: Tokenizer, kind: RequestOutputKind
) -> None:
    core = Core(tokenizer)
    (core_id,) = core.add(prompt_logprobs=1, output_kind=kind)
    outputs = core.send(
        EngineCoreOutput(core_id, [5], prompt_logprobs=lists_of([2, 3]))
    ).request_outputs
    outputs += core.send(
        EngineCoreOutput(core_id, [6], finish_reason=FinishReason.LENGTH)
    ).request_outputs
    lengths = [len(o.prompt_logprobs or []) for o in outputs]
    assert lengths == {CUMULATIVE: [3, 3], DELTA: [3, 0], FINAL_ONLY: [3]}[kind]
    prompt_logprobs = outputs[0].prompt_logprobs
    assert prompt_logprobs is not None
    assert prompt_logprobs[0] is None
    assert set(prompt_logprobs[1] or {}) == {2, 3}


# -- n > 1 -----------------------------------------------------------------------------------------


def test_final_only_gathers_all_sequences_in_their_order(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    ids = core.add(n=3, output_kind=FINAL_ONLY)
    for core_id in (ids[2], ids[0]):
        core.send(EngineCoreOutput(core_id, [core_id == ids[0]]))
        end = EngineCoreOutput(core_id, [7], finish_reason=FinishReason.LENGTH)
        assert core.send(end).request_outputs == []
    assert core.processor.core_ids(["r"]) == [ids[1]]
    last = EngineCoreOutput(ids[1], [8], finish_reason=FinishReason.STOP, num_cached_tokens=2)
    (output,) = core.send(last).request_outputs
    assert output.finished
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert [list(c.token_ids) for c in output.outputs] == [[True, 7], [8], [False, 7]]
    assert [c.finish_reason for c in output.outputs] == ["length", "stop", "length"]
    assert output.metrics is output.outputs[0].metrics
    assert "r" not in core.processor


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_streams_show_each_sequence_as_it_comes(
    tokenizer: Tokenizer, kind: RequestOutputKind
) -> None:
    core = Core(tokenizer)
    first, second = core.add(n=2, output_kind=kind)
    outputs = core.send(EngineCoreOutput(second, [7]), EngineCoreOutput(first, [8])).request_outputs
    outputs += core.send(
        EngineCoreOutput(second, [9], finish_reason=FinishReason.LENGTH)
    ).request_outputs
    outputs += core.send(
        EngineCoreOutput(first, [9], finish_reason=FinishReason.LENGTH)
    ).request_outputs
    assert [[c.index for c in o.outputs] for o in outputs] == [[1], [0], [1], [0]]
    assert [o.finished for o in outputs] == [False, False, False, True]
    assert [o.outputs[0].finished() for o in outputs] == [False, False, True, True]
    expected = [[7], [8], [9], [9]] if kind is DELTA else [[7], [8], [7, 9], [8, 9]]
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected


def test_sequences_have_seeds_of_their_own_and_n_of_one() -> None:
    parent = ParentRequest("r", SamplingParams(n=4, seed=2**63 - 2))
    children = [parent.child_params(index) for index in range(4)]
    assert {child.n for child in children} == {1}
    assert len({child.seed for child in children}) == 4
    assert ParentRequest("r", SamplingParams(n=2)).child_params(1).seed is None


def test_one_sequence_may_hit_a_stop_string_and_the_others_go_on(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    first, second = core.add(n=2, output_kind=FINAL_ONLY, stop="X")
    done = core.send(EngineCoreOutput(first, encode(tokenizer, "aX")))
    assert (done.to_abort, done.request_outputs) == ([first], [])
    done = core.send(
        EngineCoreOutput(second, encode(tokenizer, "ab"), finish_reason=FinishReason.LENGTH)
    )
    (output,) = done.request_outputs
    assert [c.text for c in output.outputs] == ["a", "ab"]


# -- time lines ------------------------------------------------------------------------------------


def check_identity(timeline: RequestTimeline) -> None:
    parts = (timeline.queue_ns, timeline.prefill_ns, timeline.decode_ns, timeline.preempted_ns)
    assert sum(parts) == timeline.e2e_ns
    assert min(parts) >= 0


def test_intervals_add_up_to_the_whole(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    (core_id,) = core.add("named")
    times = core.times(preemptions=[(400, 500), (1_015, 1_018)])
    core.send(EngineCoreOutput(core_id, [5], times=times))
    core.send(EngineCoreOutput(core_id, [6]))
    last = core.times(first_token_ns=1_010, preemptions=times.preemptions)
    done = core.send(EngineCoreOutput(core_id, [7], finish_reason=FinishReason.LENGTH, times=last))
    (timeline,) = done.timelines
    assert core.recorder.timelines == [timeline]
    assert done.request_outputs[0].metrics is timeline
    check_identity(timeline)
    assert (timeline.queue_ns, timeline.preempted_ns) == (200, 103)
    assert (timeline.prefill_ns, timeline.decode_ns) == (1_010 - 300 - 100, 20 - 3)
    assert (timeline.first_token_ns, timeline.last_token_ns) == (1_010, 1_030)
    assert timeline.delivered_ns >= timeline.last_token_ns
    assert (timeline.num_prompt_tokens, timeline.num_generation_tokens) == (3, 3)
    assert (timeline.request_id, timeline.request_num) == ("named", 0)
    assert (timeline.parent_id, timeline.traceparent) == (None, "00-1-2-01")


def test_until_the_core_tells_more_a_constrained_request_may_wait_for_its_grammar() -> None:
    core = Core(None)
    core.add("free")
    (core_id,) = core.add("bound", structured_outputs={"regex": "a"})
    (free,) = core.processor.unfinished_timelines("free")
    (bound,) = core.processor.unfinished_timelines("bound")
    assert (free.grammar_ready_ns, bound.grammar_ready_ns) == (0, bound.end_ns)
    core.send(EngineCoreOutput(core_id, [5], times=core.times(grammar_ready_ns=200)))
    (bound,) = core.processor.unfinished_timelines("bound")
    assert bound.grammar_ready_ns == 200


def test_a_stop_string_behind_a_preemption_knows_of_it(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    (core_id,) = core.add(stop="X")
    core.send(EngineCoreOutput(core_id, [5], times=core.times()))
    times = core.times(first_token_ns=1_010, preemptions=[(1_012, 1_016)])
    done = core.send(EngineCoreOutput(core_id, encode(tokenizer, "X"), times=times))
    (timeline,) = done.timelines
    check_identity(timeline)
    assert (timeline.preempted_ns, timeline.decode_ns) == (4, 6)
    assert done.first_tokens == []


def test_children_name_their_parent(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    for core_id in core.add("p", n=2):
        core.send(EngineCoreOutput(core_id, [5], finish_reason=FinishReason.LENGTH))
    names = [(t.request_id, t.parent_id, t.index) for t in core.recorder.timelines]
    assert names == [("p/0", "p", 0), ("p/1", "p", 1)]


def test_tokens_gaps_and_first_tokens_are_counted_once(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    first, second = core.add("a")[0], core.add("b")[0]
    done = core.send(EngineCoreOutput(first, [5, 6], times=core.times()))
    assert (done.num_generation_tokens, done.token_gaps_ns) == (2, [])
    assert [t.request_id for t in done.first_tokens] == ["a"]
    assert done.first_tokens[0].ttft_ns == 1_010 - 100
    done = core.send(
        EngineCoreOutput(second, [5], times=core.times()),
        EngineCoreOutput(first, [7], finish_reason=FinishReason.LENGTH, times=core.times()),
    )
    assert (done.num_generation_tokens, done.token_gaps_ns) == (2, [10])
    assert [t.request_id for t in done.timelines] == ["a"]


# -- aborts and the end ----------------------------------------------------------------------------


def test_the_cores_abort_is_the_last_output(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    (core_id,) = core.add()
    core.send(EngineCoreOutput(core_id, encode(tokenizer, "ab"), times=core.times()))
    end = EngineCoreOutput(core_id, [], finish_reason=FinishReason.ABORT, times=core.times())
    core.now_ns = -10  # such a message carries no time
    done = core.send(end)
    (output,) = done.request_outputs
    assert output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("abort", "ab")
    (timeline,) = done.timelines
    check_identity(timeline)
    assert timeline.finish_reason == "abort"
    assert done.num_generation_tokens == 0


def test_abandoned_requests_are_forgotten_and_told_of(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    family, single = core.add("family", n=3), core.add("single")
    core.send(EngineCoreOutput(family[1], [5], finish_reason=FinishReason.LENGTH))
    processor = core.processor
    assert processor.unfinished_ids() == ["family", "single"]
    assert processor.core_ids(["family", "unknown"]) == [family[0], family[2]]
    timelines = processor.abandon(["family", "unknown"], FinishReason.ERROR, error="it died")
    assert [t.request_id for t in timelines] == ["family/0", "family/2"]
    assert {t.finish_reason for t in timelines} == {"error"}
    assert {t.error for t in timelines} == {"it died"}
    for timeline in timelines:
        check_identity(timeline)
    assert core.recorder.timelines[-2:] == timelines
    assert "family" not in processor
    assert "single" in processor
    assert processor.num_unfinished == 1
    assert processor.abandon(["family"], FinishReason.ABORT) == []
    # Late outputs are ignored, and the name is free again.
    assert core.send(EngineCoreOutput(family[0], [5])).request_outputs == []
    again = core.add("family")
    assert core.send(EngineCoreOutput(again[0], [5])).request_outputs[0].request_id == "family"
    assert single[0] in processor.core_ids(["single"])


def test_an_id_named_twice_is_abandoned_once(tokenizer: Tokenizer) -> None:
    core = Core(tokenizer)
    core.add("r")
    assert len(core.processor.abandon(["r", "r"], FinishReason.ABORT)) == 1


def test_an_id_used_again_after_a_stop_string_gets_only_its_own_outputs(
    tokenizer: Tokenizer,
) -> None:
    core = Core(tokenizer)
    (old,) = core.add("same", stop="X")
    core.send(EngineCoreOutput(old, encode(tokenizer, "aX")))
    (new,) = core.add("same")
    done = core.send(
        EngineCoreOutput(old, encode(tokenizer, "zzz"), finish_reason=FinishReason.ABORT),
        EngineCoreOutput(new, encode(tokenizer, "b")),
    )
    assert [o.outputs[0].text for o in done.request_outputs] == ["b"]
    assert not done.request_outputs[0].finished
