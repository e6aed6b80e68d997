"""Logits processors: what they are told about the batch, when they run, and how they are found."""

import re
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.errors import ConfigError, LogitsProcessorError
from engine.types.sampling import SamplingParams
from engine.worker.builtin_processors import MinTokensLogitsProcessor
from engine.worker.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    load_logits_processors,
)
from engine.worker.processor_guard import build_logits_processors
from engine.worker.sampler import Sampler
from engine.worker.sampling_state import SamplingState

CPU = torch.device("cpu")
MAX_NUM_REQS = 8
VOCAB_SIZE = 16


class Recorder(LogitsProcessor):
    """Rebuilds the batch from updates alone, in the order that vLLM documents."""

    order = ("removed", "added", "moved")

    def __init__(self, config=None, device=CPU, is_pin_memory=False):
        self.rows: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
        self.updates: list[BatchUpdate | None] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update):
        self.updates.append(batch_update)
        if batch_update is None:
            return
        for kind in self.order:
            getattr(self, kind)(getattr(batch_update, kind))
        assert sorted(self.rows) == list(range(batch_update.batch_size))

    def removed(self, rows):
        for row in rows:
            del self.rows[row]

    def added(self, requests):
        for row, params, prompt, output in requests:
            self.rows[row] = (params, prompt, output)

    def moved(self, moves):
        for source, destination, direction in moves:
            moving = self.rows.pop(source)
            other = self.rows.pop(destination, None)
            self.rows[destination] = moving
            if direction is MoveDirectionality.SWAP:
                assert other is not None
                self.rows[source] = other
            else:
                assert other is None, "a one-way move overwrote a request"

    def apply(self, logits):
        return logits


class AddFirstRecorder(Recorder):
    """vLLM's own processors add before they remove: that must come to the same."""

    order = ("added", "removed", "moved")


class Batch:
    """A persistent batch like the runner's: dense rows, filled up from the end."""

    def __init__(self, *processors: LogitsProcessor) -> None:
        self.state = SamplingState(
            max_num_reqs=MAX_NUM_REQS,
            vocab_size=VOCAB_SIZE,
            device="cpu",
            logits_processors=processors,
        )
        self.rows: list[tuple[SamplingParams, list[int], list[int]] | None] = [None] * MAX_NUM_REQS
        self.next_seed = 0

    def add(self, row: int, **fields) -> None:
        self.next_seed += 1
        params = SamplingParams(seed=self.next_seed, **fields)
        request = (params, [self.next_seed, 1, 2], [])
        self.state.add_request(row, params, np.array(request[1]), request[2])
        self.rows[row] = request

    def remove(self, row: int) -> None:
        self.state.remove_request(row)
        self.rows[row] = None

    def move(self, src: int, dst: int) -> None:
        self.state.move_request(src, dst)
        self.rows[dst], self.rows[src] = self.rows[src], None

    def occupied(self) -> list[int]:
        return [row for row, request in enumerate(self.rows) if request is not None]

    def condense(self) -> int:
        occupied = self.occupied()
        for hole in range(len(occupied)):
            if self.rows[hole] is None:
                self.move(self.occupied()[-1], hole)
        return len(occupied)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_history_reaches_the_processors(data):
    recorders = Recorder(), AddFirstRecorder()
    batch = Batch(*recorders)
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 8))):
            occupied = batch.occupied()
            free = [row for row in range(MAX_NUM_REQS) if row not in occupied]
            possible = ["add"] * bool(free) + ["remove"] * bool(occupied)
            possible += ["move"] * bool(free and occupied)
            kind = data.draw(st.sampled_from(possible))
            if kind == "add":
                batch.add(data.draw(st.sampled_from(free)))
            elif kind == "remove":
                batch.remove(data.draw(st.sampled_from(occupied)))
            else:
                batch.move(data.draw(st.sampled_from(occupied)), data.draw(st.sampled_from(free)))
        num_reqs = batch.condense()
        metadata = batch.state.refresh(num_reqs)
        expected = dict(enumerate(batch.rows[:num_reqs]))
        for recorder in recorders:
            assert recorder.rows == expected
            # The output list must be the runner's own, not an equal copy.
            assert all(recorder.rows[row][2] is expected[row][2] for row in expected)
        assert metadata.seeds.tolist() == [request[0].seed for request in expected.values()]
        for request in expected.values():
            request[2].append(len(request[2]))
        assert batch.state.refresh(num_reqs).positions.tolist() == [
            len(request[2]) for request in expected.values()
        ]
        assert recorder.updates[-1] is None


