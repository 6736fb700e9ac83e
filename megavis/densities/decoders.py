"""Patch decoders: map the backbone's output, and optionally a noisy patch, to a patch.

"Denoising Autoregressive Representation Learning", sections 3.1 and 4.1.

- `linear`: one linear layer. With a noisy patch, it is applied to the sum of the output and the
  patch's embedding.
- `mlp`: residual layers before the linear one, each a norm and an MLP of the backbone's width, i.e.
  a Transformer block without attention. The paper only says "residual MLP". A linear map may lead
  to another width, and sin-cos positions of the rows may be added ("Scalable Pre-training of Large
  Autoregressive Image Models", section 4.2).
- `transformer`: blocks in which the two tokens of each position, output and noisy patch, attend
  only to each other. The paper does not say which of the two is decoded; here it is the noisy
  patch, so the last block computes only keys and values for the output.

Legend: b images, s positions, h hidden size, d values of a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.config.section import DecoderKind
from megavis.densities.density import DecoderWork
from megavis.model.context_parallel import splits_context
from megavis.model.core import Block, Core
from megavis.model.embeddings import LastNorm, ReplicatedLinear, WholeNorm
from megavis.model.feed_forward import FeedForward
from megavis.model.heads import Head, predicting
from megavis.model.layer_state import LayerState, PackedState, from_bits
from megavis.model.positions import PLACES, place_coordinates, sincos
from megavis.model.sequence_regions import own_rows
from megavis.model.visibility import AttentionContext, Visibility


@dataclass(frozen=True)
class DecoderSpec:
    """Specification of a decoder.

    Attributes:
        denoises: whether the decoder takes noisy patches.
        appends_gamma: whether γ is appended to each pixel as an extra channel.
        channels: values of a patch per pixel.
        hidden_size: width of its layers, to which a linear map leads; None: the backbone's. For
            `mlp`.
        grid: rows and columns of the tokens whose sin-cos positions are added before the first
            layer; None: none are.
    """

    kind: DecoderKind
    width: int
    layers: int
    denoises: bool
    appends_gamma: bool = False
    channels: int = 3
    hidden_size: int | None = None
    grid: tuple[int, int] | None = None

    @property
    def num_layers(self) -> int:
        """Layers before the final linear layer."""
        return 0 if self.kind == "linear" else self.layers

    @property
    def noisy_width(self) -> int:
        """Values of a noisy patch, including γ; 0 without noisy patches."""
        return self.denoises * (self.width + self.appends_gamma * self.width // self.channels)

    def work(self, core: Core) -> DecoderWork:
        """Return the work before the final linear layer, on the backbone of this core."""
        width = core.model.hidden_size
        embedding = 2.0 * self.noisy_width * width
        if self.kind == "transformer":
            return DecoderWork(embedding, core_of_decoder(core, self.num_layers))
        inner = core_of_decoder(core, self.num_layers, self.hidden_size).model
        layers = self.num_layers * 4.0 * inner.hidden_size * inner.mlp_size
        entry = 0.0 if self.hidden_size is None else 2.0 * width * inner.hidden_size
        # Of the final linear layer, whose inputs are counted as those of the backbone.
        wider = 2.0 * (inner.hidden_size - width) * self.width
        return DecoderWork(embedding + layers + entry + wider)


class PatchHead(Head):
    """The final norm and a decoder.

    Args:
        core: of the backbone.
        num_skipped: leading rows that predict nothing, for which there are no noisy patches.
    """

    norm: LastNorm

    def __init__(self, core: Core, decoder: DecoderSpec, *, num_skipped: int = 0) -> None:
        super().__init__(core, LastNorm(core))
        self.num_skipped = num_skipped
        inner = core_of_decoder(core, decoder.num_layers, decoder.hidden_size)
        self.grid, self.entry = decoder.grid, None
        if decoder.hidden_size is not None:
            widths = core.megatron.hidden_size, decoder.hidden_size
            self.entry = ReplicatedLinear(*widths, has_bias=core.model.add_bias)
        self.noisy: NoisyEmbedding | None = None
        if decoder.denoises:
            self.noisy = NoisyEmbedding(decoder, core.megatron.hidden_size)
        network = PairDecoder if decoder.kind == "transformer" else SumDecoder
        self.decoder = network(inner, decoder.num_layers, decoder.width)

    def forward(self, state: PackedState) -> Tensor:
        """Map `[s, b, h]`, with noisy patches if they are carried, to `[b, s - num_skipped, d]`."""
        carried = LayerState.unpack(state, self.core.carried_names).carried
        noisy = from_bits(carried["noisy"]) if "noisy" in carried else None
        if noisy is not None and self.num_skipped:
            noisy = F.pad(noisy, (0, 0, self.num_skipped, 0))
        if noisy is not None and splits_context(self.core.megatron):
            noisy = own_rows(noisy.transpose(0, 1), self.core.groups.cp).transpose(0, 1)
        decoded = self.norm.gather(self.decode(self.outputs(state), noisy))
        return predicting(decoded, self.num_skipped)

    def outputs(self, state: PackedState) -> Tensor:
        """Return the decoder's input `[b, s, h]`: with context parallelism, of its own tokens.

        It is the backbone's output, mapped to the width of the decoder, with positions.
        """
        stream = LayerState.unpack(state, self.core.carried_names)
        output = self.norm.own(self.normed(state))
        if self.entry is not None:
            output = self.entry(output)
        return output if self.grid is None else self._placed(output, stream.carried[PLACES])

    def _placed(self, output: Tensor, places: Tensor) -> Tensor:
        """Add positions of the rows, whose places are int64 `[b or 1, m]`; the last s are read."""
        assert self.grid is not None
        splits, group = splits_context(self.core.megatron), self.core.groups.cp
        places = places[:, -output.shape[1] * (group.size() if splits else 1) :]
        if splits:
            places = own_rows(places.t(), group).t()
        coordinates = place_coordinates(places, self.grid[1])
        # A single row has one axis, as in `Positions`.
        coordinates = coordinates[..., self.grid[0] == 1 :]
        scaled = self.core.model.position_scale * coordinates
        return output + sincos(scaled, output.shape[-1]).to(output.dtype)

    def decode(self, output: Tensor, noisy: Tensor | None) -> Tensor:
        """Decode `[b, s, h]`.

        Args:
            noisy: noisy patches `[b, s, d + 1]`, each followed by its γ; None without diffusion.
        """
        if self.noisy is None or noisy is None:
            return self.decoder(output, None)
        return self.decoder(output, self.noisy(noisy))


class NoisyEmbedding(ReplicatedLinear):
    """Linear embedding of noisy patches; γ may be appended to each pixel as an extra channel."""

    def __init__(self, decoder: DecoderSpec, hidden_size: int) -> None:
        super().__init__(decoder.noisy_width, hidden_size)
        self.appends_gamma, self.channels = decoder.appends_gamma, decoder.channels

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed noisy patches, each followed by its γ: `[b, s, d + 1]` to `[b, s, h]`."""
        noisy, gamma = inputs[..., :-1], inputs[..., -1:]
        if self.appends_gamma:
            channels = noisy.unflatten(-1, (-1, self.channels))
            channel = gamma[..., None].expand(*channels.shape[:-1], 1)
            noisy = torch.cat([channels, channel], dim=-1).flatten(-2)
        return super().forward(noisy)


