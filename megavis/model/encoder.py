"""An encoder: a Vision Transformer whose output the blocks of another Transformer attend to.

It lies in the first layer, so that it is trained, split and saved as any other. What it gives is
carried to the blocks under the name `MEMORY`, with its gradient.

Legend: b images, H and W pixels, c patches of an image, h hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megavis.model.core import Block, Core
from megavis.model.init import Initialization, normal, truncated_normal, xavier_uniform
from megavis.model.norms import Norm
from megavis.model.patches import PatchEmbedding
from megavis.model.positions import Positions
from megavis.tokenizers.patches import patchify


class Encoder(nn.Module):
    """Patches, learned positions, blocks in which all see all, and a last norm.

    Width, heads and MLP are those of the Transformer that attends to it; biases are everywhere, as
    Vision Transformers have them.
    """

    def __init__(self, core: Core, *, num_layers: int, patch_size: int) -> None:
        """Build.

        Args:
            core: of the Transformer that attends to it.
            num_layers: blocks of the encoder.
            patch_size: side of a patch in pixels; must divide that of the images.
        """
        super().__init__()
        own = core_of_encoder(core, num_layers)
        width, numbers = own.megatron.hidden_size, 3 * patch_size**2
        self.patch_size, self.side = patch_size, core.config.data.image_size // patch_size
        # Flax's default for a convolution.
        self.linear_patches = PatchEmbedding(numbers, width, truncated_normal(numbers**-0.5))
        self.positions = Positions(
            "learned",
            height=self.side,
            width=self.side,
            hidden_size=width,
            fill=normal(width**-0.5),
        )
        self.blocks = nn.ModuleList(Block(own, number + 1) for number in range(num_layers))
        self.norm = Norm(own.megatron, width, own.megatron.layernorm_epsilon)

    def forward(self, images: Tensor) -> Tensor:
        """Encode float `[b, H, W, 3]`, -1 to 1: `[c, b, h]`, whole on every process."""
        places = torch.arange(self.side**2, device=images.device)[None]
        hidden = self.positions(self.linear_patches(patchify(images, self.patch_size)), places)
        hidden = hidden.transpose(0, 1).contiguous()
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)


def core_of_encoder(core: Core, num_layers: int) -> Core:
    """Return a core for an encoder of so many blocks, for the Transformer that attends to it."""
    sizes = {"num_layers": num_layers}
    biases = {"add_bias": True, "attention_bias": True, "norm_bias": "all"}
    return core.with_stack(
        name="encoder",
        model=core.model.model_copy(update=sizes | biases),
        visibility_kind="full",
        initialization=Initialization(*[xavier_uniform] * 5),
        carried_names=(),
        drop_path=0.0,
        relative_grid=None,
        # A memory is whole on every process: no sequence is split on the way to it.
        may_split_tokens=False,
    )
