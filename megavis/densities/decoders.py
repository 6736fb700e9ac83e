"""Decoders: from the backbone's output, and a noisy token, to a token.

"Denoising Autoregressive Representation Learning", sections 3.1 and 4.1.

- `linear`: one matrix. With a noisy patch, on the sum of the output and the patch's embedding.
- `mlp`: residual layers before it, each a norm and an MLP of the backbone's width: a Transformer
  block without attention. The paper says no more than "residual MLP".
- `transformer`: blocks in which the two tokens of each place, output and noisy patch, see each
  other and nothing else. The paper does not say which of them is read; here the noisy patch is, so
  the last block computes nothing else for the output than keys and values.

Legend: b images, s places, h hidden size, d numbers of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megavis.config.choices import DecoderKind
from megavis.model.core import Block, Core, FeedForward
from megavis.model.embeddings import LastNorm, WholeLinear
from megavis.model.flops import Workload
from megavis.model.heads import Head
from megavis.model.layer_state import LayerState, PackedState, from_bits
from megavis.model.norms import Norm
from megavis.model.stack import PlannedStack
from megavis.model.visibility import AttentionContext, Visibility


class NoisyEmbedding(WholeLinear):
    """A linear map of noisy patches; conditioned on γ by a further channel of each pixel."""

    def __init__(
        self, patch_width: int, hidden_size: int, *, tells_gamma: bool, channels: int
    ) -> None:
        num_pixels = patch_width // channels
        super().__init__(patch_width + tells_gamma * num_pixels, hidden_size)
        self.num_pixels, self.tells_gamma, self.channels = num_pixels, tells_gamma, channels

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed patches with γ behind each, `[b, s, d + 1]`; returns `[b, s, h]`."""
        noisy, gamma = inputs[..., :-1], inputs[..., -1:]
        if self.tells_gamma:
            channels = noisy.unflatten(-1, (self.num_pixels, self.channels))
            channel = gamma[..., None].expand(*channels.shape[:-1], 1)
            noisy = torch.cat([channels, channel], dim=-1).flatten(-2)
        return super().forward(noisy)


class ResidualLayer(nn.Module):
    """A norm and an MLP, split over the tensor group as a block's."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.norm = whole_norm(core)
        self.mlp = FeedForward(core.megatron, core)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[b, s, h]` to the same shape."""
        mixed, bias = self.mlp(self.norm(hidden))
        return hidden + mixed if bias is None else hidden + mixed + bias


class SumDecoder(nn.Module):
    """The linear map and the residual MLP."""

    def __init__(self, core: Core, num_layers: int, patch_width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ResidualLayer(core) for _ in range(num_layers))
        # Without layers the last norm of the backbone comes right before.
        self.norm = whole_norm(core) if num_layers else None
        self.linear = WholeLinear(core.megatron.hidden_size, patch_width)

    def forward(self, output: Tensor, noisy: Tensor | None) -> Tensor:
        """Decode outputs `[b, s, h]` and embedded patches `[b, s, h]` to `[b, s, d]`."""
        hidden = output if noisy is None else output + noisy
        for layer in self.layers:
            hidden = layer(hidden)
        return self.linear(hidden if self.norm is None else self.norm(hidden))