class SumDecoder(nn.Module):
    """The `linear` and `mlp` decoders."""

    def __init__(self, core: Core, num_layers: int, patch_width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ResidualLayer(core) for _ in range(num_layers))
        # Without layers, the input has just passed the backbone's final norm.
        self.norm = WholeNorm(core) if num_layers else None
        self.linear = ReplicatedLinear(core.megatron.hidden_size, patch_width)

    def forward(self, output: Tensor, noisy: Tensor | None) -> Tensor:
        """Decode outputs `[b, s, h]` and embedded patches `[b, s, h]` to `[b, s, d]`."""
        hidden = output if noisy is None else output + noisy
        for layer in self.layers:
            hidden = layer(hidden)
        return self.linear(hidden if self.norm is None else self.norm(hidden))


class PairDecoder(nn.Module):
    """The `transformer` decoder: blocks over pairs of output and noisy patch."""

    def __init__(self, core: Core, num_layers: int, patch_width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(core, i + 1) for i in range(num_layers))
        self.norm = WholeNorm(core)
        self.linear = ReplicatedLinear(core.megatron.hidden_size, patch_width)

    def forward(self, output: Tensor, noisy: Tensor | None) -> Tensor:
        """Decode outputs `[b, s, h]` and embedded patches `[b, s, h]` to `[b, s, d]`."""
        assert noisy is not None
        pair = torch.stack([output.to(noisy.dtype), noisy]).flatten(1, 2)  # [2, b · s, h]
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Block)
            query_start = 1 if i == len(self.layers) - 1 else 0
            pair = layer.run(pair, AttentionContext(Visibility("full"), query_start=query_start))
        return self.linear(self.norm(pair[-1])).unflatten(0, noisy.shape[:2])


class ResidualLayer(nn.Module):
    """A pre-norm residual MLP, split over the tensor group like a block's."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.norm = WholeNorm(core)
        self.mlp = FeedForward(core.megatron, core)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[b, s, h]` to the same shape."""
        mixed, bias = self.mlp(self.norm(hidden))
        return hidden + mixed if bias is None else hidden + mixed + bias


def core_of_decoder(core: Core, num_layers: int, hidden_size: int | None = None) -> Core:
    """Return a core for decoder blocks: full attention over unsplit sequences.

    With a `hidden_size` of its own, MLPs are four times as wide.
    """
    sizes: dict[str, int | None] = {"num_layers": num_layers}
    if hidden_size is not None:
        sizes |= {"hidden_size": hidden_size, "ffn_hidden_size": None}
    return core.with_stack(
        name="decoder",
        model=core.model.model_copy(update=sizes),
        visibility_kind="full",
        carried_names=(),
        drop_path=0.0,
        may_split_tokens=False,
    )
