"""Files of network weights that a user brings."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megavis.config.errors import UserError


def read_weights_file(path: str | Path) -> dict[str, Tensor]:
    """Read a `.safetensors` file, or one of plain tensors that `torch.save` has written.

    Of a training checkpoint, the tensors under `state_dict` are taken.

    Raises:
        UserError: the file is missing, or holds something else; nothing but tensors is unpickled.
    """
    try:
        if str(path).endswith(".safetensors"):
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        return dict(content.get("state_dict", content))
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} holds more than tensors, which is not unpickled; save its state_dict alone, as"
            " .safetensors, where you trust the file"
        ) from None
    # Damaged files end in many kinds of errors, of which all mean the same to the user.
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is no file of network weights: {reason}") from None
