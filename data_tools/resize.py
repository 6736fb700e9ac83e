"""Any picture to a square of a given side: bicubic, antialiased, centre crop.

Pillow does the resize: its bicubic is the reference for palette tokens, and torch's antialiased
bicubic differs from it by one in about one byte of five hundred.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from data_tools.decode import RefusedImageError

RESIZE = "Pillow bicubic (antialiased)"
CROP = "shorter side to image_size, then centre crop"
_MAX_ASPECT = 64


def resize_and_crop(image: np.ndarray, *, size: int) -> np.ndarray:
    """Resize the shorter side to `size` and cut the centre: uint8 `[h, w, 3]` to `[size, size, 3]`.

    The longer side becomes round(longer * size / shorter); the cut begins at
    floor((longer - size) / 2). Smaller images are enlarged.

    Raises:
        RefusedImageError: one side is more than 64 times the other.
    """
    height, width = image.shape[:2]
    shorter = min(height, width)
    if max(height, width) > _MAX_ASPECT * shorter:
        raise RefusedImageError(f"aspect ratio above {_MAX_ASPECT}")
    new_height, new_width = round(height * size / shorter), round(width * size / shorter)
    resized = Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BICUBIC)
    top, left = (new_height - size) // 2, (new_width - size) // 2
    return np.asarray(resized.crop((left, top, left + size, top + size)))
