"""Chained hashes of full KV blocks: equal hash, equal whole prefix.

Knows tokens and salts; knows no block and no pool.
"""

import hashlib
from array import array

_DIGEST_BYTES = 16


def hash_block_tokens(parent: bytes | None, token_ids: list[int], extra: bytes = b"") -> bytes:
    """Hash one full block together with everything before it.

    Args:
        parent: hash of the block before, None for the first.
        token_ids: the block's tokens, exactly block_size of them.
        extra: whatever else must agree (the request's cache salt); part of the first block,
            and through the chain of all others.
    """
    digest = hashlib.blake2b(parent or b"", digest_size=_DIGEST_BYTES)
    digest.update(array("q", token_ids).tobytes())
    digest.update(extra)
    return digest.digest()


class BlockHasher:
    """Hashes each full block of a growing token list once."""

    __slots__ = ("block_size",)

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def extend(self, hashes: list[bytes], token_ids: list[int], salt: str | None) -> None:
        """Append to `hashes` those of the full blocks of `token_ids` that it lacks."""
        size = self.block_size
        parent = hashes[-1] if hashes else None
        for begin in range(len(hashes) * size, len(token_ids) - size + 1, size):
            extra = salt.encode() if salt and begin == 0 else b""
            parent = hash_block_tokens(parent, token_ids[begin : begin + size], extra)
            hashes.append(parent)
