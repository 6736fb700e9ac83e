"""Tokens of a frozen tokenizer: ids of a codebook, or latents of a VAE.

They are read from shards or encoded from images. "GIVT: Generative Infinite-Vocabulary
Transformers", section 3.1: latents are drawn from the VAE's posterior each time an image is read.

Legend: b images, n tokens of d values, v vocabulary size, c channels, h height and w width of the
latents, H and W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavis.composition.tokens import OWN, Key, Vectors, Vocabulary, check_images
from megavis.config.errors import UserError, blame
from megavis.data.codecs.label_maps import TargetKind, painted
from megavis.data.format.manifest import Manifest
from megavis.parallel.random import normal
from megavis.tokenizers.network_tokenizer import (
    FrozenEncoder,
    IdTokenizer,
    LatentTokenizer,
    open_tokenizer,
    read_config,
)
from megavis.tokenizers.patches import stack, to_grid, to_tokens, unstack


class Ids(Vocabulary):
    """Ids of a frozen tokenizer, precomputed or encoded on the fly.

    Args:
        side: side of the grid of ids.
        tokenizer: run folder of the tokenizer; None if all inputs are ids.
        key: see `Tokens`.
    """

    def __init__(
        self,
        *,
        image_size: int,
        side: int,
        vocabulary_size: int,
        tokenizer: str | None,
        key: Key = OWN,
    ) -> None:
        self.key = key
        self.image_size, self.grid = image_size, (side, side)
        self.vocabulary_size, self.run_folder = vocabulary_size, tokenizer
        self.dimension = f"id of the {vocabulary_size}-entry codebook"
        self.sample_shape = (image_size, image_size, 3)

    @property
    def identity(self) -> str | None:
        """SHA-256 of the tokenizer; None without one."""
        return None if self.run_folder is None else self.tokenizer.identity()

    @property
    def frozen_encoder(self) -> FrozenEncoder | None:
        """The tokenizer that encodes images in training; None without one."""
        if self.run_folder is None:
            return None
        return FrozenEncoder(self.run_folder, self.key("tokenizer"), self.image_size)

    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Return ids int64 `[b, n]` of uint8 `[b, H, W, 3]` or of ids. Raises UserError."""
        if samples.ndim == 2:
            if samples.shape[1] != self.num_tokens or samples.is_floating_point():
                raise UserError(
                    f"the ids have shape {list(samples.shape)} and type {samples.dtype}; this run"
                    f" expects whole numbers [b, {self.num_tokens}]"
                )
            return samples.long()
        if samples.is_meta:
            # Only shapes matter on the meta device; do not open the tokenizer.
            return torch.zeros(
                len(samples), self.num_tokens, dtype=torch.int64, device=samples.device
            )
        if self.run_folder is None:
            raise UserError(
                f"images need a tokenizer: name its run folder in {self.key('tokenizer')}"
            )
        check_images(samples, self.image_size)
        return self.tokenizer.to(samples.device).encode(samples)

    @cached_property
    def tokenizer(self) -> IdTokenizer:
        """The frozen tokenizer. Raises UserError: it gives no ids, or does not fit the config."""
        assert self.run_folder is not None
        with blame(self.key("tokenizer")):
            opened = open_ids_tokenizer(self.run_folder)
            if opened.vocabulary_size != self.vocabulary_size:
                raise UserError(
                    f"{self.run_folder} has {opened.vocabulary_size} ids;"
                    f" {self.key('vocabulary_size')} is {self.vocabulary_size}"
                )
            given = opened.num_tokens(self.image_size)
            if given != self.num_tokens:
                raise UserError(
                    f"{self.run_folder} encodes an image of {self.image_size}² pixels as {given}"
                    f" ids; {self.key('patch_size')} makes {self.num_tokens} tokens"
                )
        return opened

    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Check that shards hold images, and there is a tokenizer, or matching ids."""
        if manifest.kind == "ids":
            yield from self._check_ids_shards(manifest)
        elif manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; {name} needs jpeg or ids shards"
        elif self.run_folder is None:
            yield f"holds images; name the tokenizer's run folder in {self.key('tokenizer')}"

    def _check_ids_shards(self, manifest: Manifest) -> Iterator[str]:
        if manifest.num_tokens != self.num_tokens:
            yield f"holds {manifest.num_tokens} ids per image; the config has {self.num_tokens}"
        if manifest.vocabulary_size != self.vocabulary_size:
            yield (
                f"holds ids below {manifest.vocabulary_size}; {self.key('vocabulary_size')} is"
                f" {self.vocabulary_size}"
            )
        elif self.run_folder is not None:
            made_by = self.tokenizer.identity()
            if manifest.identity != made_by:
                yield (
                    f"was made by the tokenizer {str(manifest.identity)[:12]}; the one of"
                    f" {self.key('tokenizer')}, {self.run_folder}, is {made_by[:12]}"
                )

    def check_images(self, folder: Path) -> None:
        """Raise UserError if there is no tokenizer, or it does not fit."""
        self.to_images(torch.zeros(1, self.num_tokens, dtype=torch.int64), folder)

    def to_images(self, tokens: Tensor, folder: Path | None = None) -> Tensor:
        """Decode ids `[b, n]` to images; raise UserError if there is no tokenizer."""
        if self.run_folder is None:
            raise UserError(
                f"decoding ids needs their tokenizer: name it in {self.key('tokenizer')}"
            )
        return self.tokenizer.to(tokens.device).decode(tokens)


def open_ids_tokenizer(run_folder: str) -> IdTokenizer:
    """Open the tokenizer of a run; raise UserError if it gives no ids."""
    opened = open_tokenizer(run_folder)
    if not isinstance(opened, IdTokenizer):
        raise UserError(f"{run_folder} gives latents, not ids")
    return opened


class Latents(Vectors):
    """Real-valued tokens, drawn from the posterior's mean and scale.

    Args:
        stacked: horizontally adjacent latents per token.
        scale: multiplies latents, to give tokens.
        seed: the run's seed; posterior draws are functions of seed and sample.
        tokenizer: run folder of the VAE; None if all inputs are latents.
        beta: required β of the VAE's run; None: any.
        image_size: side of the VAE's images in pixels.
        key: see `Tokens`.
    """

    sample_type = torch.float16
    is_random = True
    """They are drawn from the VAE's posterior (section 3.1)."""

    def __init__(
        self,
        *,
        channels: int,
        side: int,
        stacked: int,
        scale: float = 1.0,
        seed: int,
        tokenizer: str | None,
        beta: float | None,
        image_size: int,
        key: Key = OWN,
    ) -> None:
        self.key, self.tokenizer_key = key, key("tokenizer")
        self.shape_keys = f"({key('channels')}, data.image_size / {key('patch_size')})"
        self.shape, self.stacked, self.seed = (channels, side, side), stacked, seed
        self.scale = scale
        # Scaling changes densities, so numbers with different scales are not comparable.
        self.dimension = "number of the VAE's latents" + f" times {scale:g}" * (scale != 1)
        self.run_folder, self.beta, self.image_size = tokenizer, beta, image_size
        self.grid, self.width = (side, side // stacked), channels * stacked
        self.sample_shape = (2, *self.shape)

    @cached_property
    def identity(self) -> str | None:
        """SHA-256 of the VAE; None without one."""
        return None if self.run_folder is None else self.tokenizer.identity()

    @property
    def frozen_encoder(self) -> FrozenEncoder | None:
        """The VAE that encodes images in training; None without one."""
        if self.run_folder is None:
            return None
        return FrozenEncoder(self.run_folder, self.tokenizer_key, self.image_size)

    def check(self, manifest: Manifest, name: str) -> Iterator[str]:
        """Check that shards hold matching latents, or images and there is a VAE."""
        if manifest.kind == "latents":
            yield from self._check_latents(manifest)
        elif manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; {name} needs latents shards"
        elif self.run_folder is None:
            yield f"holds images; name the VAE's run folder in {self.tokenizer_key}"
        elif manifest.target is not None or (Path(self.run_folder) / "config.yaml").exists():
            held = manifest.target.kind if manifest.target else None
            encoded = self.tokenizer.target_kind
            if held != encoded:
                words = [
                    f"{kind} maps" if kind else "images of colours" for kind in (held, encoded)
                ]
                yield f"holds {words[0]}; the VAE of {self.tokenizer_key} encodes {words[1]}"

    def _check_latents(self, manifest: Manifest) -> Iterator[str]:
        if manifest.latent_shape != self.shape:
            yield (
                f"holds latents of shape {list(manifest.latent_shape or ())}; the config's"
                f" {self.shape_keys} is {list(self.shape)}"
            )
        elif self.run_folder is not None and self.identity != manifest.identity:
            yield (
                f"was made by the VAE {str(manifest.identity)[:12]}; the one of"
                f" {self.tokenizer_key}, {self.run_folder}, is {str(self.identity)[:12]}"
            )

    def of(self, samples: Any, index: Tensor | None = None) -> Tensor:
        """Return latents `[b, c, h, w]`; tokens `[b, n, d]` are returned unchanged.

        Args:
            samples: mean and scale `[b, 2, c, h, w]` as in the shards, latents, tokens, or with a
                VAE images uint8 `[b, H, W, 3]`.
            index: int64 `[b]`, the samples, which determine the posterior draws; None for the mean.

        Raises:
            UserError: the shape is none of these.
        """
        if samples.shape[1:] == (self.num_tokens, self.width):
            return samples.float()
        if samples.shape[1:] == self.shape and samples.is_floating_point():
            return samples.float()
        if samples.dtype == torch.uint8 and samples.is_meta:
            # Only shapes matter on the meta device; do not open the VAE.
            samples = self.blank_batch(len(samples), samples.device).inputs
        elif samples.dtype == torch.uint8 and self.run_folder is not None:
            if self.tokenizer.target_kind is None:
                check_images(samples, self.image_size)
            samples = self.tokenizer.to(samples.device).encode(samples)
        if samples.shape[1:] != (2, *self.shape):
            raise UserError(
                f"the inputs have shape {list(samples.shape)}; this run expects latents"
                f" [b, {', '.join(map(str, self.shape))}], their mean and scale [b, 2, ...],"
                f" or tokens [b, {self.num_tokens}, {self.width}]"
            )
        mean, scale = samples.float().unbind(1)
        if index is None:
            return mean
        # The index is a position in the sample stream and differs between epochs: every read draws
        # anew, and a resumed run repeats its draws.
        noise = normal(index, mean[0].numel(), seed=self.seed, purpose="posterior")
        return mean + scale * noise.view_as(mean)

    def sequence(self, tokens: Tensor) -> Tensor:
        """Scale latents `[b, c, h, w]` and reshape them to tokens `[b, n, d]`."""
        if tokens.ndim == 3:
            return tokens
        scaled = tokens if self.scale == 1 else tokens * self.scale
        return to_tokens(stack(scaled, self.stacked)).contiguous()

    def from_sequence(self, tokens: Tensor) -> Tensor:
        """Reshape tokens `[b, n, d]` to latents `[b, c, h, w]`, and undo their scale."""
        latents = unstack(to_grid(tokens, height=self.grid[0]), self.stacked)
        return latents if self.scale == 1 else latents / self.scale

    def prior(self, images: Tensor, *, seed: int) -> Tensor:
        """Draw latents `[b, c, h, w]` from the VAE's prior, N(0, 1)."""
        return normal(images, math.prod(self.shape), seed=seed, purpose="prior").view(
            -1, *self.shape
        )

    def check_images(self, folder: Path) -> None:
        """Raise UserError if there is no VAE, or it does not fit."""
        self.to_images(torch.zeros(1, *self.shape), folder)

    def to_images(self, tokens: Tensor, folder: Path | None = None) -> Tensor:
        """Decode latents `[b, c, h, w]` to uint8 `[b, H, W, 3]`; raise UserError without a VAE."""
        if self.run_folder is None:
            raise UserError(f"images need the VAE: name its run folder in {self.tokenizer_key}")
        return self.tokenizer.to(tokens.device).decode(tokens)

    def shown(self, images: Tensor) -> Tensor:
        """Return images as they are, and label maps in colours."""
        kind = None if self.run_folder is None else self.tokenizer.target_kind
        if kind is None:
            return images
        return painted_maps(images, kind)

    @cached_property
    def tokenizer(self) -> LatentTokenizer:
        """The frozen VAE; raise UserError if it gives no latents, or if they or β do not fit."""
        assert self.run_folder is not None
        with blame(self.tokenizer_key):
            self._check_beta(Path(self.run_folder))
            tokenizer = open_tokenizer(self.run_folder)
            if not isinstance(tokenizer, LatentTokenizer):
                raise UserError(f"{self.run_folder} gives ids, not latents")
            given = tokenizer.latent_shape(self.image_size)
            if given != self.shape:
                raise UserError(
                    f"{self.run_folder} gives latents of shape {list(given)}; the config's"
                    f" {self.shape_keys} is {list(self.shape)}"
                )
        return tokenizer

    def _check_beta(self, run_folder: Path) -> None:
        """Raise UserError unless the VAE has the required β."""
        found = read_config(run_folder)["objective"].get("beta")
        if self.beta is not None and found != self.beta:
            raise UserError(
                f"{run_folder} is a VAE with beta {found}; this config needs beta {self.beta}"
                f" ({self.key('tokenizer_beta')})"
            )


def painted_maps(maps: Tensor, kind: TargetKind) -> Tensor:
    """Color label maps uint8 `[b, h, w, 3]` for display."""
    return torch.from_numpy(painted(maps.cpu().numpy(), kind)).to(maps.device)
