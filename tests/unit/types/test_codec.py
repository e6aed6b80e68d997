"""Messages over the wire: round trips of everything that they may hold, and broken frames."""

import pickle
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.types.codec import MessageDecoder, MessageEncoder, leading_item
from engine.types.logprobs import LogprobsLists
from engine.types.messages import (
    CoreTimes,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from instrumentation import Preemption, StepRecord, WorkerStepRecord
from tests.fakes import sampling_params


class Arrays(msgspec.Struct, array_like=True):
    first: np.ndarray
    inner: list[dict[str, np.ndarray]] = []
    tensor: torch.Tensor | None = None


class Tensors(msgspec.Struct):
    tensor: torch.Tensor


def through(value: Any, kind: Any) -> Any:
    """Encode, copy the frames as a socket would, decode."""
    frames = [bytes(frame) for frame in MessageEncoder().encode(value)]
    return MessageDecoder(kind).decode(frames)


NUMPY_DTYPES = (
    *("?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "F", "D"),
    *("M8[ns]", "m8[us]", "<U5", "S3", ">i4", ">f8"),
)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_arrays_of_all_types(dtype: str) -> None:
    rng = np.random.default_rng(3)
    array = rng.integers(0, 2, size=(3, 4)).astype(dtype)
    back = through(Arrays(array), Arrays).first
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    "array",
    [
        np.array(5.5),
        np.zeros((0,)),
        np.zeros((3, 0, 2), dtype=np.int16),
        np.arange(24).reshape(4, 6)[::2, ::-3],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.broadcast_to(np.arange(3), (2, 3)),
        np.arange(6).reshape(1, 2, 3).transpose(2, 0, 1),
    ],
    ids=["0-d", "empty", "empty 3-d", "strided", "fortran", "broadcast", "transposed"],
)
def test_numpy_arrays_of_all_shapes(array: np.ndarray) -> None:
    back = through(Arrays(array), Arrays).first
    assert back.shape == array.shape
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_special_values_survive_bit_by_bit() -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0, np.finfo(np.float32).tiny], dtype=np.float32)
    assert through(Arrays(array), Arrays).first.tobytes() == array.tobytes()


def test_arrays_within_arrays_of_structs_keep_their_places() -> None:
    value = Arrays(np.array([1]), [{"a": np.array([2]), "b": np.array([3])}, {"c": np.array([4])}])
    back = through(value, Arrays)
    assert [int(back.first[0]), *(int(x[0]) for d in back.inner for x in d.values())] == [
        1,
        2,
        3,
        4,
    ]
    # An encoder starts anew with each message.
    encoder = MessageEncoder()
    assert [len(encoder.encode(value)) for _ in range(3)] == [5, 5, 5]
    assert len(encoder.encode(["no array"])) == 1


TORCH_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 5)], ids=str)
def test_torch_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
    back = through(Tensors(tensor), Tensors).tensor
    assert back.dtype == dtype
    assert back.shape == shape
    assert torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))


def test_torch_tensors_that_are_views() -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(torch.bfloat16).T[1:, ::2]
    assert not tensor.is_contiguous()
    assert torch.equal(through(Tensors(tensor), Tensors).tensor, tensor)
    wanted = torch.ones(2, requires_grad=True)
    assert torch.equal(through(Tensors(wanted), Tensors).tensor, wanted.detach())


