"""DARL: Denoising Autoregressive Representation Learning (Li, Bornschein, Chen, 2024).

The next patch of an image is predicted from those before it: its pixels by squared error, or by a
decoder that takes noise from it, given the backbone's output (section 3), or its id in a frozen
tokenizer (appendix B.4). Patches are corrupted independently of each other, each with a γ of its
own.

Legend: b images, T patches, d numbers of a patch, v ids.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from megavis.composition.tokens import Ids
from megavis.config.choices import PositionKind
from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.densities.categorical import Categorical
from megavis.densities.diffusion import Diffusion, Process
from megavis.densities.squared_error import SquaredError
from megavis.model.flops import Workload
from megavis.model.init import Initialization, normal, vision_transformer
from megavis.model.orders import take_places
from megavis.model.positions import carried_names
from megavis.model.visibility import Kind
from megavis.objectives.base import Sequence
from megavis.objectives.darl_config import DARLConfig, position_kind
from megavis.objectives.darl_decoders import PatchHead, decoder_flops
from megavis.objectives.darl_layers import SequenceEmbedding
from megavis.objectives.darl_sequences import PatchSequences
from megavis.objectives.generates import Known
from megavis.schedules.base import Step
from megavis.tokenizers.patches import pixel_range


class DARL(PatchSequences):
    """Patch after patch."""

    config_type = DARLConfig
    num_copies = 3

    @property
    def visibility_kind(self) -> Kind:
        """A causal Transformer, or the two streams of appendix A.5."""
        return "two_stream" if self.paper.two_streams else "causal"

    @property
    def position_kind(self) -> PositionKind:
        """Decomposed rotary ones, unless the config says otherwise (section 3.4)."""
        return position_kind(self.config)

    @property
    def carries(self) -> tuple[str, ...]:
        """Groups of two streams, coordinates of rotary positions, noisy patches."""
        groups = ("content_groups", "query_groups") if self.paper.two_streams else ()
        noisy = ("noisy",) if self.is_diffusion else ()
        return (*groups, *carried_names(self.position_kind), *noisy)

    @functools.cached_property
    def density(self) -> Categorical | Diffusion | SquaredError:
        """Pixels by squared error or out of noise, or ids."""
        paper = self.paper
        if self.ids is not None:
            return Categorical(self.core, self.ids.vocabulary_size, fill=normal(0.02))
        if not self.is_diffusion:
            return SquaredError(
                self.patch_width,
                normalize=paper.normalize_targets,
                build_head=self._build_head,
                decoder_flops=self._decoder_flops(),
            )
        process = Process(
            beta=(paper.noise_a, paper.noise_b),
            predicts=paper.predicts,
            value_range=pixel_range(),
            sampling_steps=paper.sampling_steps,
            temperature=paper.sampling_temperature,
            seed=self.config.seed,
        )
        return Diffusion(
            self.patch_width,
            process,
            build_head=self._build_head,
            decoder_flops=self._decoder_flops(),
        )

    def _build_head(self) -> PatchHead:
        return PatchHead(self.core, self.patch_width, self.paper)

    def _decoder_flops(self) -> float:
        paper, noisy_width = self.paper, 0
        if self.is_diffusion:
            noisy_width = self.patch_width + paper.condition_on_gamma * paper.patch_size**2
        return decoder_flops(
            self.config.model,
            paper.decoder_kind,
            paper.num_decoder_layers,
            noisy_width=noisy_width,
        )

    @functools.cached_property
    def ids(self) -> Ids | None:
        """The ids that are predicted; None where pixels are."""
        paper = self.paper
        if paper.loss != "ids":
            return None
        assert paper.vocabulary_size is not None
        return Ids(
            image_size=self.config.data.image_size,
            num_tokens=self.num_tokens,
            vocabulary_size=paper.vocabulary_size,
            tokenizer=paper.tokenizer,
        )

    def workload(self) -> Workload:
        """Return one stream, or both; keys and values are those of the first alone."""
        count, queries = self.num_tokens, self.num_tokens * self.paper.two_streams
        visible = float(count) if queries else (count + 1) / 2
        return Workload(count + queries, count, visible, count, self.num_outputs)

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Want photographs."""
        if manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; {self.paper.name} wants jpeg shards"

    @functools.cached_property
    def tokenizer_identity(self) -> str | None:
        """SHA-256 of the tokenizer whose ids are predicted."""
        return None if self.ids is None else self.ids.tokenizer.identity()

    def initialization(self) -> Initialization:
        """Return MAE's, whose recipe is followed (section 4, table 8)."""
        return vision_transformer()

    def build_embedding(self) -> nn.Module:
        """Return the start token, the patch embedding and the positions."""
        return SequenceEmbedding(
            self.core,
            self.patch_width,
            side=self.paper.grid_side(self.config),
            positions=self.position_kind,
            queries=self.paper.two_streams,
        )

    def sequence(self, batch: Batch) -> Sequence:
        """Put the patches into order; with diffusion, draw γ and ε for each."""
        patches = self.patches_of(batch.inputs)
        order = self.orders(batch.sample_index)
        clean = take_places(patches, order)
        if self.ids is not None:
            targets = take_places(self.ids.of(batch.inputs), order)
            return Sequence(self.inputs_of(clean, order), (targets,))
        density = self.density
        if not isinstance(density, Diffusion):
            return Sequence(self.inputs_of(clean, order), (clean,))
        noise, gamma = density.draw_noise(batch.sample_index, self.num_tokens)
        inputs = self.inputs_of(clean, order, density.noisy(clean, noise, gamma))
        return Sequence(inputs, (density.target(clean, noise),))

    def loss(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the squared error a number: L_MSE, or L_SIMP of sections 3.2 and 3.3; nats of ids.

        Args:
            predictions: as the head gives them.
            targets: patches or noise `[b, T, d]`, or ids `[b, T]`.
        """
        return self.token_losses(predictions, targets).mean()

    # What `Generates` asks for.

    def generation(self) -> DARL:
        """Return itself; raises UserError where predictions are not what is read."""
        if self.ids is not None:
            raise UserError(
                "with objective.loss ids the model reads patches and names ids, so it cannot go on"
                " from what it has drawn"
            )
        return self

    def blank_tokens(self, images: Tensor) -> Tensor:
        """Return patches `[b, T, d]` of zeros."""
        return torch.zeros(len(images), self.num_tokens, self.patch_width, device=images.device)

    def tokens_of(self, inputs: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the patches of images uint8 `[b, h, w, 3]`."""
        return self.patches_of(inputs)

    def rows(self, tokens: Tensor, step: Step, known: Known, since: int) -> tuple[Tensor, ...]:
        """Return the inputs of the tokens that are not cached; the last predicts a patch."""
        return self.inputs_between(tokens, step.plan.order, since, step.asked.stop)

    def check_images(self, folder: Path) -> None:
        """Accept any run: patches are pixels."""

    def to_images(self, tokens: Tensor, folder: Path) -> Tensor:
        """Put patches together."""
        return self.images_of(tokens)
