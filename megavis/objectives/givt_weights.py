"""GIVT's released Transformers under megavis's names, and the config that their arrays tell.

The names are those of the released checkpoints: `decoder/EncDecBlock3/...`, or layers stacked on
axis 1 of `decoder/EncDecBlock/...`; kernels input first, attention's as width, heads, head size.
An adapter that was trained jointly stands under `params_adaptor/`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig
from megavis.objectives.givt_config import GIVTConfig, LatentTokensConfig, MaskGITConfig
from megavis.objectives.givt_layers import REPLACEMENT
from megavis.objectives.givt_released import Arrays, adapter_weights

Mode = Literal["causal", "maskgit"]
_IMAGENET_CLASSES = 1000
_ADAPTER = "params_adaptor/"
_BLOCK = "decoder/EncDecBlock"


@dataclass(frozen=True)
class ReleasedModel:
    """A released Transformer, and what its arrays do not tell.

    Attributes:
        arrays: by released name, the adapter's without its prefix taken off.
        mode: causal or masked; told by the number of positions when None.
        num_classes: told by the rows of the labels when None.
    """

    arrays: Arrays
    mode: Mode | None = None
    num_classes: int | None = None

    def objective(self) -> LatentTokensConfig:
        """Return the objective's section.

        Raises:
            UserError: the arrays do not tell it, or are of another model.
        """
        token_size = self._shape("EmbedTargets/kernel")[0]
        outputs = self._shape("decoder/LogitsDense/kernel")[1]
        is_full = outputs == token_size**2 + token_size
        num_components, rest = divmod(outputs, 1 + 2 * token_size)
        if rest and not is_full:
            raise UserError(f"{outputs} outputs are no mixture of tokens of {token_size} numbers")
        stacked = self._stacked()
        keys: dict[str, Any] = {
            "latent_channels": token_size // stacked,
            "stacked_latents": stacked,
            "num_components": 1 if is_full else num_components,
            "covariance": "full" if is_full else "diagonal",
            **self._labels(),
            **self._adapter(),
        }
        return MaskGITConfig(**keys) if self.is_masked else GIVTConfig(**keys)

    def model(self) -> ModelConfig:
        """Return the `model` section."""
        _, heads, head_size = self._block(0)["SelfAttn/query/kernel"].shape
        return ModelConfig(
            num_layers=self.num_layers,
            hidden_size=heads * head_size,
            num_attention_heads=heads,
            ffn_hidden_size=self._block(0)["MLP/Dense_0/kernel"].shape[1],
            normalization="layer_norm",
            norm_bias="last",
            norm_epsilon=1e-6,
            activation="gelu_tanh",
            add_bias=True,
            attention_bias=False,
        )

    @property
    def side(self) -> int:
        """Latents on the side of the grid."""
        return math.isqrt(self._num_tokens * self._stacked())

    @property
    def num_layers(self) -> int:
        """Blocks."""
        if f"{_BLOCK}/LayerNorm1/scale" in self.arrays:
            return int(self.arrays[f"{_BLOCK}/LayerNorm1/scale"].shape[1])
        names = {name.split("/")[1] for name in self.arrays if name.startswith(_BLOCK)}
        return len(names)

    @property
    def is_masked(self) -> bool:
        """True for MaskGIT, which has one position more than tokens."""
        if self.mode is not None:
            return self.mode == "maskgit"
        count = self._shape("decoder/pos_emb")[1]
        causal, masked = (any(_is_square(n * s) for s in (1, 2)) for n in (count, count - 1))
        if causal == masked:
            raise UserError(f"{count} positions do not tell the model; say --mode")
        return masked

    def weights(self) -> dict[str, Tensor]:
        """Return float32 tensors by megavis's names.

        Raises:
            UserError: an array is missing.
        """
        positions = torch.from_numpy(self._array("decoder/pos_emb")[0])
        named = {
            "embedding.labels.weight": torch.from_numpy(self._array("EmbedLabels/embedding")),
            **_dense("embedding.linear", self.arrays, "EmbedTargets"),
            "embedding.positions.weight": positions[1:] if self.is_masked else positions,
            "head.norm.weight": torch.from_numpy(self._array("decoder/LayerNorm/scale")),
            "head.norm.bias": torch.from_numpy(self._array("decoder/LayerNorm/bias")),
            **_dense("head.linear", self.arrays, "decoder/LogitsDense"),
        }
        if self.is_masked:
            named["embedding.label_position"] = positions[0]
        for name, tensor in adapter_weights(self._adapter_arrays()).items():
            named[f"embedding.adapter.{name}"] = tensor
        for number in range(self.num_layers):
            for name, tensor in _block_weights(self._block(number)):
                named[f"blocks.{number}.{name}"] = tensor
        return {name: tensor.float().contiguous() for name, tensor in named.items()}

    def _block(self, number: int) -> Arrays:
        prefix = f"{_BLOCK}/"
        if f"{prefix}LayerNorm1/scale" in self.arrays:
            return {
                name.removeprefix(prefix): np.moveaxis(array, 1, 0)[number]
                for name, array in self.arrays.items()
                if name.startswith(prefix)
            }
        prefix = f"{_BLOCK}{number}/"
        found = {n.removeprefix(prefix): a for n, a in self.arrays.items() if n.startswith(prefix)}
        if "SelfAttn/query/kernel" not in found:
            raise UserError(f"the file has no {prefix}SelfAttn; is it a released GIVT?")
        if any(name.startswith("CrossAttn") for name in found):
            raise UserError("the file has cross-attention: an encoder-decoder model, not read here")
        return found

    def _labels(self) -> dict[str, Any]:
        """Tell classes and null label by the rows of the table."""
        rows = self._shape("EmbedLabels/embedding")[0] - (REPLACEMENT + 1) * self.is_masked
        classes = self.num_classes
        if classes is None:
            classes = {1: 0, _IMAGENET_CLASSES: 1000, _IMAGENET_CLASSES + 1: 1000}.get(rows)
        if classes is None or rows - max(1, classes) not in (0, 1 if classes else 0):
            raise UserError(
                f"a table of {rows} labels does not tell the classes; say --num-classes"
            )
        return {"num_classes": classes, "label_dropout": 0.1 if rows > max(1, classes) else 0.0}

    def _adapter(self) -> dict[str, Any]:
        arrays = self._adapter_arrays()
        if not arrays:
            return {}
        blocks = {name.split("/")[0] for name in arrays}
        bottleneck = 2 * arrays["modules_0/Conv_0/kernel"].shape[3]
        return {"adapter_blocks": len(blocks), "adapter_bottleneck": bottleneck}

    def _adapter_arrays(self) -> Arrays:
        return {
            name.removeprefix(_ADAPTER): array
            for name, array in self.arrays.items()
            if name.startswith(_ADAPTER)
        }

    @property
    def _num_tokens(self) -> int:
        return int(self._shape("decoder/pos_emb")[1] - self.is_masked)

    def _stacked(self) -> int:
        """Tell stacked pairs by a number of tokens that is half a square."""
        return 1 if _is_square(self._num_tokens) else 2

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._array(name).shape

    def _array(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise UserError(f"the file has no {name}; is it a released GIVT?")
        return np.asarray(self.arrays[name], dtype=np.float32)


def _block_weights(arrays: Arrays) -> Iterator[tuple[str, Tensor]]:
    """Yield a block's tensors by megavis's names."""

    def rows(name: str) -> Tensor:
        """Return a projection `[width, heads, head size]` as `[heads, head size, width]`."""
        kernel = np.asarray(arrays[f"SelfAttn/{name}/kernel"], np.float32)
        return torch.from_numpy(kernel).permute(1, 2, 0)

    out = torch.from_numpy(np.asarray(arrays["SelfAttn/out/kernel"], np.float32))
    yield "self_attention.linear_q.weight", rows("query").flatten(0, 1)
    # Head by head, each head's keys before its values.
    yield (
        "self_attention.linear_kv.weight",
        torch.stack([rows("key"), rows("value")], dim=1).flatten(0, 2),
    )
    yield "self_attention.linear_proj.weight", out.flatten(0, 1).t()
    for own, released in (("input_layernorm", "LayerNorm1"), ("pre_mlp_layernorm", "LayerNorm3")):
        yield f"{own}.weight", torch.from_numpy(np.array(arrays[f"{released}/scale"], np.float32))
    for own, released in (("mlp.linear_fc1", "MLP/Dense_0"), ("mlp.linear_fc2", "MLP/Dense_1")):
        yield from _dense(own, arrays, released).items()


def _dense(own: str, arrays: Mapping[str, np.ndarray], released: str) -> dict[str, Tensor]:
    kernel, bias = (arrays[f"{released}/{part}"] for part in ("kernel", "bias"))
    return {
        f"{own}.weight": torch.from_numpy(np.array(kernel, np.float32)).t(),
        f"{own}.bias": torch.from_numpy(np.array(bias, np.float32)),
    }


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number