def test_a_decoded_tensor_can_be_written_to_and_an_array_cannot() -> None:
    back = through(Arrays(np.arange(3), tensor=torch.arange(3)), Arrays)
    back.tensor[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        back.first[0] = 9


def test_large_frames_are_not_copied_by_the_encoder() -> None:
    array = np.arange(4_000_000, dtype=np.float32)
    frames = MessageEncoder().encode(Arrays(array))
    assert len(frames[0]) < 100
    assert np.shares_memory(np.frombuffer(frames[1], dtype=np.float32), array)
    decoded = MessageDecoder(Arrays).decode(frames).first
    assert np.shares_memory(decoded, array)


def test_numpy_scalars_travel_as_numbers() -> None:
    back = through([np.int64(5), np.float32(0.5)], list[Any])
    assert back == [5, 0.5]


def test_a_request_survives() -> None:
    params = sampling_params(
        max_tokens=None, stop=["x", "é"], stop_token_ids=[3], logit_bias={4: -1.5}, seed=2**63
    )
    request = EngineCoreRequest("r-0", 0, [1, 2, 3], params, 12, -4, "salt", "00-ab-cd-01", 2)
    assert through(request, EngineCoreRequest) == request


def test_outputs_survive() -> None:
    rng = np.random.default_rng(0)
    lists = LogprobsLists(
        rng.integers(0, 99, (2, 3)).astype(np.int32),
        rng.normal(size=(2, 3)).astype(np.float32),
        np.array([1, 4], dtype=np.int32),
    )
    output = EngineCoreOutput(
        "r-0",
        [4, 5],
        new_logprobs=lists,
        finish_reason=FinishReason.LENGTH,
        stop_reason="stop",
        num_cached_tokens=16,
        times=CoreTimes(1, 2, 3, 4, [(5, 6)]),
    )
    record = StepRecord(
        step=7, begin_ns=1, end_ns=2, preempted=(Preemption(1, 2, 3),), scheduled=(1, 5, 2, 1)
    )
    worker = WorkerStepRecord(step=7, begin_ns=1, end_ns=2)
    message = EngineCoreOutputs(
        [output, EngineCoreOutput("r-1", [])], 9, record, worker, UtilityOutput(1, [True, None])
    )
    back = through(message, EngineCoreOutputs)
    assert back.step == record
    assert back.worker_step == worker
    assert back.utility == message.utility
    assert back.outputs[1] == message.outputs[1]
    for mine, theirs in zip(lists, back.outputs[0].new_logprobs, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    assert back.outputs[0].times == output.times
    assert back.outputs[0].finish_reason is FinishReason.LENGTH


def test_random_nested_messages_survive() -> None:
    rng = random.Random(5)

    def value(depth: int) -> Any:
        kinds = [lambda: rng.randrange(-(2**62), 2**62), rng.random, lambda: None, lambda: "ü" * 3]
        if depth:
            kinds += [
                lambda: [value(depth - 1) for _ in range(rng.randrange(4))],
                lambda: {f"k{i}": value(depth - 1) for i in range(rng.randrange(4))},
            ]
        return rng.choice(kinds)()

    for _ in range(200):
        one = value(4)
        assert through(one, Any) == one


def broken(*array: Any, frames: tuple[bytes, ...] = (b"\0" * 4,)) -> list[bytes]:
    return [msgspec.msgpack.encode({"tensor": list(array)}), *frames]


@pytest.mark.parametrize(
    "array",
    [
        ("numpy", "O", [1], 1),
        ("numpy", "<f4", [3], 1),
        ("numpy", "<f4", ["a"], 1),
        ("numpy", "nonsense", [1], 1),
        ("numpy", "<f8", [1], 1),
        ("numpy", "<f4", [1], 2),
        ("numpy", "<f4", [1], 0),
        ("numpy", "<f4", [1], -1),
        ("numpy", "<f4", [1], "1"),
        ("numpy", "<f4", [1]),
        ("torch", "float32", [3], 1),
        ("torch", "float32", [-1, -1], 1),
        ("torch", "float64", [1], 1),
        ("torch", "nonsense", [1], 1),
        ("torch", "load", [1], 1),
        ("torch", "float32", [2], 1),
        ("pickle", "<f4", [1], 1),
    ],
    ids=str,
)
def test_broken_arrays_are_decoding_errors(array: tuple[Any, ...]) -> None:
    with pytest.raises(msgspec.DecodeError):
        MessageDecoder(Tensors).decode(broken(*array))


def test_broken_messages_are_decoding_errors() -> None:
    frames = [bytes(f) for f in MessageEncoder().encode(Arrays(np.arange(3)))]
    decoder = MessageDecoder(Arrays)
    bad: list[list[bytes]] = [[], [b""], [b"\xff\xff"], frames[:1], [frames[0][:-1], *frames[1:]]]
    bad += [[frames[0], frames[1][:-1]], [msgspec.msgpack.encode(5)], [frames[0], b""]]
    for case in bad:
        with pytest.raises(msgspec.DecodeError):
            decoder.decode(case)
    # The decoder is as good as new afterwards.
    np.testing.assert_array_equal(decoder.decode(frames).first, np.arange(3))


@pytest.mark.filterwarnings("ignore:Data type alias")
def test_random_damage_never_raises_anything_else() -> None:
    rng = random.Random(9)
    value = Arrays(np.arange(6), [{"a": np.zeros(2)}], tensor=torch.ones(3))
    frames = [bytearray(f) for f in MessageEncoder().encode(value)]
    decoder = MessageDecoder(Arrays)
    failures = 0
    for _ in range(400):
        damaged = [bytearray(f) for f in frames]
        for _ in range(rng.randrange(1, 4)):
            damaged[0][rng.randrange(len(damaged[0]))] = rng.randrange(256)
        try:
            decoder.decode([bytes(f) for f in damaged])
        except msgspec.DecodeError:
            failures += 1
    assert failures > 200


@pytest.mark.parametrize(
    "item", ["", "a", "request-0" * 3, "x" * 31, "x" * 32, "é" * 200, "y" * 300, "z" * 60_000]
)
@pytest.mark.parametrize("num_items", [0, 8, 20, 70_000])
def test_the_leading_item_is_found_in_a_broken_message(item: str, num_items: int) -> None:
    frame = msgspec.msgpack.encode([item, *range(num_items)])
    end = len(msgspec.msgpack.encode(item)) + {0: 1, 8: 1, 20: 3, 70_000: 5}[num_items]
    for broken in (frame, frame[:end], frame[:end] + b"\xc1\xff"):
        assert leading_item(broken) == item
        assert leading_item(memoryview(broken)) == item
    if item:
        assert leading_item(frame[: end - 1]) is None


def test_the_leading_item_is_text_or_a_natural_number() -> None:
    for number in (0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**64 - 1):
        frame = msgspec.msgpack.encode([number, "x"])
        assert leading_item(frame) == number
        assert leading_item(frame[:1]) is None
    for other in (None, 5, "text", {}, [], [None], [-1], [1.5], [[1]], [b"x"], [True], {"a": 1}):
        assert leading_item(msgspec.msgpack.encode(other)) is None
    for frame in (b"", b"\x91", b"\x91\xa2\xff\xff", b"\xdd", b"\xdc\x00", b"\x91\xdb\xff\xff"):
        assert leading_item(frame) is None


class Evil:
    """Would run code if anybody pickled or unpickled it."""

    def __reduce__(self) -> Any:
        raise AssertionError("pickled")


def test_nothing_is_ever_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickled")

    for name in ("dumps", "loads", "dump", "load"):
        monkeypatch.setattr(pickle, name, refuse)
    for value in (Evil(), {1, object()}, Arrays(np.array([Evil()]))):
        with pytest.raises(TypeError):
            MessageEncoder().encode(value)
    through(Arrays(np.arange(2), tensor=torch.ones(2)), Arrays)