def test_updates_are_as_small_as_the_change():
    recorder = Recorder()
    batch = Batch(recorder)
    for row in range(4):
        batch.add(row)
    batch.state.refresh(4)
    assert [row for row, *_ in recorder.updates[-1].added] == [0, 1, 2, 3]
    assert not recorder.updates[-1].removed
    assert not recorder.updates[-1].moved

    batch.remove(1)
    batch.move(3, 1)
    batch.state.refresh(3)
    update = recorder.updates[-1]
    assert (update.batch_size, update.removed, update.added) == (3, [1], [])
    assert update.moved == [(3, 1, MoveDirectionality.UNIDIRECTIONAL)]

    batch.remove(0)
    batch.add(0)
    batch.state.refresh(3)
    update = recorder.updates[-1]
    assert [row for row, *_ in update.added] == [0]
    assert not update.removed
    assert not update.moved

    batch.add(3)
    batch.remove(3)
    batch.state.refresh(3)
    assert recorder.updates[-1] is None


def test_min_tokens_forbids_stop_tokens_until_the_output_is_long_enough():
    output: list[int] = []
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3])
    params.update_from_model(eos_token_ids=(5,))
    state = SamplingState(max_num_reqs=2, vocab_size=8, device="cpu")
    state.add_request(0, params, [1], output)
    logits = torch.tensor([[0.0, 1, 2, 8, 3, 9, 4, 5]])
    tokens = []
    for _ in range(3):
        sampled = Sampler()(logits.clone(), state.refresh(1)).sampled_token_ids
        output.append(int(sampled))
        tokens.append(int(sampled))
    assert tokens == [7, 7, 5]


def test_min_tokens_looks_at_the_output_of_a_resumed_request():
    params = SamplingParams(min_tokens=2, stop_token_ids=[3])
    processor = MinTokensLogitsProcessor(None, CPU, False)
    processor.update_state(BatchUpdate(1, added=[(0, params, None, [1, 1])]))
    assert torch.isfinite(processor.apply(torch.zeros(1, 8))).all()
    processor.update_state(BatchUpdate(1, added=[(0, params, None, [1])]))
    assert torch.isneginf(processor.apply(torch.zeros(1, 8))).nonzero().tolist() == [[0, 3]]


class Boost(LogitsProcessor):
    """Adds to a token's logit; remembers what it was given."""

    def __init__(self, config=None, device=CPU, is_pin_memory=False, *, invariant=False):
        self.invariant = invariant
        self.given: list[torch.Tensor] = []

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update):
        self.batch_update = batch_update

    def apply(self, logits):
        self.given.append(logits.clone())
        logits = logits.clone()  # a processor may return a new tensor
        logits[:, 2] += 1000.0
        return logits


def test_processors_run_before_or_after_the_temperature():
    before, after = Boost(), Boost(invariant=True)
    batch = Batch(before, after)
    batch.add(0, temperature=0.5, logit_bias={1: 3.0}, repetition_penalty=2.0)
    batch.add(1, temperature=0.0)
    logits = torch.rand(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    tokens = Sampler()(logits.clone(), batch.state.refresh(2)).sampled_token_ids
    assert tokens.tolist() == [2, 2]
    # The bias is in, the penalty (the prompt holds tokens 1 and 2) is not yet.
    biased = logits.clone()
    biased[0, 1] += 3.0
    torch.testing.assert_close(before.given[0], biased)
    scaled = biased.clone()
    scaled[:, 2] += 1000.0
    scaled[0, [1, 2]] /= 2.0
    scaled[0] /= 0.5
    torch.testing.assert_close(after.given[0], scaled)


def test_argmax_invariant_processors_are_skipped_when_nothing_is_drawn():
    after = Boost(invariant=True)
    batch = Batch(after)
    batch.add(0, temperature=0.0)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 5] = 1.0
    assert Sampler()(logits, batch.state.refresh(1)).sampled_token_ids.tolist() == [5]
    assert not after.given


