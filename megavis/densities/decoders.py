"""Patch decoders: map the backbone's output, and optionally a noisy patch, to a patch.

"Denoising Autoregressive Representation Learning", sections 3.1 and 4.1.

- `linear`: one linear layer. With a noisy patch, it is applied to the sum of the output and the
  patch's embedding.
- `mlp`: residual layers before the linear one, each a norm and an MLP of the backbone's width, i.e.
  a Transformer block without attention. The paper only says "residual MLP". Optionally, a linear
  map changes the width and sin-cos positions of the rows are added ("Scalable Pre-training of Large
  Autoregressive Image Models", section 4.2).
- `transformer`: blocks in which the two tokens of each position, output and noisy patch, attend
  only to each other. The paper does not say which of the two is decoded; here it is the noisy
  patch, so the last block computes only keys and values for the output.
- `modulated_mlp`: see `modulated_mlp.py`.

Legend: b images, s positions, h hidden size, d values of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.config.section import DenoiserKind
from megavis.densities.density import DecoderWork
from megavis.densities.modulated_mlp import ModulatedDecoder
from megavis.densities.modulated_mlp import flops as modulated_flops
from megavis.grammar import words
from megavis.model.context_parallel import splits_context
from megavis.model.core import Block, Core
from megavis.model.embeddings import LastNorm, ReplicatedLinear, WholeNorm, grid_positions
from megavis.model.feed_forward import FeedForward
from megavis.model.heads import Head, predicting
from megavis.model.layer_state import LayerState, PackedState, from_bits
from megavis.model.parameters import normal, set_decay
from megavis.model.positions import PLACES, Positions, place_coordinates, sincos
from megavis.model.sequence_regions import own_rows
from megavis.model.visibility import AttentionContext, Visibility


@dataclass(frozen=True)
class DecoderSpec:
    """Specification of a decoder.

    Attributes:
        denoises: whether the decoder takes noisy patches.
        num_outputs: values predicted for a patch.
        appends_gamma: whether γ is appended to each pixel as an extra channel.
        channels: values of a patch per pixel.
        hidden_size: width of its layers, entered through a linear map; None: the backbone's. For
            `mlp`, and for `modulated_mlp`, which always has this map.
        grid: rows and columns of the tokens whose positions are added; None: none are.
        learns_positions: positions are learned and added to the backbone's output; else they are
            sin-cos and added before the first layer.
        keys: the config's, whose noise levels `modulated_mlp` embeds.
        num_noises: noisy patches of each position in training.
    """

    kind: DenoiserKind
    width: int
    layers: int
    denoises: bool
    num_outputs: int
    appends_gamma: bool = False
    channels: int = 3
    hidden_size: int | None = None
    grid: tuple[int, int] | None = None
    learns_positions: bool = False
    keys: words.Diffusion | None = None
    num_noises: int = 1

    @property
    def num_layers(self) -> int:
        """Layers before the final linear layer."""
        return 0 if self.kind == "linear" else self.layers

    @property
    def noisy_width(self) -> int:
        """Values of a noisy patch, including γ; 0 without noisy patches."""
        return self.denoises * (self.width + self.appends_gamma * self.width // self.channels)

    def entry_size(self, core: Core) -> int | None:
        """Return the width that a linear map gives to the output; None without a map."""
        if self.kind == "modulated_mlp":
            return self.hidden_size or core.model.hidden_size
        return self.hidden_size

    def work(self, core: Core) -> DecoderWork:
        """Return the work before the final linear layer, on the backbone of this core."""
        width, entry = core.model.hidden_size, self.entry_size(core)
        inner, count = entry or width, self.num_noises
        embedding = 2.0 * count * self.noisy_width * inner
        # The final linear layer, of which one product with the backbone's width is counted already.
        wider = 2.0 * (count * inner - width) * self.num_outputs
        mapped = 0.0 if entry is None else 2.0 * width * entry
        if self.kind == "transformer":
            return DecoderWork(embedding + wider, core_of_decoder(core, self.num_layers), count)
        if self.kind == "modulated_mlp":
            layers = modulated_flops(inner, self.num_layers)
        else:
            sizes = core_of_decoder(core, self.num_layers, self.hidden_size).model
            inner_sizes = sizes.mlp_input_size + sizes.mlp_size
            layers = self.num_layers * 2.0 * sizes.hidden_size * inner_sizes
        return DecoderWork(embedding + count * layers + mapped + wider)


class PatchHead(Head):
    """The final norm and a decoder.

    Args:
        core: core of the backbone.
        num_skipped: leading rows that predict nothing, for which there are no noisy patches.
    """

    norm: LastNorm

    def __init__(self, core: Core, decoder: DecoderSpec, *, num_skipped: int = 0) -> None:
        super().__init__(core, LastNorm(core))
        self.num_skipped = num_skipped
        width, entry = core.megatron.hidden_size, decoder.entry_size(core)
        self.width, self.grid, self.entry = decoder.width, decoder.grid, None
        self.positions: Positions | None = None
        if decoder.learns_positions:
            assert decoder.grid is not None
            self.positions = grid_positions(core, "learned", decoder.grid, fill=normal(0.02))
        if entry is not None:
            has_bias = decoder.kind == "modulated_mlp" or core.model.add_bias
            self.entry = ReplicatedLinear(width, entry, has_bias=has_bias)
        self.noisy: NoisyEmbedding | None = None
        if decoder.denoises:
            self.noisy = NoisyEmbedding(decoder, entry or width)
        self.decoder = self._network(decoder, entry or width)

    def _network(self, decoder: DecoderSpec, width: int) -> nn.Module:
        """Build the network after the maps of output and noisy patch to its width."""
        if decoder.kind == "modulated_mlp":
            assert decoder.keys is not None
            assert self.entry is not None
            assert self.noisy is not None
            for parameter in (*self.entry.parameters(), *self.noisy.parameters()):
                set_decay(parameter, "never")
            return ModulatedDecoder(width, decoder.num_layers, decoder.num_outputs, decoder.keys)
        inner = core_of_decoder(self.core, decoder.num_layers, decoder.hidden_size)
        network = PairDecoder if decoder.kind == "transformer" else SumDecoder
        return network(inner, decoder.num_layers, decoder.num_outputs)

    def forward(self, state: PackedState) -> Tensor:
        """Map `[s, b, h]`, with noisy patches if they are carried, to `[b, s - num_skipped, o]`.

        o are the outputs for a patch, times the noisy patches of a position.
        """
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
        if self.positions is not None:
            places = self._places(output, stream.carried)
            # Rows outside the grid, such as a start token, have negative places.
            added = self.positions(output, places.clamp(min=0))
            output = torch.where((places >= 0)[..., None], added, output)
        if self.entry is not None:
            output = self.entry(output)
        if self.grid is None or self.positions is not None:
            return output
        return self._placed(output, self._places(output, stream.carried))

    def _places(self, output: Tensor, carried: Mapping[str, Tensor]) -> Tensor:
        """Return the last places that are carried, of this process's rows: int64 `[b or 1, s]`."""
        splits, group = splits_context(self.core.megatron), self.core.groups.cp
        places = carried[PLACES][:, -output.shape[1] * (group.size() if splits else 1) :]
        return own_rows(places.t(), group).t() if splits else places

    def _placed(self, output: Tensor, places: Tensor) -> Tensor:
        """Add sin-cos positions of the rows at `places`."""
        assert self.grid is not None
        coordinates = place_coordinates(places, self.grid[1])
        # A single row has one axis, as in `Positions`.
        coordinates = coordinates[..., self.grid[0] == 1 :]
        scaled = self.core.model.position_scale * coordinates
        return output + sincos(scaled, output.shape[-1]).to(output.dtype)

    def decode(self, output: Tensor, noisy: Tensor | None) -> Tensor:
        """Decode `[b, s, h]` to `[b, s, k · o]`, the outputs for each of k noisy patches.

        Args:
            noisy: noisy patches `[b, s, k · (d + 1)]`, each followed by its γ; None without
                diffusion.
        """
        if self.noisy is None or noisy is None:
            return self.decoder(output, None)
        count = noisy.shape[-1] // (self.width + 1)
        if count == 1:
            return self._denoise(output, noisy)
        # Fold noisy copies into the batch, since decoders have no dimension for them.
        apart = torch.cat(noisy.chunk(count, dim=-1))
        decoded = self._denoise(output.repeat(count, 1, 1), apart)
        return torch.cat(decoded.chunk(count), dim=-1)

    def _denoise(self, output: Tensor, noisy: Tensor) -> Tensor:
        """Decode `[b, s, h]` with one noisy patch `[b, s, d + 1]` of each position."""
        assert self.noisy is not None
        embedded = self.noisy(noisy)
        if isinstance(self.decoder, ModulatedDecoder):
            return self.decoder(output, embedded, noisy[..., -1:])
        return self.decoder(output, embedded)


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
