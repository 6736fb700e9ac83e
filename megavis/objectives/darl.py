"""DARL: Denoising Autoregressive Representation Learning (Li, Bornschein, Chen, 2024).

The next patch of an image is predicted from those before it: its pixels by squared error, or by a
decoder that takes noise from it, given the backbone's output (section 3). Patches are corrupted
independently of each other, each with a γ of its own.

Legend: b images, T patches, d numbers of a patch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.model.diffusion import BetaNoise, corrupt
from megavis.model.flops import Workload
from megavis.model.init import Initialization, vision_transformer
from megavis.model.orders import fixed_order, random_orders, take_places
from megavis.model.positions import carried_names
from megavis.model.stream import State
from megavis.model.visibility import Kind
from megavis.objectives.base import Objective, Sequence
from megavis.objectives.darl_config import DARLConfig, position_kind
from megavis.objectives.darl_decoders import PatchHead, decoder_flops
from megavis.objectives.darl_drawing import draw_from_noise, with_gamma
from megavis.objectives.darl_layers import START, DARLInputs, SequenceEmbedding
from megavis.parallel.random import normal, uniform
from megavis.tokenizers.patches import (
    normalize_patches,
    patchify,
    standardize,
    to_uint8,
    unpatchify,
)


class DARL(Objective):
    """Patch after patch."""

    config_type = DARLConfig

    @property
    def paper(self) -> DARLConfig:
        """The paper's section of the config."""
        assert isinstance(self.config.objective, DARLConfig)
        return self.config.objective

    @property
    def visibility_kind(self) -> Kind:
        """A causal Transformer, or the two streams of appendix A.5."""
        return "two_stream" if self.paper.two_streams else "causal"

    @property
    def carries(self) -> tuple[str, ...]:
        """Groups of two streams, coordinates of rotary positions, noisy patches."""
        groups = ("content_groups", "query_groups") if self.paper.two_streams else ()
        noisy = ("noisy",) if self.is_diffusion else ()
        return (*groups, *carried_names(position_kind(self.config)), *noisy)

    @property
    def is_diffusion(self) -> bool:
        """True where the decoder takes noise away."""
        return self.paper.loss == "diffusion"

    @property
    def num_tokens(self) -> int:
        """Patches of an image: the start token stands in for the last, which nothing follows."""
        return self.paper.grid_side(self.config) ** 2

    @property
    def num_outputs(self) -> int:
        """Numbers of a patch."""
        return 3 * self.paper.patch_size**2

    def workload(self) -> Workload:
        """Return one stream, or both; keys and values are those of the first alone."""
        count, queries = self.num_tokens, self.num_tokens * self.paper.two_streams
        visible = float(count) if queries else (count + 1) / 2
        return Workload(count + queries, count, visible, count, self.num_outputs)

    def flops_per_image(self) -> float:
        """Return the operations of a training step for one image, those of the decoder too."""
        paper, noisy_width = self.paper, 0
        if self.is_diffusion:
            noisy_width = self.num_outputs + paper.condition_on_gamma * paper.patch_size**2
        decoder = decoder_flops(
            self.config.model,
            paper.decoder_kind,
            paper.num_decoder_layers,
            noisy_width=noisy_width,
        )
        return super().flops_per_image() + 3 * self.num_tokens * decoder

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want photographs."""
        if manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; {self.paper.name} wants jpeg shards"

    def initialization(self) -> Initialization:
        """Return MAE's, whose recipe is followed (section 4, table 8)."""
        return vision_transformer()

    def build_embedding(self) -> nn.Module:
        """Return the start token, the patch embedding and the positions."""
        return SequenceEmbedding(
            self.core,
            self.num_outputs,
            side=self.paper.grid_side(self.config),
            positions=position_kind(self.config),
            queries=self.paper.two_streams,
        )

    def build_head(self) -> nn.Module:
        """Return the last norm and the patch decoder."""
        return PatchHead(self.core, self.num_outputs, self.paper)

    def sequence(self, batch: Batch) -> Sequence:
        """Put the patches into order; with diffusion, draw γ and ε for each."""
        patches = self.patches_of(batch.inputs)
        order = self.orders(batch.sample_index)
        clean = take_places(patches, order)
        if not self.is_diffusion:
            targets = normalize_patches(clean) if self.paper.normalize_targets else clean
            return Sequence(self.inputs_of(clean, order), (targets,))
        noise, gamma = self.draw_noise(batch.sample_index)
        inputs = self.inputs_of(clean, order, with_gamma(corrupt(clean, noise, gamma), gamma))
        return Sequence(inputs, (noise if self.paper.predicts == "noise" else clean,))

    def patches_of(self, images: Tensor) -> Tensor:
        """Return standardised patches float32 `[b, T, d]` in raster order.

        Raises:
            UserError: the images are not uint8 `[b, h, w, 3]` of the config's size.
        """
        side = self.config.data.image_size
        if images.dtype != torch.uint8 or images.shape[1:] != (side, side, 3):
            raise UserError(
                f"the images have shape {list(images.shape)} and type {images.dtype}; darl takes"
                f" uint8 [b, {side}, {side}, 3]"
            )
        return patchify(standardize(images), self.paper.patch_size)

    def orders(self, sample_index: Tensor) -> Tensor:
        """Return which patch stands at each place: int64 `[b, T]`."""
        if self.paper.order == "random":
            return random_orders(sample_index, self.num_tokens, seed=self.config.seed)
        return self.shared_order(sample_index.device).expand(len(sample_index), -1)

    @functools.cache  # noqa: B019 - one objective a process; the copy waits for the device
    def shared_order(self, device: torch.device) -> Tensor:
        """Return a fixed order int64 `[T]`; that of rows where the config's is random."""
        paper, side = self.paper, self.paper.grid_side(self.config)
        kind = "raster" if paper.order == "random" else paper.order
        return fixed_order(kind, height=side, width=side, block=paper.order_block).to(device)

    @functools.cache  # noqa: B019 - as above
    def beta(self, device: torch.device) -> BetaNoise:
        """Return the distribution of γ."""
        return BetaNoise(self.paper.noise_a, self.paper.noise_b, device)

    def draw_noise(self, sample_index: Tensor) -> tuple[Tensor, Tensor]:
        """Return ε `[b, T, d]` and γ `[b, T, 1]`, functions of seed and sample alone."""
        count, width, seed = self.num_tokens, self.num_outputs, self.config.seed
        noise = normal(sample_index, count * width, seed=seed, purpose="noise")
        draws = uniform(sample_index, count, seed=seed, purpose="gamma")
        gamma = self.beta(sample_index.device).from_uniform(draws)
        return noise.unflatten(1, (count, width)), gamma[..., None]

    def inputs_of(self, clean: Tensor, order: Tensor, noisy: Tensor | None = None) -> DARLInputs:
        """Return what the first layer takes to predict every patch.

        Args:
            clean: patches `[b, T, d]` in the order of generation.
            order: int64 `[b, T]`.
            noisy: with diffusion `[b, T, d + 1]`, as `with_gamma` gives it.
        """
        asked = order if self.paper.two_streams else order[:, :0]
        return *shifted(clean[:, :-1], order[:, :-1]), asked, self._noisy_or_none(noisy, clean)

    def feature_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return start token and all patches, also the last, without queries.

        "The input token is the last image patch which the model doesn't need during pre-training"
        (section 4.1). A random order gives way to rows ("fine-tuned ... with fixed ordering",
        figure 6).
        """
        patches = self.patches_of(batch.inputs)
        order = self.shared_order(patches.device).expand(len(patches), -1)
        tokens, places = shifted(take_places(patches, order), order)
        return tokens, places, order[:, :0], self._noisy_or_none(None, tokens)

    def _noisy_or_none(self, noisy: Tensor | None, like: Tensor) -> Tensor:
        """Return the noisy patches; zeros where a decoder runs of which nobody reads anything."""
        if not self.is_diffusion:
            return like.new_zeros(len(like), 0, self.num_outputs + 1)
        if noisy is None:
            return like.new_zeros(*like.shape[:2], self.num_outputs + 1)
        return noisy

    def inputs_from(
        self,
        inputs: Any,
        *,
        order: Tensor | None = None,
        gamma: Tensor | float | None = None,
        sample_index: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, ...]:
        """Return the inputs for images.

        Args:
            inputs: images uint8 `[b, h, w, 3]`.
            order: int64 `[b, T]`, patches in raster order; that of the config where absent.
            gamma: with diffusion, for all patches, or `[b, T, 1]` in the order; drawn where absent.
            sample_index: int64 `[b]`, decides the draws; 0 .. b - 1 where absent.
        """
        patches = self.patches_of(inputs)
        index = torch.arange(len(patches)) if sample_index is None else sample_index
        index = index.to(patches.device)
        order = self.orders(index) if order is None else order
        clean = take_places(patches, order)
        if not self.is_diffusion:
            return self.inputs_of(clean, order)
        noise, drawn = self.draw_noise(index)
        if gamma is not None:
            drawn = torch.as_tensor(gamma, device=drawn.device).expand_as(drawn)
        return self.inputs_of(clean, order, with_gamma(corrupt(clean, noise, drawn), drawn))

    def loss(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the squared error a number: L_MSE, or L_SIMP of sections 3.2 and 3.3.

        Args:
            predictions: `[b, T, d]`.
            targets: patches or noise `[b, T, d]`.
        """
        return self.patch_errors(predictions, targets).mean()

    def patch_errors(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the squared error a number at each place: `[b, T]` (figure 10)."""
        return (predictions.float() - targets[0]).square().mean(-1)

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return patches (or noise) `[b, T, d]` in the order of generation."""
        return predictions

    # What `PatchByPatch` asks for.

    @property
    def keeps_keys(self) -> bool:
        """One stream: in two, a query is asked once and never seen again."""
        return not self.paper.two_streams

    def check_drawing(self) -> None:
        """Raise UserError where predictions are not pixels."""
        if self.paper.normalize_targets:
            raise UserError(
                "patches that were predicted with objective.normalize_targets have no brightness"
                " and contrast, so no image can be drawn"
            )

    def images_of(self, patches: Tensor) -> Tensor:
        """Put patches `[b, T, d]` in raster order together: uint8 `[b, h, w, 3]`."""
        return to_uint8(unpatchify(patches, self.paper.patch_size))

    def inputs_between(
        self, patches: Tensor, order: Tensor, start: int, stop: int
    ) -> tuple[Tensor, ...]:
        """Return the inputs of the tokens [start, stop); token t is the patch at place t - 1."""
        tokens, places = shifted(patches[:, : stop - 1], order[:, : stop - 1])
        asked = order[:, stop - 1 : stop] if self.paper.two_streams else order[:, :0]
        tokens = tokens[:, start:]
        return tokens, places[:, start:], asked, self._noisy_or_none(None, tokens)

    def draw_patch(
        self,
        head: PatchHead,
        state: State,
        noise_of: Callable[[int], Tensor],
        *,
        num_steps: int | None,
        temperature: float,
    ) -> Tensor:
        """Draw the next patch `[b, d]`; by squared error, the mean of a Gaussian of no known width.

        With diffusion, ancestral sampling from noise (appendices E and F).
        """
        output = head.outputs(state)[:, -1:]
        if not self.is_diffusion:
            return head.decode(output, None)[:, 0]
        drawn = draw_from_noise(
            head,
            output,
            lambda step: noise_of(step)[:, None],
            self.beta(output.device).schedule(num_steps or self.paper.sampling_steps),
            predicts=self.paper.predicts,
            temperature=temperature,
        )
        return drawn[:, 0]


def shifted(patches: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Put the start token in front of patches `[b, c, d]` at places `[b, c]`."""
    return F.pad(patches, (0, 0, 1, 0)), F.pad(places, (1, 0), value=START)
