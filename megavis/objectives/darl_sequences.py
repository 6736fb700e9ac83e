"""The sequences of DARL: patches in an order, what each is predicted from, and its noise.

"Denoising Autoregressive Representation Learning", sections 3.1, 3.3 and 4.4. Which layers read
them and how predictions are scored stands in `darl.py`.

Legend: b images, T patches, d numbers of a patch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.composition.tokens import patches_of
from megavis.densities.diffusion import Diffusion
from megavis.model.orders import fixed_order, take_places
from megavis.objectives.base import Objective
from megavis.objectives.darl_config import DARLConfig
from megavis.objectives.darl_layers import START, DARLInputs
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders
from megavis.tokenizers.patches import to_uint8, unpatchify


class PatchSequences(Objective):
    """From images to what the first layer takes, in training, for features and in drawing."""

    @property
    def paper(self) -> DARLConfig:
        """The paper's section of the config."""
        assert isinstance(self.config.objective, DARLConfig)
        return self.config.objective

    @property
    def num_tokens(self) -> int:
        """Patches of an image: the start token stands in for the last, which nothing follows."""
        return self.paper.grid_side(self.config) ** 2

    @property
    def patch_width(self) -> int:
        """Numbers of a patch, d."""
        return 3 * self.paper.patch_size**2

    @property
    def is_diffusion(self) -> bool:
        """True where the decoder takes noise away."""
        return self.paper.loss == "diffusion"

    def patches_of(self, images: Tensor) -> Tensor:
        """Return standardised patches float32 `[b, T, d]` in raster order.

        Raises:
            UserError: the images are not uint8 `[b, h, w, 3]` of the config's size.
        """
        size = self.config.data.image_size
        return patches_of(images, image_size=size, patch_size=self.paper.patch_size)

    def images_of(self, patches: Tensor) -> Tensor:
        """Put patches `[b, T, d]` in raster order together: uint8 `[b, h, w, 3]`."""
        return to_uint8(unpatchify(patches, self.paper.patch_size))

    # Orders.

    def orders(self, sample_index: Tensor) -> Tensor:
        """Return which patch stands at each place: int64 `[b, T]`."""
        return self.schedule.draw(sample_index).order.expand(len(sample_index), -1)

    @functools.cached_property
    def schedule(self) -> OneByOne:
        """Patch after patch in the config's order; features by rows where each has its own."""
        paper, side = self.paper, self.paper.grid_side(self.config)
        is_random = paper.order == "random"
        kind = "raster" if is_random else paper.order
        shared = fixed_order(kind, height=side, width=side, block=paper.order_block)
        seed = self.config.seed if is_random else None
        return OneByOne(Orders(shared, seed=seed), name="patch {}")

    # What the first layer takes.

    def inputs_of(self, clean: Tensor, order: Tensor, noisy: Tensor | None = None) -> DARLInputs:
        """Return what the first layer takes to predict every patch.

        Args:
            clean: patches `[b, T, d]` in the order of generation.
            order: int64 `[b, T]`.
            noisy: with diffusion `[b, T, d + 1]`, as `with_gamma` gives it.
        """
        asked = order if self.paper.two_streams else order[:, :0]
        return *shifted(clean[:, :-1], order[:, :-1]), asked, self._noisy_or_none(noisy, clean)

    def inputs_for_features(
        self, inputs: Tensor, sample_index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return start token and all patches, also the last, without queries.

        "The input token is the last image patch which the model doesn't need during pre-training"
        (section 4.1). A random order gives way to rows ("fine-tuned ... with fixed ordering",
        figure 6).
        """
        patches = self.patches_of(inputs)
        order = self.schedule.for_features(len(patches), patches.device).order
        order = order.expand(len(patches), -1)
        tokens, places = shifted(take_places(patches, order), order)
        return tokens, places, order[:, :0], self._noisy_or_none(None, tokens)

    def inputs_between(
        self, patches: Tensor, order: Tensor, start: int, stop: int
    ) -> tuple[Tensor, ...]:
        """Return the inputs of the tokens [start, stop); token t is the patch at place t - 1."""
        tokens, places = shifted(patches[:, : stop - 1], order[:, : stop - 1])
        asked = order[:, stop - 1 : stop] if self.paper.two_streams else order[:, :0]
        tokens = tokens[:, start:]
        return tokens, places[:, start:], asked, self._noisy_or_none(None, tokens)

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
        density = self.density
        if not isinstance(density, Diffusion):
            return self.inputs_of(clean, order)
        noise, drawn = density.draw_noise(index, self.num_tokens)
        if gamma is not None:
            drawn = torch.as_tensor(gamma, device=drawn.device).expand_as(drawn)
        return self.inputs_of(clean, order, density.noisy(clean, noise, drawn))

    def _noisy_or_none(self, noisy: Tensor | None, like: Tensor) -> Tensor:
        """Return the noisy patches; empty without diffusion, zeros where none are given.

        Args:
            noisy: `[b, T, d + 1]`, where there are any.
            like: tokens `[b, s, ...]`, as many as the zeros.
        """
        if not self.is_diffusion:
            return like.new_zeros(len(like), 0, self.patch_width + 1)
        if noisy is None:
            return like.new_zeros(*like.shape[:2], self.patch_width + 1)
        return noisy


def shifted(patches: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Put the start token in front of patches `[b, c, d]` at places `[b, c]`."""
    return F.pad(patches, (0, 0, 1, 0)), F.pad(places, (1, 0), value=START)
