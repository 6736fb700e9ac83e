"""Tokenizers that are trained networks: images to latents or ids, and back.

Such a tokenizer is a separate run and is named by its run folder. Its identity, the SHA-256 of
kind, settings and weights, is recorded in every shard that it encodes, and training rejects shards
of another tokenizer. To add a tokenizer, derive from `LatentTokenizer` or `IdTokenizer` and add it
to `TOKENIZERS`. The functions at the end are shared by networks that downsample an image to a grid.

Legend: b images, s side of an image in pixels, c channels, h and w sides of the latent grid, n ids,
d channels of a codebook entry.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import yaml
from torch import Tensor, nn

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import file_damage, read_manifest
from megavis.checkpoint.format.tensor_files import load_tensors, require_readable
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.config.errors import UserError, describe_os_error
from megavis.data.codecs.label_maps import TargetKind

TOKENIZERS: dict[str, str] = {
    "vae": "megavis.tokenizers.vae:VAE",
    "vae_label_maps": "megavis.tokenizers.label_map_vae:LabelMapVAE",
    "vqgan": "megavis.tokenizers.vqgan:VQGAN",
}
"""`module:class` by the name of the objective that trains it; imported on demand."""


class NetworkTokenizer(nn.Module, ABC):
    """Base class of both kinds of tokenizer; `settings`, JSON values, determine the outputs.

    Attributes:
        kind: short name of the network, as recorded in shards: `vae`, `vqgan`.
        prefix: prefix of its parameter names in the run's checkpoints.
    """

    kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = dict(settings)

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> NetworkTokenizer:
        """Return the network that a run's config describes, with initial weights."""

    def identity(self) -> str:
        """Return the SHA-256 of kind, settings and weights as 64 hexadecimal digits."""
        digest = hashlib.sha256(json.dumps([self.kind, self.settings], sort_keys=True).encode())
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
            # Hash bytes, since NumPy has no bfloat16.
            content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(content.numpy().data)
        return digest.hexdigest()


class LatentTokenizer(NetworkTokenizer):
    """Images to a grid of normal distributions and back."""

    @property
    def target_kind(self) -> TargetKind | None:
        """Kind of the label maps that it encodes; None for colour images."""
        return None

    @abstractmethod
    def latent_shape(self, image_size: int) -> tuple[int, int, int]:
        """Return (c, h, w) for images of side `image_size`; raise UserError if not supported."""

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """Encode images uint8 `[b, s, s, 3]` as means and scales, float32 `[b, 2, c, h, w]`."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents `[b, c, h, w]` to images uint8 `[b, s, s, 3]`."""


class IdTokenizer(NetworkTokenizer):
    """Images to codebook ids and back."""

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Entries of the codebook, at most 65,536."""

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """Channels d of a codebook entry."""

    @abstractmethod
    def num_tokens(self, image_size: int) -> int:
        """Return n for images of side `image_size`; raise UserError if not supported."""

    @abstractmethod
    def features(self, images: Tensor) -> Tensor:
        """Encode images uint8 `[b, s, s, 3]`, without quantization, as float32 `[b, n, d]`."""

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """Encode images uint8 `[b, s, s, 3]` as ids int64 `[b, n]` in raster order."""

    @abstractmethod
    def decode(self, ids: Tensor) -> Tensor:
        """Decode ids int64 `[b, n]` of a square grid to images uint8 `[b, s, s, 3]`."""


@dataclass(frozen=True)
class FrozenEncoder:
    """A tokenizer that encodes the images of every micro-batch.

    Attributes:
        run_folder: its run.
        key: config key that names it.
        image_size: side of the images in pixels.
        gives: method of the tokenizer that is called.
    """

    run_folder: str
    key: str
    image_size: int
    gives: Literal["encode", "features"] = "encode"


def open_tokenizer(
    run_folder: Path | str, *, device: torch.device | str = "cpu"
) -> LatentTokenizer | IdTokenizer:
    """Open the latest checkpoint of a tokenizer's run, frozen and in evaluation mode.

    Raises:
        UserError: the folder is not a tokenizer's run, or has no checkpoint or a damaged one.
    """
    run_folder = Path(run_folder)
    tokenizer = initial_tokenizer(read_config(run_folder), run_folder)
    checkpoint = latest_checkpoint(run_folder)
    if checkpoint is None:
        raise UserError(f"{run_folder} has no checkpoint yet: train it first")
    for name, stored in read_manifest(checkpoint).files.items():
        if complaint := file_damage(checkpoint / name, stored):
            raise UserError(complaint)
    try:
        tokenizer.load_state_dict(read_weights(checkpoint, tokenizer.prefix))
    except RuntimeError as error:
        raise UserError(f"{checkpoint} does not fit the run's config.yaml: {error}") from None
    return tokenizer.to(device).eval().requires_grad_(False)


def read_config(run_folder: Path) -> dict[str, Any]:
    """Return a run's config; raise UserError if it has no `objective` section."""
    path = run_folder / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        section = config["objective"]
    except FileNotFoundError:
        raise UserError(f"{run_folder} is not a run folder: it holds no config.yaml") from None
    except PermissionError as error:
        raise UserError(describe_os_error(error)) from None
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        section = None
    if not isinstance(section, dict):
        raise UserError(f"{path} is not the config of a run: it has no objective section")
    return dict(config)