class PairDecoder(nn.Module):
    """Transformer blocks over the pair."""

    def __init__(self, core: Core, num_layers: int, patch_width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(core, i + 1) for i in range(num_layers))
        self.norm = whole_norm(core)
        self.linear = WholeLinear(core.megatron.hidden_size, patch_width)

    def forward(self, output: Tensor, noisy: Tensor | None) -> Tensor:
        """Decode outputs `[b, s, h]` and embedded patches `[b, s, h]` to `[b, s, d]`."""
        assert noisy is not None
        pair = torch.stack([output.to(noisy.dtype), noisy]).flatten(1, 2)  # [2, b · s, h]
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Block)
            query_start = 1 if i == len(self.layers) - 1 else 0
            pair = layer.run(pair, AttentionContext(Visibility("full"), query_start=query_start))
        return self.linear(self.norm(pair[-1])).unflatten(0, noisy.shape[:2])


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder that is not built yet.

    Attributes:
        kind: see above.
        width: d.
        layers: of an `mlp` or a `transformer`.
        denoises: it reads noisy patches.
        tells_gamma: γ is a further channel of each.
        channels: numbers of a token that belong to one place: colours of a pixel.
    """

    kind: DecoderKind
    width: int
    layers: int
    denoises: bool
    tells_gamma: bool = False
    channels: int = 3

    @property
    def num_layers(self) -> int:
        """Layers before the last linear map."""
        return 0 if self.kind == "linear" else self.layers

    @property
    def noisy_width(self) -> int:
        """Numbers of a noisy patch, with γ; 0 where there is none."""
        return self.denoises * (self.width + self.tells_gamma * self.width // self.channels)

    def work(self, core: Core) -> DecoderWork:
        """Return what it computes on the backbone of this core before the last linear map."""
        width = core.model.hidden_size
        embedding = 2.0 * self.noisy_width * width
        if self.kind == "transformer":
            return DecoderWork(embedding, core_of_decoder(core, self.num_layers))
        return DecoderWork(embedding + self.num_layers * 4.0 * width * core.model.mlp_size)


@dataclass(frozen=True)
class DecoderWork:
    """What a head computes in training before its last matrix, for each position that it reads.

    Attributes:
        flops: operations of the forward pass that no block does, counted as in `model/flops.py`.
        blocks: core of its blocks, which see a pair of tokens each; None where it has none.
    """

    flops: float = 0.0
    blocks: Core | None = None

    def stack(self, num_positions: int) -> PlannedStack | None:
        """Return the blocks with what they compute for so many positions of an image."""
        if self.blocks is None:
            return None
        pairs = 2 * num_positions
        return PlannedStack(self.blocks, Workload(pairs, pairs, 2.0, num_positions, num_outputs=0))


NO_DECODER = DecoderWork()
"""That of a head that is a norm and a matrix."""


class PatchHead(Head):
    """The last norm and the decoder."""

    norm: LastNorm

    def __init__(self, core: Core, decoder: DecoderSpec) -> None:
        """Build on the backbone of this core."""
        super().__init__(core, LastNorm(core))
        inner = core_of_decoder(core, decoder.num_layers)
        self.noisy: NoisyEmbedding | None = None
        if decoder.denoises:
            self.noisy = NoisyEmbedding(
                decoder.width,
                core.megatron.hidden_size,
                tells_gamma=decoder.tells_gamma,
                channels=decoder.channels,
            )
        network = PairDecoder if decoder.kind == "transformer" else SumDecoder
        self.decoder = network(inner, decoder.num_layers, decoder.width)

    def forward(self, state: PackedState) -> Tensor:
        """Map `[s, b, h]`, and noisy patches where they are carried, to `[b, s, d]`."""
        carried = LayerState.unpack(state, self.core.carried_names).carried
        noisy = from_bits(carried["noisy"]) if "noisy" in carried else None
        return self.decode(self.outputs(state), noisy)

    def outputs(self, state: PackedState) -> Tensor:
        """Return the backbone's output `[b, s, h]`, whole on every process of a tensor group."""
        return self.norm.whole(LayerState.unpack(state, self.core.carried_names).hidden)

    def decode(self, output: Tensor, noisy: Tensor | None) -> Tensor:
        """Decode `[b, s, h]`.

        Args:
            output: of the backbone.
            noisy: patches `[b, s, d + 1]` with γ behind each; None without diffusion.
        """
        if self.noisy is None or noisy is None:
            return self.decoder(output, None)
        return self.decoder(output, self.noisy(noisy))


def core_of_decoder(core: Core, num_layers: int) -> Core:
    """Return a core for blocks that take whole sequences, in which all see all."""
    return core.with_stack(
        name="decoder",
        model=core.model.model_copy(update={"num_layers": num_layers}),
        visibility_kind="full",
        carried_names=(),
        drop_path=0.0,
        may_split_tokens=False,
    )


def whole_norm(core: Core) -> Norm:
    """Return a norm of the hidden size."""
    return Norm(core.megatron, core.megatron.hidden_size, core.megatron.layernorm_epsilon)
