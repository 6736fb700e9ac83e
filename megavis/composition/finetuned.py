"""What fine-tuning for any task shares: a paper's model under a head of the task.

`Classification` predicts the class of an image, `Segmentation` of each pixel; `Instances` finds
objects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megavis.composition.model import Model
from megavis.composition.trainable import SequenceBatch, Trainable
from megavis.config.errors import UserError
from megavis.data.loading.loader import Batch
from megavis.model.flops import Workload, forward_flops
from megavis.model.stack import LayerPlan, model_flops

NO_LABEL = -1
"""Label of unlabelled images and pixels."""


class Finetuned(Trainable):
    """A paper's model with the head of a task on top, as the config's `finetune` section says."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.config, model.context)
        assert model.config.finetune is not None
        self.settings, self.processes = model.config.finetune, model.context.data.group
        tuned = model.with_full_attention() if self.settings.visibility == "full" else model
        self._backbone = tuned

    @property
    def backbone(self) -> Model:
        """The model that is fine-tuned."""
        return self._backbone

    def with_frozen(self, plans: Iterable[LayerPlan]) -> list[LayerPlan]:
        """Return the layers below the head, of which some keep their weights."""
        return [
            dataclasses.replace(
                plan, factory=_frozen(plan.factory), variant=(*plan.variant, "frozen")
            )
            if self._is_frozen(plan)
            else plan
            for plan in plans
        ]

    def _is_frozen(self, plan: LayerPlan) -> bool:
        if self.settings.linear_evaluation:
            return True
        tuned, top = self.settings.tuned_blocks, self.settings.layer
        last = self.config.model.num_layers if top is None else top
        return tuned is not None and plan.depth <= last - tuned

    def with_layer_decay(self, plans: Sequence[LayerPlan]) -> list[LayerPlan]:
        """Return the layers with the learning rates of MAE's recipe.

        γ^(last - depth) scales the rates of the embedding at depth 0, of the blocks at 1 to L and
        of the head at L + 1.
        """
        last, decay = plans[-1].depth, self.settings.layer_decay
        return [
            dataclasses.replace(plan, options=plan.options.scaled(decay ** (last - plan.depth)))
            for plan in plans
        ]

    @property
    def has_random_sequence(self) -> bool:
        """False: the config's checks reject drawn features, but for classification."""
        return False

    def training_sequence(self, batch: Batch) -> SequenceBatch:
        """Return the sequence with what training draws."""
        return self.backbone.with_samples(self.sequence(batch), batch)

    def inputs_from(
        self, inputs: Any, *, sample_index: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return `SequenceBatch.inputs` for samples in the form of the shards (`Batch.inputs`)."""
        self.check_options(options)
        index = torch.arange(len(inputs)) if sample_index is None else sample_index
        batch = Batch(inputs, torch.full((len(inputs),), NO_LABEL), index)
        return self.sequence(batch.to(inputs.device)).inputs

    def check_features(self) -> None:
        """Raise UserError unless images are classified."""
        if not self.settings.gives_features:
            raise UserError(
                f"a run with finetune.task {self.settings.task} has no features of whole images;"
                " take the run that it started from"
            )

    @property
    def passes(self) -> float:
        """Work of a training step in forward passes of the blocks: 3, but 1 of frozen blocks.

        Frozen blocks have no backward pass, which would be twice the work of the forward pass.
        """
        plans = [plan for plan in self.layer_plans() if plan.stack is not None]
        return 3 - 2 * sum(map(self._is_frozen, plans)) / max(1, len(plans))

    def feature_flops(self, num_blocks: int) -> float:
        """Return the FLOPs of a training step for one image, through the lowest blocks alone.

        With the rows of features, and the encoder that blocks attend to, if there is one.
        """
        backbone, model = self.backbone, self.config.model
        causal = backbone.core.visibility_kind == "causal"
        rows = backbone.grammar.rows(backbone.num_tokens, for_features=True).blocks
        work = dataclasses.replace(
            Workload.of_one_stream(rows, 0, causal=causal),
            # Heads of tasks leave out the last norm's modulation, which belongs to rows read.
            num_read=0,
            num_last=rows,
            num_memory=backbone.condition.num_memory,
            is_modulated=backbone.grammar.is_modulated,
        )
        blocks = forward_flops(model.model_copy(update={"num_layers": num_blocks}), work)
        encoder = backbone.condition.layers(backbone.core, num_rows=rows, seed=self.config.seed)
        return self.passes * (blocks + model_flops(encoder) / 3)

    @property
    def counts_whole_step(self) -> bool:
        """True for classification: heads of the other tasks may cost more than the blocks."""
        return self.settings.task == "classes"

    @property
    def measures_accuracy(self) -> bool:
        """True: every task classifies."""
        return True


def finetuned_of(objective: Trainable) -> Finetuned | None:
    """Return what a fine-tuning run trains; None for others."""
    return objective if isinstance(objective, Finetuned) else None


def _frozen(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a factory of the same layer with frozen parameters."""
    return lambda: factory().requires_grad_(False)
