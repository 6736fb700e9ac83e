"""Distance of two images in the features of VGG-16, for training tokenizers.

"The Unreasonable Effectiveness of Deep Features as a Perceptual Metric" (Zhang et al., 2018),
equation 1, with all weights w = 1: features after five ReLUs, normalised over channels, squared
differences summed over channels and averaged over places.

The network's weights are a file that the user gives; none come with megavis. They are constants:
no module of the trained network, no part of a checkpoint.

Legend: b images, H and W pixels.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from megavis.config.errors import UserError

# Of VGG-16 ("Very Deep Convolutional Networks", configuration D): convolutions by their number in
# torchvision's `features`, level by level; a 2×2 maximum pool stands between two levels, and the
# features of a level are those after its last convolution.
_LEVELS = ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PerceptualDistance:
    """VGG-16's first thirteen layers as a function of two images."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        """Keep what is needed of a VGG-16 state dict (`features.0.weight`, ...).

        Raises:
            UserError: when a tensor is missing.
        """
        names = [f"features.{n}.{part}" for level in _LEVELS for n in level for part in _PARTS]
        for name in names:
            if name not in weights:
                raise UserError(
                    f"the VGG-16 weights have no {name}; torchvision's names are wanted"
                )
        self._weights = {name: weights[name].float() for name in names}

    @classmethod
    def load(cls, path: str | Path) -> PerceptualDistance:
        """Read a `.safetensors` file, or a `.pth` file of plain tensors.

        Raises:
            UserError: the file is missing, or holds something else.
        """
        try:
            if str(path).endswith(".safetensors"):
                return cls(load_file(path))
            # Tensors alone: torch refuses to unpickle anything else.
            return cls(torch.load(path, map_location="cpu", weights_only=True))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except Exception as error:
            raise UserError(f"{path} is no file of VGG-16 weights: {error}") from None

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the distance of images `[b, 3, H, W]` in [0, 1]: float32 `[b]`."""
        self._weights = {name: w.to(first.device) for name, w in self._weights.items()}
        distance = torch.zeros(len(first), device=first.device)
        x = torch.cat([_normalise(first.float()), _normalise(second.float())])
        for number, level in enumerate(_LEVELS):
            if number:
                x = F.max_pool2d(x, 2)
            for layer in level:
                weight, bias = (self._weights[f"features.{layer}.{part}"] for part in _PARTS)
                x = F.relu(F.conv2d(x, weight, bias, padding=1))
            ours, theirs = F.normalize(x, dim=1, eps=1e-6).chunk(2)
            distance = distance + (ours - theirs).square().sum(1).mean((1, 2))
        return distance


_PARTS = ("weight", "bias")


def _normalise(pixels: Tensor) -> Tensor:
    mean, std = (pixels.new_tensor(values)[:, None, None] for values in (_MEAN, _STD))
    return (pixels - mean) / std
