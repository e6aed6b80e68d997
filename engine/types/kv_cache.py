"""What a block of the KV cache costs: plain numbers, no tensor."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of the KV cache over all attention layers."""

    block_size: int
    num_layers: int
    num_kv_heads: tuple[int, ...]
    """Per layer."""
    head_dim: tuple[int, ...]
    """Per layer."""
    element_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of block_size tokens in every layer."""
        per_token = sum(h * d for h, d in zip(self.num_kv_heads, self.head_dim, strict=True))
        return 2 * per_token * self.block_size * self.element_bytes