class Adapter(AdapterLogitsProcessor):
    """Forces a token; the number of arguments of its callables is the request's choice."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        kind = (params.extra_args or {}).get("kind")

        def force(logits, token_id):
            forced = torch.full_like(logits, -torch.inf)
            forced[token_id] = 0.0
            return forced

        if kind == "two":
            return lambda output_ids, logits: force(logits, len(output_ids))
        if kind == "three":
            return lambda prompt_ids, output_ids, logits: force(
                logits, prompt_ids[0] + len(output_ids)
            )
        if kind == "in place":

            def in_place(output_ids, logits):
                logits[9] = 1e4
                return logits

            return in_place
        return None


def test_adapter_binds_each_callable_to_its_request():
    batch = Batch(Adapter(None, CPU, False))
    kinds = ["two", None, "three", "in place"]
    for row, kind in enumerate(kinds):
        batch.add(row, extra_args={"kind": kind})
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        if step == 3:
            batch.remove(0)
            batch.move(3, 0)
            del kinds[0]
            kinds.insert(0, kinds.pop())
        logits = torch.rand(len(kinds), VOCAB_SIZE, generator=generator)
        logits[:, 12] = 50.0
        sampled = Sampler()(logits, batch.state.refresh(len(kinds))).sampled_token_ids.tolist()
        expected = {"two": step, None: 12, "three": 3 + step, "in place": 9}
        assert sampled == [expected[kind] for kind in kinds]
        for row, token_id in enumerate(sampled):
            batch.rows[row][2].append(token_id)


class Faulty(AdapterLogitsProcessor):
    """Does what a request's `fault` says, from its third output token on."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        fault = (params.extra_args or {}).get("fault")
        if fault == "no callable":
            raise KeyError("made in vain")
        if fault == "one argument":
            return lambda logits: logits
        if fault == "not callable":
            return 5
        results = {
            "none": lambda logits: None,
            "number": lambda logits: 1.0,
            "batch": lambda logits: logits[None],
            "short": lambda logits: logits[:1],
            "scalar": lambda logits: logits.sum(),
            "double": lambda logits: logits.double(),
            "half": lambda logits: logits.half(),
            "meta": lambda logits: logits.to("meta"),
            "raises": lambda logits: logits[0] / (1 // 0),
            "exits": lambda logits: sys.exit(3),
        }
        if fault is None:
            return None

        def process(output_ids, logits):
            logits[3] = 1e6
            return logits if len(output_ids) < 2 else results[fault](logits)

        return process


@pytest.mark.parametrize(
    ("fault", "first_step", "message"),
    [
        ("no callable", 0, r"raised KeyError: 'made in vain' \(.*test_logits_processors.py:\d+\)"),
        ("one argument", 0, "callable of .* got one of 1 arguments"),
        ("not callable", 0, "raised TypeError"),
        ("none", 2, r"returned None; it must return .* float32 \[16\] on cpu"),
        ("number", 2, "returned a float"),
        ("batch", 2, r"returned a tensor of float32 \[1, 16\] on cpu"),
        ("short", 2, r"float32 \[1\] on cpu"),
        ("scalar", 2, r"float32 \[\] on cpu"),
        ("double", 2, r"float64 \[16\] on cpu"),
        ("half", 2, r"float16 \[16\] on cpu"),
        ("meta", 2, r"float32 \[16\] on meta"),
        ("raises", 2, "raised ZeroDivisionError"),
        ("exits", 2, "raised SystemExit: 3"),
    ],
)
def test_a_request_fails_alone_in_its_own_callable(fault, first_step, message):
    def run(with_fault: bool) -> tuple[list[list[int]], list[dict[int, str]]]:
        batch = Batch(Faulty(None, CPU, False), Adapter(None, CPU, False))
        batch.add(0, temperature=0.7)
        batch.add(1, extra_args={"fault": fault} if with_fault else None)
        batch.add(2, extra_args={"kind": "two"})
        generator = torch.Generator().manual_seed(4)
        sampled, failures = [], []
        for _ in range(5):
            logits = torch.randn(3, VOCAB_SIZE, generator=generator)
            tokens = Sampler()(logits, batch.state.refresh(3)).sampled_token_ids.tolist()
            failures.append(batch.state.take_failures())
            sampled.append([tokens[0], tokens[2]])
            for row, token_id in enumerate(tokens):
                batch.rows[row][2].append(token_id)
        return sampled, failures

    others, failures = run(with_fault=True)
    assert [bool(step) for step in failures] == [step == first_step for step in range(5)]
    assert list(failures[first_step]) == [1]
    reason = failures[first_step][1]
    assert reason.startswith("logits processor Faulty: the request's callable ")
    assert re.search(message, reason)
    assert others == run(with_fault=False)[0]


class BatchWide(LogitsProcessor):
    """Does one thing wrong."""

    def __init__(self, fault, *, invariant=False):
        self.fault = fault
        self.invariant = invariant

    def is_argmax_invariant(self) -> bool:
        if self.fault == "is_argmax_invariant":
            raise OSError("no idea")
        return self.invariant

    def update_state(self, batch_update) -> None:
        if self.fault == "update_state":
            raise OSError("no state")

    def apply(self, logits):
        if self.fault == "in place":
            logits.resize_(1, 1)
        results = {
            "apply": lambda: 1 // 0,
            "none": lambda: None,
            "rows": lambda: logits[:1],
            "columns": lambda: logits[:, :-1],
            "dtype": lambda: logits.double(),
            "device": lambda: logits.to("meta"),
        }
        return results.get(self.fault, lambda: logits)()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("is_argmax_invariant", "is_argmax_invariant raised OSError: no idea"),
        ("update_state", "update_state raised OSError: no state"),
        ("apply", "apply raised ZeroDivisionError"),
        ("none", r"apply returned None; it must .* float32 \[2, 16\] on cpu"),
        ("rows", r"apply returned a tensor of float32 \[1, 16\]"),
        ("columns", r"apply returned a tensor of float32 \[2, 15\]"),
        ("dtype", r"apply returned a tensor of float64 \[2, 16\]"),
        ("device", r"apply returned a tensor of float32 \[2, 16\] on meta"),
        ("in place", r"apply returned a tensor of float32 \[1, 1\] on cpu"),
    ],
)
def test_a_batch_wide_failure_names_the_processor(fault, message, invariant):
    def run() -> None:
        batch = Batch(BatchWide(fault, invariant=invariant))
        batch.add(0)
        batch.add(1)
        Sampler()(torch.zeros(2, VOCAB_SIZE), batch.state.refresh(2))

    with pytest.raises(LogitsProcessorError, match="logits processor BatchWide: " + message):
        run()


