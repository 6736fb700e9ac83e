"""Where the latents of GIVT come from, shards of them or images and a VAE, and the way back.

"GIVT: Generative Infinite-Vocabulary Transformers", section 3.1: latents are drawn from the VAE's
posterior, anew whenever an image is read.

Legend: b images, n tokens of d numbers, c channels and h, w of the latents, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.objectives.base import Objective, blank_batch
from megavis.objectives.givt_config import LatentTokensConfig
from megavis.parallel.random import normal

if TYPE_CHECKING:
    from megavis.tokenizers.base import LatentTokenizer


class LatentSource(Objective):
    """From shards or a user's inputs to latents."""

    @property
    def paper(self) -> LatentTokensConfig:
        """The paper's section of the config."""
        assert isinstance(self.config.objective, LatentTokensConfig)
        return self.config.objective

    @property
    def num_tokens(self) -> int:
        """Tokens of an image."""
        height, width = self.paper.grid(self.config)
        return height * width

    @property
    def token_size(self) -> int:
        """Numbers of a token."""
        return self.paper.token_size

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image's latents."""
        side = self.config.data.image_size // self.paper.downsampling
        return self.paper.latent_channels, side, side

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want latents of this grid, or images and a VAE."""
        if manifest.kind == "latents":
            yield from self._check_latents(manifest)
        elif manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; {self.config.objective.name} wants latents shards"
        elif self.paper.tokenizer is None:
            yield "holds images; name the VAE's run folder in objective.tokenizer, or give latents"

    def _check_latents(self, manifest: Manifest) -> Iterator[str]:
        if manifest.latent_shape != self.latent_shape:
            yield (
                f"holds latents of shape {list(manifest.latent_shape or ())}; the config's"
                f" (objective.latent_channels, data.image_size / objective.downsampling) is"
                f" {list(self.latent_shape)}"
            )
        elif self.paper.tokenizer is not None and self._identity != manifest.identity:
            yield (
                f"was made by the VAE {str(manifest.identity)[:12]}; that of objective.tokenizer,"
                f" {self.paper.tokenizer}, is {self._identity[:12]}"
            )

    @property
    def tokenizer_identity(self) -> str | None:
        """SHA-256 of the VAE of images."""
        return None if self.paper.tokenizer is None else self._identity

    @cached_property
    def _identity(self) -> str:
        return self._tokenizer.identity()

    def blank_batch(self, num_images: int, device: torch.device) -> Batch:
        """Return latents with means and scales of 0."""
        return blank_batch(num_images, (2, *self.latent_shape), torch.float16, device)

    def latents(self, inputs: Any, sample_index: Tensor | None) -> Tensor:
        """Return latents `[b, c, h, w]`, or the tokens `[b, n, d]` as they are given.

        Args:
            inputs: mean and scale `[b, 2, c, h, w]` as shards hold them, latents, tokens as the
                adapter gives them, or with a VAE images uint8 `[b, H, W, 3]`.
            sample_index: int64 `[b]`, decides the draw from mean and scale; without it the mean.

        Raises:
            UserError: the shape is none of these.
        """
        if inputs.shape[1:] == (self.num_tokens, self.token_size):
            return inputs.float()
        if inputs.shape[1:] == self.latent_shape and inputs.is_floating_point():
            return inputs.float()
        if inputs.dtype == torch.uint8 and self.paper.tokenizer is not None:
            inputs = self._tokenizer.to(inputs.device).encode(inputs)
        if inputs.shape[1:] != (2, *self.latent_shape):
            raise UserError(
                f"the inputs have shape {list(inputs.shape)}; this run takes latents"
                f" [b, {', '.join(map(str, self.latent_shape))}], their mean and scale [b, 2, ...],"
                f" or tokens [b, {self.num_tokens}, {self.token_size}]"
            )
        mean, scale = inputs.float().unbind(1)
        if sample_index is None:
            return mean
        count = mean[0].numel()
        noise = normal(sample_index, count, seed=self.config.seed, purpose="posterior")
        return mean + scale * noise.view_as(mean)

    @cached_property
    def _tokenizer(self) -> LatentTokenizer:
        """The VAE, frozen."""
        from megavis.tokenizers.base import LatentTokenizer, open_tokenizer

        assert self.paper.tokenizer is not None
        self._check_beta(Path(self.paper.tokenizer))
        tokenizer = open_tokenizer(self.paper.tokenizer)
        if not isinstance(tokenizer, LatentTokenizer):
            raise UserError(f"objective.tokenizer: {self.paper.tokenizer} gives ids, not latents")
        given = tokenizer.latent_shape(self.config.data.image_size)
        if given != self.latent_shape:
            raise UserError(
                f"objective.tokenizer: {self.paper.tokenizer} gives latents of shape {list(given)};"
                f" the config's (objective.latent_channels, data.image_size /"
                f" objective.downsampling) is {list(self.latent_shape)}"
            )
        return tokenizer

    def _check_beta(self, run_folder: Path) -> None:
        """Raise UserError where the VAE's run says another β than the config wants."""
        from megavis.tokenizers.base import objective_section

        wanted = self.paper.tokenizer_beta
        found = objective_section(run_folder).get("beta")
        if wanted is not None and found != wanted:
            raise UserError(
                f"objective.tokenizer: {run_folder} is a VAE of beta {found}; this config wants one"
                f" of beta {wanted} (objective.tokenizer_beta)"
            )

    def decode(self, latents: Tensor) -> Tensor:
        """Return images uint8 `[b, H, W, 3]` of latents `[b, c, h, w]`.

        Raises:
            UserError: the config names no VAE, or one of other latents.
        """
        if self.paper.tokenizer is None:
            raise UserError("pictures want the VAE: name its run folder in objective.tokenizer")
        return self._tokenizer.to(latents.device).decode(latents)
