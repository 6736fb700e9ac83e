"""Grids of images, enlarged so that single pixels are visible.

Legend: b images, n patches of an image, h and w height and width of an image in pixels, H and W of
the grid; all colours are uint8.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from megavis.data.format.files import write_atomically

_VISIBLE_SIDE = 128
_LINE = 2
_LINE_SHADE = 255
_HIDDEN_SHADE = 127


def hide(images: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Paint images `[b, h, w, 3]` grey where `given`, bool `[h, w]` or `[b, h, w]`, is false."""
    return np.where(given[..., None], images, np.uint8(_HIDDEN_SHADE))


def image_grid(rows: Sequence[Sequence[np.ndarray]], *, factor: int | None = None) -> np.ndarray:
    """Arrange images of equal size in a grid with thin white lines between them.

    Args:
        rows: uint8 images `[h, w, 3]`; all rows have the same length.
        factor: enlargement of each image; by default to a height of about 128 pixels.

    Returns:
        uint8 `[H, W, 3]`.

    Raises:
        ValueError: there is no image, or the rows are of different lengths.
    """
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError("a grid needs rows of the same length")
    height, width = rows[0][0].shape[:2]
    factor = factor or max(1, _VISIBLE_SIDE // height)
    height, width = height * factor, width * factor
    shape = (len(rows) * (height + _LINE) + _LINE, len(rows[0]) * (width + _LINE) + _LINE, 3)
    canvas = np.full(shape, _LINE_SHADE, np.uint8)
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            top, left = _LINE + r * (height + _LINE), _LINE + c * (width + _LINE)
            enlarged = image.repeat(factor, axis=0).repeat(factor, axis=1)
            canvas[top : top + height, left : left + width] = enlarged
    return canvas


def completion_grid(
    originals: np.ndarray, given: np.ndarray, completions: Sequence[np.ndarray]
) -> np.ndarray:
    """Show completions, one row per image: original | given part | completions.

    Args:
        originals: uint8 `[b, h, w, 3]`.
        given: bool `[h, w]` or `[b, h, w]`, true where the original was given.
        completions: uint8 `[b, h, w, 3]` each.

    Returns:
        uint8 `[H, W, 3]`.
    """
    columns = [originals, hide(originals, given), *completions]
    return image_grid([list(row) for row in zip(*columns, strict=True)])


def sample_grid(images: np.ndarray, *, num_columns: int = 8) -> np.ndarray:
    """Arrange images `[b, h, w, 3]` row by row; cells that are left over are white."""
    num_columns = min(num_columns, len(images))
    blank = np.full((-len(images) % num_columns, *images.shape[1:]), _LINE_SHADE, np.uint8)
    filled = list(np.concatenate([images, blank]))
    return image_grid(
        [filled[start : start + num_columns] for start in range(0, len(filled), num_columns)]
    )


def patches_to_pixels(chosen: Tensor, grid: tuple[int, int], height: int, width: int) -> Tensor:
    """Expand a mask of patches to pixels: bool `[b, n]` to `[b, h, w]`.

    Args:
        chosen: mask of patches in raster order.
        grid: rows and columns of patches.
        height: h.
        width: w.
    """
    rows, columns = grid
    cells = chosen.view(len(chosen), rows, columns)
    return cells.repeat_interleave(height // rows, 1).repeat_interleave(width // columns, 2)


def save_png(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 `[H, W, 3]` as a PNG file, atomically. Raises OSError."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())