def test_an_adapter_without_its_own_constructor_says_so():
    class Forgetful(Adapter):
        def __init__(self, config, device, is_pin_memory):
            pass

    batch = Batch(Forgetful(None, CPU, False))
    batch.add(0)
    with pytest.raises(LogitsProcessorError, match="Forgetful: update_state raised AttributeError"):
        batch.state.refresh(1)


def test_a_constructor_that_raises_is_named():
    class Unmade(Adapter):
        def __init__(self, config, device, is_pin_memory):
            raise OSError("no weights")

    with pytest.raises(LogitsProcessorError, match="Unmade: its constructor raised OSError: no w"):
        build_logits_processors([Unmade], None, CPU)


def test_classes_and_names_are_resolved():
    loaded = load_logits_processors(
        [Recorder, "engine.worker.builtin_processors:MinTokensLogitsProcessor"]
    )
    assert loaded == [Recorder, MinTokensLogitsProcessor]
    assert load_logits_processors([]) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_colon", "must look like"),
        (":Class", "must look like"),
        ("no.such.module:Class", "cannot be loaded: importing 'no.such.module' failed"),
        ("engine.worker.logits_processor:Missing", "has no 'Missing'"),
        ("engine.worker.logits_processor:BatchUpdate", "subclasses of LogitsProcessor"),
        ("engine.worker.logits_processor:AdapterLogitsProcessor", "does not implement"),
        (int, "subclasses of LogitsProcessor"),
        (3, "subclasses of LogitsProcessor"),
    ],
)
def test_bad_specifications_are_named(spec, message):
    with pytest.raises(ConfigError, match=message):
        load_logits_processors([spec])


def test_misuse_of_rows_is_noticed():
    batch = Batch()
    batch.add(0)
    with pytest.raises(AssertionError, match="occupied"):
        batch.add(0)
    with pytest.raises(AssertionError, match="empty"):
        batch.remove(3)
    batch.add(2)
    with pytest.raises(AssertionError, match="holes"):
        batch.state.refresh(2)
