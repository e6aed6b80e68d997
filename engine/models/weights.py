"""Streams a checkpoint's weights, one tensor at a time, under Transformers' names.

Knows safetensors files, alone or listed by an index, and hands GGUF files on. Does not know
models: `copy_weights` fills whatever slots it is given.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from engine.checkpoint.architecture import ModelConfig, read_json
from engine.checkpoint.gguf import GGUFFile
from engine.checkpoint.locate import ModelSource
from engine.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"


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


def _iterate_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}. The file may be truncated; download it again."
        ) from error


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
        CheckpointError: a name is missing or unknown, or a shape differs.
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
        slot.copy_(weight)
        missing.pop(name, None)
    if missing:
        names = ", ".join(list(missing)[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"{origin}: missing tensors {names}{more}")
