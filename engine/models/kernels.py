"""Whether a model runs in the native kernels or in PyTorch's.

Knows what both settings, `attention_backend` and `cpu_kernels`, ask for together. The choice falls
before the model is built, since cache and weights have another layout in the native kernels.
"""

import torch

from engine.attention.base import AttentionBackend
from engine.attention.registry import select_backend
from engine.checkpoint.model_config import ModelConfig
from engine.config import ModelSettings
from engine.errors import ConfigError
from engine.log import get_logger
from engine.models.registry import model_class

logger = get_logger(__name__)

NATIVE = "native"


def select_kernels(
    settings: ModelSettings,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    is_gguf: bool,
    has_module_hooks: bool,
) -> AttentionBackend:
    """The attention backend; if it is the native one, a decoder of ours runs natively altogether.

    Args:
        has_module_hooks: something brackets the model's modules, so that they must be called.

    Raises:
        ConfigError: a backend of an unknown name, settings that exclude each other, or native
            kernels that are demanded and cannot be had.
    """
    name, kernels = settings.attention_backend, settings.cpu_kernels
    is_demanded = NATIVE in (name, kernels)
    if is_demanded and not ({name, kernels} <= {NATIVE, "auto"}):
        raise ConfigError(
            f"attention_backend={name!r} and cpu_kernels={kernels!r} exclude each other: the "
            "native kernels have a cache of their own. Leave one of them out."
        )
    if device.type != "cpu" or kernels == "torch" or name not in (NATIVE, "auto"):
        if kernels == NATIVE:
            raise ConfigError(f"cpu_kernels='native' does not run on {device}. Use 'auto'.")
        return select_backend(name, device)
    reason = _refusal(config, dtype, block_size, is_gguf=is_gguf, has_module_hooks=has_module_hooks)
    if reason is None:
        try:
            backend = select_backend(NATIVE, device)
        except ConfigError as error:
            reason = str(error)
        else:
            logger.info("the native kernels run the model")
            return backend
    if is_demanded:
        raise ConfigError(f"the native kernels cannot be used: {reason}. Use cpu_kernels='auto'.")
    logger.info("PyTorch's kernels are used, not the native ones: %s", reason)
    return select_backend("auto", device)


def _refusal(
    config: ModelConfig,
    dtype: torch.dtype,
    block_size: int,
    *,
    is_gguf: bool,
    has_module_hooks: bool,
) -> str | None:
    """Why this model cannot run in the native kernels, or None. Builds nothing."""
    from engine.models.decoder import DecoderForCausalLM
    from engine.models.native_decoder import unsupported

    if has_module_hooks:
        return "enable_layerwise_nvtx_tracing brackets modules, which they do not call"
    if not issubclass(model_class(config, is_gguf=is_gguf), DecoderForCausalLM):
        return f"{config.architecture} runs through Transformers"
    return unsupported(config, dtype, block_size)
