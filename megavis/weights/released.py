"""Folders of the Hugging Face Hub, and a run made of released weights, before it is written.

Legend: b images, H and W pixels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from megavis.checkpoint.format.tensor_files import load_tensors
from megavis.config.errors import UserError, describe_os_error
from megavis.config.schema import ObjectiveConfig, RunConfig
from megavis.tokenizers.palette import Palette

Compared = Iterable[tuple[Tensor, Tensor]]
"""Pairs of outputs of equal shapes: ours, and those of the released network."""


class OpenedRun(Protocol):
    """The written run on one process, as `megavis.load` returns it."""

    config: RunConfig
    objective: Any

    def features(self, inputs: Any, layer: int | None = None) -> Tensor:
        """Return pooled features of a layer."""

    def outputs(self, inputs: Any, **options: Any) -> Tensor:
        """Return what the head predicts."""


@dataclass(frozen=True)
class ReleasedRun:
    """The config sections and weights of a run, and a comparison with the released network.

    Attributes:
        objective: the paper's section.
        weights: whole, by megavis's names.
        sections: further config sections, such as `model`.
        validates: the sections require `data.validation`.
        compare: runs both networks on random input; None: the released one cannot be run here.
        compared: what `compare` compares, for the command's message.
        note: a sentence about what differs from the released network, if anything does.
    """

    objective: ObjectiveConfig
    weights: Mapping[str, Tensor]
    image_size: int
    sections: Mapping[str, Any] = field(default_factory=dict)
    validates: bool = False
    palette: Palette | None = None
    compare: Callable[[OpenedRun], Compared] | None = None
    compared: str = "outputs"
    note: str = ""


def random_images(side: int) -> Tensor:
    """Return two images uint8 `[2, side, side, 3]`, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (2, side, side, 3), generator=generator, dtype=torch.uint8)


def read_hub_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and the tensors. Raises UserError as the functions below."""
    return read_json(folder / "config.json"), read_hub_weights(folder)


def read_hub_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder's `model.safetensors`, or of the files that its index lists.

    Raises:
        UserError: it has neither; pickled weights are not opened.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        if not whole.exists():
            raise missing_file(whole)
        return read_tensors(whole)
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{index}: has no weight_map of names of files")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise UserError(f"{index}: names a file outside of the folder, {name}")
        if not (folder / name).exists():
            raise UserError(f"{index}: lists {name}, which is missing from the folder")
        tensors |= read_tensors(folder / name)
    missing = [name for name in files if name not in tensors]
    if missing:
        raise UserError(f"{index}: lists {missing[0]}, which {files[missing[0]]} does not have")
    return tensors


def missing_file(
    path: Path, advice: str = "save the model with transformers' save_pretrained(DIR)"
) -> UserError:
    """Return the error for a folder without a file: it says what the folder has instead."""
    folder = path.parent
    if not folder.is_dir():
        what = "a file, not a folder of a model" if folder.exists() else "no such folder"
        return UserError(f"{folder}: {what}")
    found = ", ".join(sorted(each.name for each in folder.iterdir())[:8])
    return UserError(f"{path}: missing; the folder has {found or 'no files'}; {advice}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, all floats as float32, in which they are compared.

    Raises UserError where it is not whole.
    """
    try:
        stored = load_tensors(path)
    except OSError as error:
        raise UserError(describe_os_error(error)) from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a whole safetensors file ({error})") from None
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in stored.items()
    }


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raises UserError where it is none."""
    if not path.exists():
        raise missing_file(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: not a JSON file") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object")
    return values