def initial_tokenizer(config: Mapping[str, Any], where: Path) -> LatentTokenizer | IdTokenizer:
    """Build the tokenizer of a run's config, with initial weights.

    Args:
        config: the config as a tree.
        where: run folder or file that it comes from, for messages.

    Raises:
        UserError: the config is not a tokenizer's.
    """
    name = config["objective"].get("name")
    if name not in TOKENIZERS:
        known = ", ".join(sorted(TOKENIZERS))
        raise UserError(
            f"{where} is a run of objective {name!r}, which is not a tokenizer; tokenizers"
            f" are: {known}"
        )
    module, _, attribute = TOKENIZERS[name].partition(":")
    kind: Any = getattr(importlib.import_module(module), attribute)
    built: LatentTokenizer | IdTokenizer = kind.from_config(config)
    return built


def grid_side(image_size: int, downsampling: int, *, network: str) -> int:
    """Return the side of the latent grid; raise UserError unless it is an integer."""
    side, rest = divmod(image_size, downsampling)
    if rest or not side:
        raise UserError(
            f"this {network} takes images whose side is a multiple of {downsampling}, not"
            f" {image_size}"
        )
    return side


def to_pixels(images: Tensor, network: nn.Module) -> Tensor:
    """Convert uint8 `[b, s, s, 3]` to float32 `[b, 3, s, s]` in [0, 1] on the network's device."""
    device = next(network.parameters()).device
    return images.to(device).permute(0, 3, 1, 2).float() / 255.0


def to_images(pixels: Tensor) -> Tensor:
    """Convert pixels `[b, 3, s, s]`, nominally in [0, 1], to uint8 `[b, s, s, 3]`, clipped."""
    return (pixels.clamp(0.0, 1.0) * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1)


def read_weights_file(
    path: str | Path, *, inside: Sequence[str] = ("state_dict",)
) -> dict[str, Tensor]:
    """Read a `.safetensors` file, or a file of plain tensors written by `torch.save`.

    Only tensors, numbers, strings and the options of a command line are unpickled.

    Args:
        path: the file.
        inside: keys of a training checkpoint; tensors are read from the first that it has.

    Raises:
        UserError: the file is missing, or contains something else.
    """
    try:
        if str(path).endswith(".safetensors"):
            return load_tensors(Path(path))
        require_readable(Path(path))
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
        parts = (content[key] for key in inside if content.get(key) is not None)
        found = next(parts, content)
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
    except UserError:
        raise
    except PermissionError as error:
        raise UserError(describe_os_error(error)) from None
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} contains more than tensors, which is not unpickled; if you trust the file,"
            " save only its state_dict, as .safetensors"
        ) from None
    # Damaged files raise many kinds of errors.
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is not a file of network weights: {reason}") from None
