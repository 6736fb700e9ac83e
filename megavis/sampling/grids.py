"""Pictures of samples: grids of small images, enlarged so that each pixel can be seen.

Legend: b images, n patches of an image, h and w their height and width in pixels; all colours
uint8 in 0..255.
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


def enlarge(image: np.ndarray, factor: int) -> np.ndarray:
    """Repeat each pixel: uint8 `[h, w, 3]` to `[h · factor, w · factor, 3]`."""
    return image.repeat(factor, axis=0).repeat(factor, axis=1)


def hide(images: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Return images `[b, h, w, 3]` with grey where `given` is false: bool `[h, w]`, `[b, h, w]`."""
    return np.where(given[..., None], images, np.uint8(_HIDDEN_SHADE))


def image_grid(rows: Sequence[Sequence[np.ndarray]], *, factor: int | None = None) -> np.ndarray:
    """Put images of one size side by side with thin white lines between them.

    Args:
        rows: uint8 images `[h, w, 3]`; each row has equally many.
        factor: how much each is enlarged; about 128 pixels of height when absent.

    Returns:
        uint8 `[H, W, 3]`, as PNG files and TensorBoard take it.

    Raises:
        ValueError: there is no image, or the rows are of different lengths.
    """
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError("a grid needs rows of equally many images")
    height, width = rows[0][0].shape[:2]
    factor = factor or max(1, _VISIBLE_SIDE // height)
    height, width = height * factor, width * factor
    shape = (len(rows) * (height + _LINE) + _LINE, len(rows[0]) * (width + _LINE) + _LINE, 3)
    canvas = np.full(shape, _LINE_SHADE, np.uint8)
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            top, left = _LINE + r * (height + _LINE), _LINE + c * (width + _LINE)
            canvas[top : top + height, left : left + width] = enlarge(image, factor)
    return canvas


def completion_grid(
    originals: np.ndarray, given: np.ndarray, completions: Sequence[np.ndarray]
) -> np.ndarray:
    """Show what a model makes of parts: a row an image, original | what was given | completions.

    Args:
        originals: uint8 `[b, h, w, 3]`.
        given: bool `[h, w]` or `[b, h, w]`, true where the model saw the original.
        completions: uint8 `[b, h, w, 3]` each.

    Returns:
        uint8 `[H, W, 3]`.
    """
    columns = [originals, hide(originals, given), *completions]
    return image_grid([list(row) for row in zip(*columns, strict=True)])


def sample_grid(images: np.ndarray, *, num_columns: int = 8) -> np.ndarray:
    """Show images `[b, h, w, 3]` row by row; places that are left over are white."""
    num_columns = min(num_columns, len(images))
    blank = np.full((-len(images) % num_columns, *images.shape[1:]), _LINE_SHADE, np.uint8)
    filled = list(np.concatenate([images, blank]))
    return image_grid(
        [filled[start : start + num_columns] for start in range(0, len(filled), num_columns)]
    )


def patches_to_pixels(chosen: Tensor, height: int, width: int) -> Tensor:
    """Return which pixels lie in chosen patches: bool `[b, n]` to `[b, h, w]`.

    Args:
        chosen: in raster order, of square patches.
        height: h.
        width: w.
    """
    side = round((height * width / chosen.shape[1]) ** 0.5)
    cells = chosen.view(len(chosen), height // side, width // side)
    return cells.repeat_interleave(side, 1).repeat_interleave(side, 2)


def save_png(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 `[H, W, 3]` as a PNG file, whole or not at all. Raises OSError."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())
