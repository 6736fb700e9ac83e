"""DARL: Denoising Autoregressive Representation Learning (Li, Bornschein, Chen, 2024).

The next patch of an image is predicted from those before it: its pixels by squared error, or by a
decoder that takes noise from it, given the backbone's output (section 3), or its id in a frozen
tokenizer (appendix B.4). Patches are corrupted independently of each other, each with a γ of its
own.

Legend: b images, T patches, d numbers of a patch, v ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from megavis.config.choices import PositionKind
from megavis.config.errors import UserError
from megavis.data.batch import Batch
from megavis.data.manifest import Manifest
from megavis.model.diffusion import corrupt
from megavis.model.flops import Workload
from megavis.model.init import Initialization, vision_transformer
from megavis.model.orders import take_places
from megavis.model.positions import carried_names
from megavis.model.stream import State
from megavis.model.visibility import Kind
from megavis.objectives.base import Sequence
from megavis.objectives.darl_config import DARLConfig, position_kind
from megavis.objectives.darl_decoders import PatchHead, decoder_flops
from megavis.objectives.darl_drawing import draw_from_noise, with_gamma
from megavis.objectives.darl_layers import SequenceEmbedding
from megavis.objectives.darl_sequences import PatchSequences
from megavis.objectives.image_tokens import Ids
from megavis.tokenizers.patches import normalize_patches


class DARL(PatchSequences):
    """Patch after patch."""

    config_type = DARLConfig

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

    @property
    def num_outputs(self) -> int:
        """Numbers of a patch, or ids."""
        return self.ids.num_outputs if self.ids else self.patch_width

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

    def flops_per_image(self) -> float:
        """Return the operations of a training step for one image, those of the decoder too."""
        paper, noisy_width = self.paper, 0
        if self.is_diffusion:
            noisy_width = self.patch_width + paper.condition_on_gamma * paper.patch_size**2
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

    def build_head(self) -> nn.Module:
        """Return the last norm and the patch decoder, or the projection to logits."""
        if self.ids is not None:
            return self.ids.head(self.core)
        return PatchHead(self.core, self.patch_width, self.paper)

    def sequence(self, batch: Batch) -> Sequence:
        """Put the patches into order; with diffusion, draw γ and ε for each."""
        patches = self.patches_of(batch.inputs)
        order = self.orders(batch.sample_index)
        clean = take_places(patches, order)
        if self.ids is not None:
            targets = take_places(self.ids.of(batch.inputs), order)
            return Sequence(self.inputs_of(clean, order), (targets,))
        if not self.is_diffusion:
            targets = normalize_patches(clean) if self.paper.normalize_targets else clean
            return Sequence(self.inputs_of(clean, order), (targets,))
        noise, gamma = self.draw_noise(batch.sample_index)
        inputs = self.inputs_of(clean, order, with_gamma(corrupt(clean, noise, gamma), gamma))
        return Sequence(inputs, (noise if self.paper.predicts == "noise" else clean,))

    def loss(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the squared error a number: L_MSE, or L_SIMP of sections 3.2 and 3.3; nats of ids.

        Args:
            predictions: as the head gives them.
            targets: patches or noise `[b, T, d]`, or ids `[b, T]`.
        """
        return self.patch_errors(predictions, targets).mean()

    def patch_errors(self, predictions: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of each place: `[b, T]` (figure 10)."""
        if self.ids is not None:
            return self.ids.errors(predictions, targets[0], self.core)
        return (predictions.float() - targets[0]).square().mean(-1)

    def outputs(self, predictions: Tensor) -> Tensor:
        """Return patches (or noise) `[b, T, d]`, or logits `[b, T, v]`, in the order."""
        return predictions if self.ids is None else self.ids.outputs(predictions, self.core)

    # What `PatchByPatch` asks for.

    @property
    def keeps_keys(self) -> bool:
        """One stream: in two, a query is asked once and never seen again."""
        return not self.paper.two_streams

    def check_drawing(self) -> None:
        """Raise UserError where predictions are not pixels."""
        if self.ids is not None:
            raise UserError(
                "with objective.loss ids the model reads patches and names ids, so it cannot go on"
                " from what it has drawn"
            )
        if self.paper.normalize_targets:
            raise UserError(
                "patches that were predicted with objective.normalize_targets have no brightness"
                " and contrast, so no image can be drawn"
            )

    def draw_patch(
        self,
        head: PatchHead,
        state: State,
        noise_of: Callable[[int], Tensor],
        *,
        num_steps: int | None,
        temperature: float | None,
    ) -> Tensor:
        """Draw the next patch: `[b, d]`.

        With diffusion by ancestral sampling from noise (appendices E and F). With squared error
        what is predicted is the mean of a Gaussian, and that is returned.
        """
        output = head.outputs(state)[:, -1:]
        if not self.is_diffusion:
            return head.decode(output, None)[:, 0]
        paper = self.paper
        drawn = draw_from_noise(
            head,
            output,
            lambda step: noise_of(step)[:, None],
            self.beta(output.device).schedule(num_steps or paper.sampling_steps),
            predicts=paper.predicts,
            temperature=paper.sampling_temperature if temperature is None else temperature,
        )
        return drawn[:, 0]
