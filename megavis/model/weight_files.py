"""Files of network weights that a user brings."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megavis.config.errors import UserError


def read_weights_file(path: str | Path) -> dict[str, Tensor]:
    """Read a `.safetensors` file, or a `.pth` file of plain tensors.

    Raises:
        UserError: the file is missing, or holds something else.
    """
    try:
        if str(path).endswith(".safetensors"):
            return load_file(path)
        # Tensors alone: torch refuses to unpickle anything else.
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        raise UserError(f"{path} is no file of network weights: {error}") from None
