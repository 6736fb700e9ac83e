"""Pack tokens into nine bits each: the `.tok` payload of palette shards.

N tokens below 512 become N bytes with the low eight bits of each token in raster order, followed by
ceil(N / 8) bytes with the packed ninth bits, the first token in the most significant bit. If N is
not divisible by 8, the last byte is padded with zero bits.
"""

from __future__ import annotations

import numpy as np

MAX_TOKENS = 512


def payload_bytes(num_tokens: int) -> int:
    """Return the size of `num_tokens` packed tokens in bytes."""
    return num_tokens + (num_tokens + 7) // 8


def pack_tokens(tokens: np.ndarray) -> np.ndarray:
    """Pack tokens `[b, n]`, each in [0, 512), to uint8 `[b, payload_bytes(n)]`.

    Raises:
        ValueError: a token does not fit in nine bits.
    """
    if tokens.size and (tokens.min() < 0 or tokens.max() >= MAX_TOKENS):
        raise ValueError(f"tokens must lie in [0, {MAX_TOKENS})")
    tokens = tokens.astype(np.uint16, copy=False)
    low = (tokens & 0xFF).astype(np.uint8)
    high = np.packbits((tokens >> 8).astype(np.uint8), axis=1)
    return np.concatenate([low, high], axis=1)


def unpack_tokens(payload: np.ndarray, *, num_tokens: int) -> np.ndarray:
    """Unpack uint8 `[b, payload_bytes(n)]` to uint16 `[b, n]`, each in [0, 512).

    Raises:
        ValueError: the rows are not `payload_bytes(num_tokens)` long.
    """
    if payload.shape[1] != payload_bytes(num_tokens):
        raise ValueError(
            f"{num_tokens} tokens take {payload_bytes(num_tokens)} bytes, not {payload.shape[1]}"
        )
    tokens = payload[:, :num_tokens].astype(np.uint16)
    high = np.unpackbits(payload[:, num_tokens:], axis=1, count=num_tokens).astype(np.uint16)
    tokens |= high << 8
    return tokens
