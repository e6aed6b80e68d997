"""Streams a checkpoint's weights, one tensor at a time, under Transformers' names.

Knows safetensors files, alone or listed by an index, hands GGUF files on, and tells weights that no
model can run with. Does not know models: `copy_weights` fills whatever slots it is given.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.architecture import read_json
from engine.checkpoint.gguf import GGUFFile
from engine.checkpoint.locate import ModelSource
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError, UnsupportedModelError

INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WEIGHT_TYPES = ("F32", "BF16", "F16", "F64")
"""The same in safetensors' words."""


def iterate_weights(source: ModelSource, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor on the CPU); types as stored, GGUF's quantised ones as float32.

    Raises:
        CheckpointError: a file is missing, cut off or malformed.
    """
    if source.is_gguf:
        from engine.models.gguf_weights import iterate_gguf_weights

        yield from iterate_gguf_weights(GGUFFile(source.path), config)
        return
    for path in safetensors_files(source.path):
        yield from _iterate_safetensors(path)


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder, all of them present.

    Raises:
        CheckpointError: there are none, or the index names one that is missing.
    """
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path} has no 'weight_map'")
        paths = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {', '.join(missing)}, named in {INDEX_NAME}. Download the "
                "checkpoint again."
            )
        return paths
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise CheckpointError(
            f"{folder} holds no .safetensors file (found: {found}). Checkpoints in other formats "
            "must be converted to safetensors or GGUF first."
        )
    return paths


def stored_types(source: ModelSource) -> dict[str, str]:
    """The number type of each tensor in safetensors files, by name, in the format's own words.

    Reads headers alone.

    Raises:
        CheckpointError: a file is missing, cut off or malformed.
    """
    types = {}
    for path in safetensors_files(source.path):
        with _open(path) as file:
            types.update({name: file.get_slice(name).get_dtype() for name in file.keys()})  # noqa: SIM118
    return types


def refuse_quantised(types: dict[str, str], origin: str) -> None:
    """Refuse files that hold weights as something else than plain floating point.

    A configuration that names a quantisation has been refused before; here it keeps silent, and
    such numbers would be taken for the weights themselves. Whole numbers that are no weights, such
    as tables and old masks, may come.

    Raises:
        UnsupportedModelError: it names the first such tensor.
    """
    for name, kind in types.items():
        is_small_float = kind.startswith("F") and kind not in _WEIGHT_TYPES
        if is_small_float or (name.endswith("weight") and kind not in _WEIGHT_TYPES):
            raise _quantised(name, kind, origin)


def refuse_not_finite(name: str, weight: torch.Tensor, origin: str) -> None:
    """Refuse NaN and infinities, which would turn every token's logits into NaN.

    Raises:
        CheckpointError: it names the tensor.
    """
    # One pass without memory of its own. A sum of finite numbers may overflow, so look closer then.
    if weight.sum().isfinite() or weight.isfinite().all():
        return
    raise CheckpointError(
        f"{origin}: tensor {name!r} holds NaN or infinite numbers as {_name_of(weight.dtype)}. "
        "Either the file is damaged or its training diverged (get another copy or checkpoint), or "
        "its numbers are too large for this dtype (set dtype='bfloat16' or 'float32')."
    )


def _quantised(name: str, kind: str, origin: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{origin}: tensor {name!r} holds {kind} numbers. The weights are quantised, although "
        "config.json has no quantization_config. Use the unquantised checkpoint or a GGUF file."
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}. The file may be truncated; download it again."
        ) from error


def _iterate_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


def copy_weights(
    weights: Iterator[tuple[str, torch.Tensor]],
    slots: dict[str, torch.Tensor],
    *,
    ignored: tuple[str, ...],
    origin: str,
) -> None:
    """Copy every weight into its slot, cast to the slot's type and device.

    Args:
        weights: the checkpoint's tensors.
        slots: all names that must come, with the tensors to fill.
        ignored: ends of names that may come and are dropped.
        origin: the checkpoint, for messages.

    Raises:
        CheckpointError: a name is missing or unknown, a shape differs, or a number is not finite.
        UnsupportedModelError: a weight is not plain floating point.
    """
    missing = dict(slots)
    for name, weight in weights:
        slot = slots.get(name)
        if slot is None:
            if name.endswith(ignored):
                continue
            raise CheckpointError(
                f"{origin}: unexpected tensor {name!r}; the configuration describes no such part"
            )
        if slot.shape != weight.shape:
            raise CheckpointError(
                f"{origin}: tensor {name!r} has shape {tuple(weight.shape)}, the configuration "
                f"calls for {tuple(slot.shape)}"
            )
        if weight.dtype not in _WEIGHT_DTYPES:
            raise _quantised(name, _name_of(weight.dtype), origin)
        slot.copy_(weight)
        refuse_not_finite(name, slot, origin)
        missing.pop(name, None)
    if missing:
        names = ", ".join(list(missing)[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"{origin}: missing tensors {names}{more}")
