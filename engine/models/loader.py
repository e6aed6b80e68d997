"""Builds a model and fills it from its checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.attention.base import AttentionBackend
from engine.checkpoint.locate import ModelSource
from engine.checkpoint.model_config import ModelConfig
from engine.layers.memory import keep_freed_memory
from engine.models.base import CausalLM
from engine.models.decoder import DecoderForCausalLM
from engine.models.native_decoder import NativeDecoder
from engine.models.registry import model_class


def load_model(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention_backend: AttentionBackend,
) -> CausalLM:
    """Build the model of a checkpoint, load its weights, and make it ready to run.

    Args:
        source: where the checkpoint is.
        config: what `read_model_config` read from it.
        dtype: type of weights and activations.
        device: where the model runs.
        attention_backend: what its attention layers call.

    Raises:
        CheckpointError: a weight is missing, unexpected, cut off or of the wrong shape.
        UnsupportedModelError: no class runs this architecture, or it needs a missing feature.
    """
    if device.type == "cpu":
        keep_freed_memory()
    build = model_class(config, is_gguf=source.is_gguf)
    with torch.inference_mode(), _single_threaded():
        model = build.load(source, config, backend=attention_backend, dtype=dtype, device=device)
        if isinstance(model, DecoderForCausalLM):
            if attention_backend.name == "native":
                model.native = NativeDecoder(model, config)
            else:
                model.pack_weights()
    return model.eval()


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Keep PyTorch on one thread: copying hundreds of small weights only waits for the others."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
