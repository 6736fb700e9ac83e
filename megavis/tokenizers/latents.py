"""Between a VAE's latents on a grid and the sequence of tokens that GIVT models.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.2: the grid is read row by row. At
512² pixels (appendix B, table 5) neighbours of a row are stacked into one token, which makes half
as many of twice the size.

Legend: b images, c channels of a latent, h and w the grid, k latents in a token, n tokens of d
numbers: n = h · w / k, d = k · c.
"""

from __future__ import annotations

from torch import Tensor


def stack(latents: Tensor, count: int) -> Tensor:
    """Stack `count` neighbours of a row: `[b, c, h, w]` to `[b, c · k, h, w / k]`.

    The numbers of one channel are adjacent, as in the released code.
    """
    if count == 1:
        return latents
    pairs = latents.unflatten(3, (-1, count))
    return pairs.permute(0, 1, 4, 2, 3).flatten(1, 2)


def unstack(stacked: Tensor, count: int) -> Tensor:
    """Undo `stack`."""
    if count == 1:
        return stacked
    pairs = stacked.unflatten(1, (-1, count))
    return pairs.permute(0, 1, 3, 4, 2).flatten(3, 4)


def to_tokens(grid: Tensor) -> Tensor:
    """Read a grid `[b, d, h, w]` row by row: `[b, h · w, d]`."""
    return grid.flatten(2).transpose(1, 2)


def to_grid(tokens: Tensor, *, height: int) -> Tensor:
    """Undo `to_tokens`."""
    return tokens.transpose(1, 2).unflatten(2, (height, -1))
