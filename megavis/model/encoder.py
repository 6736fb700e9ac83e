"""An image encoder: a separate stack of blocks, to whose output the decoder's blocks attend.

The first layer embeds both its patches and the decoder's rows. The encoder's blocks are layers in
the model's list, so that a pipeline can divide them: the decoder's rows, with their gradient, and
all that they carry are passed along unchanged. The layer after the blocks swaps the two: the rows
become the hidden states, and the encoder's output is carried as `MEMORY`.

Legend: b images, H and W pixels, c patches of an image, w width of the encoder, h width of the
decoder, m rows of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megavis.config.schema import ModelConfig
from megavis.grammar import words
from megavis.model.context_parallel import seen_by_parts
from megavis.model.core import MEMORY, Core
from megavis.model.embeddings import LastNorm, ReplicatedLinear, grid_positions, to_stream
from megavis.model.flops import Workload
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.parameters import (
    Initialization,
    ParamGroupOptions,
    normal,
    truncated_normal,
    xavier_uniform,
)
from megavis.model.stack import LayerPlan, block_plans
from megavis.tokenizers.patches import patchify

ROWS = "rows"
"""Name under which the decoder's rows are carried through the encoder's blocks."""


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes of an encoder, by the word's keys, and what follows from them."""

    keys: words.EncodedImage

    @property
    def options(self) -> ParamGroupOptions:
        """Optimizer options of its parameters."""
        return ParamGroupOptions(self.keys.learning_rate_scale)

    def num_patches(self, image_size: int) -> int:
        """Return c for images of side `image_size`."""
        return (image_size // self.keys.patch_size) ** 2

    def model(self, above: ModelConfig) -> ModelConfig:
        """Return the settings of its blocks, given the decoder's."""
        changed: dict[str, Any] = {"num_layers": self.keys.num_layers}
        changed |= {"add_bias": True, "attention_bias": True, "norm_bias": "all"}
        changed |= {"qk_norm": False}
        if self.keys.hidden_size is not None:
            changed |= {"hidden_size": self.keys.hidden_size, "ffn_hidden_size": None}
        for key in ("num_attention_heads", "activation", "norm_epsilon"):
            if (value := getattr(self.keys, key)) is not None:
                changed[key] = value
        return above.model_copy(update=changed)

    def core(self, above: Core, name: str) -> Core:
        """Return a core for the blocks `name` below `above`: a ViT with all biases."""
        passing = (_passing(each) for each in above.carried_names if each != MEMORY)
        return above.with_stack(
            name=name,
            model=self.model(above.model),
            visibility_kind="full",
            initialization=Initialization(*[xavier_uniform] * 5),
            carried_names=(ROWS, *passing),
            drop_path=0.0,
            relative_grid=None,
        )

    def layers(
        self, above: Core, *, image_size: int, num_rows: int, seed: int, name: str
    ) -> list[LayerPlan]:
        """Return the encoder's blocks and output layer, which run once per image.

        Layer decay treats them like the first layer, which embeds the patches. `num_rows` is the
        number of rows of an image in the decoder, whose core is `above`.
        """
        core, width = self.core(above, f"{name}.blocks"), above.model.hidden_size
        patches, own = self.num_patches(image_size), self.keys.hidden_size
        # The patch embedding has the FLOPs of a head with as many outputs as a patch has values.
        work = Workload.of_one_stream(patches, 3 * self.keys.patch_size**2, causal=False)
        blocks = block_plans(
            core,
            work,
            seed=seed,
            depth=0,
            deepens=False,
            phase="once",
            num_passing=num_rows * width,
        )
        flops = 0 if own in (None, width) else 2 * patches * own * width
        output = partial(EncoderOutput, core, above)
        plans = [*blocks, LayerPlan(name, output, seed, flops=flops, phase="once")]
        return [replace(plan, options=self.options) for plan in plans]


def _passing(name: str) -> str:
    """Return the name under which a tensor of the decoder is carried through the encoder."""
    return f"{ROWS}.{name}"


class EncoderInput(nn.Module):
    """Patch embedding with learned positions.

    Args:
        sizes: its patch size, which must divide the image size, and the scale of positions.
    """

    def __init__(self, core: Core, sizes: EncoderSizes) -> None:
        super().__init__()
        patch_size, std = sizes.keys.patch_size, sizes.keys.position_std
        width, numbers = core.model.hidden_size, 3 * patch_size**2
        self.core, self.patch_size = core, patch_size
        self.side = core.config.data.image_size // patch_size
        # Flax's default initialization of a convolution.
        self.linear_patches = ReplicatedLinear(numbers, width, truncated_normal(numbers**-0.5))
        # 1 / √width is the learned position embedding of big_vision's ViT.
        fill = normal(width**-0.5 if std is None else std)
        self.positions = grid_positions(core, "learned", (self.side, self.side), fill=fill)

    def forward(self, images: Tensor, rows: LayerState | None = None) -> LayerState:
        """Embed images `[b, H, W, 3]` in [-1, 1] as patches `[c, b, w]`.

        They carry the decoder's rows `[m, b, h]`, if there are any, and all that these carry.
        """
        places = torch.arange(self.side**2, device=images.device)[None]
        hidden = self.positions(self.linear_patches(patchify(images, self.patch_size)), places)
        stream = to_stream(hidden, self.core)
        if rows is None:
            # In generation the encoder runs once, before there are rows; its blocks expect all
            # names.
            nothing = stream.new_zeros(0, len(images), 1)
            return LayerState(stream, dict.fromkeys(self.core.carried_names, nothing))
        carried = {_passing(name): tensor for name, tensor in rows.carried.items()}
        return LayerState(stream, {ROWS: rows.hidden, **carried})


class EncoderOutput(nn.Module):
    """The norm after an encoder's blocks, and a linear map if the decoder's width differs."""

    def __init__(self, below: Core, above: Core) -> None:
        super().__init__()
        self.below, self.above = below, above
        self.norm = LastNorm(below)
        widths = below.model.hidden_size, above.model.hidden_size
        self.linear = None if widths[0] == widths[1] else ReplicatedLinear(*widths)

    def forward(self, state: PackedState) -> PackedState:
        """Map `[c, b, w]` to the rows `[m, b, h]`, which carry the memory `[c, b, h]`.

        The memory is replicated on every process of the tensor and the context group.
        """
        stream = LayerState.unpack(state, self.below.carried_names)
        encoded = self.norm.whole(stream.hidden)
        memory = encoded if self.linear is None else self.linear(encoded)
        memory = seen_by_parts(memory, self.above.megatron, self.above.groups)
        carried = {MEMORY: memory.transpose(0, 1).contiguous()}
        for name in self.above.carried_names:
            if name != MEMORY:
                carried[name] = stream.carried[_passing(name)]
        ordered = {name: carried[name] for name in self.above.carried_names}
        return LayerState(stream.carried[ROWS], ordered).pack()
