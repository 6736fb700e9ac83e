"""Folders of the Hugging Face Hub: `config.json` and `model.safetensors`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megavis.config.errors import UserError


def read_hub_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and the tensors. Raises UserError as the functions below."""
    return read_json(folder / "config.json"), read_tensors(folder / "model.safetensors")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises UserError where it is not whole."""
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raises UserError where it is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: not a JSON file") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object")
    return values
