"""From a memory budget to a number of KV blocks and the context length that they allow."""

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.log import get_logger
from engine.types.kv_cache import KVCacheSpec

_MIN_TOKENS = 2
"""A prompt of one token, and the room that its first output token makes necessary."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """The KV pool as it will be allocated."""

    num_blocks: int
    num_bytes: int
    max_model_len: int
    """At most what was asked for, and at most what all blocks together hold."""


def size_kv_cache(
    spec: KVCacheSpec,
    *,
    available_bytes: int,
    num_blocks_override: int | None,
    max_model_len: int,
) -> KVCacheSize:
    """Decide the pool; one sequence of `max_model_len` always fits into it.

    Raises:
        ConfigError: not even one block fits, or too few tokens for any request.
    """
    num_blocks = num_blocks_override or max(0, available_bytes) // spec.block_bytes
    if num_blocks == 0:
        raise ConfigError(
            f"no room for a KV cache: one block needs {spec.block_bytes} bytes and "
            f"{available_bytes} are available. Raise gpu_memory_utilization or "
            "kv_cache_memory_bytes, or lower max_num_batched_tokens or block_size."
        )
    num_tokens = num_blocks * spec.block_size
    if num_tokens < _MIN_TOKENS:
        raise ConfigError(
            f"no request can ever run: the KV cache holds {num_blocks} block of "
            f"{spec.block_size} token, and the shortest request needs {_MIN_TOKENS} tokens. Raise "
            "num_gpu_blocks_override, kv_cache_memory_bytes or block_size."
        )
    if num_tokens < max_model_len:
        bound = "gpu_memory_utilization or kv_cache_memory_bytes"
        if num_blocks_override is not None:
            bound = "num_gpu_blocks_override"
        logger.warning(
            "max_model_len is reduced from %d to %d: the KV cache holds %d blocks of %d tokens. "
            "Raise %s to keep it.",
            max_model_len,
            num_tokens,
            num_blocks,
            spec.block_size,
            bound,
        )
    logger.info("KV cache: %d blocks of %d tokens", num_blocks, spec.block_size)
    return KVCacheSize(num_blocks, num_blocks * spec.block_bytes, min(max_model_len, num_tokens))
