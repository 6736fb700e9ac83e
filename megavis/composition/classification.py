"""Fine-tuning of any paper's model as a classifier, with or without the paper's own loss.

"Generative Pretraining from Pixels", section 2.3: the final norm's output is averaged over the
sequence and projected to class logits, and L_GEN + L_CLF is minimised. The projection is
initialised to zero (appendix A.1). Other papers omit L_GEN, use full attention, read the last
token, or pool tokens by attention; the config's `finetune` section selects these.

Legend: b images, s tokens, h hidden size, c classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megavis.composition.finetuned import NO_LABEL, Finetuned
from megavis.composition.mixing import mix
from megavis.composition.trainable import SequenceBatch, SumAndCount, Trainable
from megavis.config.schema import FinetuneConfig
from megavis.data.format.manifest import Manifest
from megavis.data.loading.loader import Batch
from megavis.model.context_parallel import all_tokens
from megavis.model.core import Core
from megavis.model.embeddings import ReplicatedLinear
from megavis.model.heads import Head
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.norms import BatchNorm, Norm
from megavis.model.parameters import Fill, filled, normal, set_start, zeros
from megavis.model.stack import FeatureLayer, LayerPlan, watch_features


class AttentivePooling(nn.Module):
    """Attention of one learned query to all tokens, with keys and values by linear maps.

    "Scalable Pre-training of Large Autoregressive Image Models", section 4.2, equation 4. Scores
    are divided by the square root of the head width, and weights are initialized as in
    `torch.nn.Linear`, as in the released code; the paper states neither.

    Args:
        width: width h of the features, a multiple of `num_heads`.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, bound = num_heads, width**-0.5
        self.query = filled(width, fill=normal(0.02))
        fill: Fill = partial(nn.init.uniform_, a=-bound, b=bound)
        self.key = ReplicatedLinear(width, width, fill, has_bias=False)
        self.value = ReplicatedLinear(width, width, fill, has_bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Pool tokens `[s, b, h]` to `[b, h]`."""
        key, value = self.key(tokens), self.value(tokens)
        # To [b, heads, s, h / heads].
        key, value = (
            each.unflatten(2, (self.num_heads, -1)).permute(1, 2, 0, 3) for each in (key, value)
        )
        query = self.query.to(key.dtype).view(1, self.num_heads, 1, -1).expand(len(key), -1, -1, -1)
        return F.scaled_dot_product_attention(query, key, value).flatten(1)


class Classifier(nn.Module):
    """Class logits from the features of one layer, or of several, concatenated or averaged.

    Replicated on every process of the tensor group: c is small and need not divide.

    Args:
        processes: the data-parallel group, for the batch norm of linear evaluation.
        below: features `[s, b, h]` of the layers below the one that the classifier is attached to.
            Their forward passes append to it; the classifier clears it.
    """

    def __init__(
        self,
        core: Core,
        settings: FinetuneConfig,
        processes: ProcessGroup,
        below: list[Tensor],
    ) -> None:
        super().__init__()
        self.core, self.read_out = core, settings.read_out
        self.below, self.averages = below, settings.average > 1
        width = core.megatron.hidden_size * settings.concatenate
        evaluates = settings.linear_evaluation
        self.standardize: nn.Module | None = None
        if evaluates and settings.standardize:
            self.standardize = BatchNorm(width, processes)
        self.pool: AttentivePooling | None = None
        if settings.read_out == "attention":
            self.pool = AttentivePooling(width, core.megatron.num_attention_heads)
        deviation = settings.classifier_std
        if deviation is None:
            # MAE's linear probe starts at 0.01 (its released code), iGPT's fine-tuning at zero
            # (appendix A.1).
            deviation = 0.01 if evaluates else 0.0
        fill: Fill = normal(deviation) if deviation else zeros
        self.linear = ReplicatedLinear(width, settings.num_classes, fill)
        # The pretrained run has no classifier for these classes.
        set_start(self.parameters(), "fresh")

    def pooled(self, features: Tensor) -> Tensor:
        """Pool this process's tokens `[s, b, h]`, or select one of them: `[b, h]`."""
        tokens = all_tokens(features, self.core.megatron, self.core.groups)
        if self.read_out == "mean":
            return tokens.float().mean(0)
        return tokens[0 if self.read_out == "first" else -1]

    def attended(self, features: Tensor) -> Tensor:
        """Pool this process's tokens `[s, b, h]` by attention, standardised if configured."""
        assert self.pool is not None
        tokens = all_tokens(features, self.core.megatron, self.core.groups)
        if self.standardize is not None:
            tokens = self.standardize(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])
        return self.pool(tokens)

    def forward(self, features: Tensor) -> Tensor:
        """Map this process's tokens `[s, b, h]` to float32 logits `[b, c]`."""
        layers = [*self.below, features]
        self.below.clear()
        if self.averages:
            layers = [torch.stack([each.float() for each in layers]).mean(0)]
        if self.pool is not None:
            return self.linear(self.attended(torch.cat(layers, dim=2))).float()
        pooled = torch.cat([self.pooled(each) for each in layers], dim=1)
        if self.standardize is not None:
            pooled = self.standardize(pooled)
        return self.linear(pooled).float()


class ClassHead(Head):
    """The norm of a feature layer, without the rest of the layer, and the classifier."""

    def __init__(
        self, core: Core, build_layer: Callable[[], nn.Module], classifier: Classifier
    ) -> None:
        device = torch.get_default_device()
        # A decoder in the layer, such as AIM's of 600 million weights, then takes neither time nor
        # memory.
        with torch.device("meta"):
            layer = build_layer()
        norm = cast(FeatureLayer, layer).feature_norm
        assert isinstance(norm, Norm)
        norm.start_on(device)
        name = next(name for name, each in layer.named_children() if each is norm)
        super().__init__(core, norm, name, modulates=False)
        self.classifier = classifier

    def forward(self, state: PackedState) -> Tensor:
        """Map the `PackedState` of `[s, b, h]` to logits `[b, c]`."""
        hidden = LayerState.unpack(state, self.core.carried_names).hidden
        # Always call the norm, since hooks may watch it.
        normed = self.feature_norm(hidden)
        return self.classifier(hidden if self.core.model.features == "blocks" else normed)


def add_classifier(head: Head, classifier: Classifier) -> Head:
    """Make a paper's last layer return class logits after its own predictions.

    Uses hooks rather than a wrapper module, so that parameters keep the names under which the
    pretrained run saved them.
    """
    features: list[Tensor] = []

    def join(_: nn.Module, __: Any, predictions: Any) -> tuple[Tensor, ...]:
        own = (predictions,) if isinstance(predictions, Tensor) else predictions
        return (*own, classifier(features.pop()))

    watch_features(head, features.append)
    head.register_forward_hook(join)
    # An attribute of the head, so that its parameters are found, named and trained with the
    # layer's.
    head.classifier = classifier
    return head


def _watched(factory: Callable[[], nn.Module], keep: Callable[[Tensor], None]) -> nn.Module:
    """Build a layer that passes its features `[s, b, h]` to `keep`."""
    layer = factory()
    watch_features(layer, keep)
    return layer


class Classification(Finetuned):
    """A paper's model with a classifier on top.

    Visibility, layers, sequence and loss are derived from the paper's.
    """

    @property
    def is_joint(self) -> bool:
        """True if the paper's own loss is minimised too."""
        return self.settings.generative_weight > 0

    @property
    def mixes(self) -> bool:
        """True if training uses mixup or CutMix."""
        return max(self.settings.mixup, self.settings.cutmix) > 0

    @property
    def has_random_sequence(self) -> bool:
        """True if the classifier's inputs depend on random draws."""
        if self.is_joint:
            return self.backbone.has_random_sequence
        return self.backbone.has_random_features

    def flops_per_image(self) -> float:
        """Return the FLOPs of a training step for one image, without the classifier's."""
        if self.is_joint:  # No block is frozen.
            return self.backbone.flops_per_image()
        layer = self.settings.layer
        if layer is None:
            return self.feature_flops(self.config.model.num_layers)
        return self.feature_flops(layer + self.settings.concatenate // 2)

    def check_data(self, manifest: Manifest) -> Iterator[str]:
        """Check the shards for the paper and for mixing; labels are checked later."""
        yield from self.backbone.check_data(manifest)
        if self.mixes and manifest.kind != "jpeg":
            yield f"holds {manifest.kind} shards; finetune.mixup and cutmix need jpeg shards"

    def classes_of(self, manifest: Manifest) -> tuple[str, ...]:
        """Return the names of the classes of images."""
        return manifest.class_names

    def layer_plans(self) -> list[LayerPlan]:
        """Return the paper's layers up to the feature layer, with the classifier attached to it.

        Layers above, such as MAE's decoder, are dropped.
        """
        plans = self.backbone.layer_plans()
        readable = [place for place, plan in enumerate(plans) if plan.gives_features]
        around, kept = self.settings.concatenate // 2, list[Tensor]()
        centre = len(readable) - 1 if self.settings.layer is None else self.settings.layer
        *below, top = plans[: readable[centre + around] + 1]
        below = self.with_frozen(below)
        first = centre - max(around, self.settings.average - 1)
        for place in readable[first : centre + around]:
            plan = below[place]
            below[place] = dataclasses.replace(
                plan,
                factory=partial(_watched, plan.factory, kept.append),
                variant=(*plan.variant, "read"),
            )
        build = partial(self._build_head, top.factory, kept)
        if not self.is_joint:
            # Only the norm of the top layer runs, not its block or its decoder.
            top = dataclasses.replace(top, inner=None, stack=None, flops=0.0)
        top = dataclasses.replace(top, factory=build, handed=kept)
        return self.with_layer_decay([*below, top])

    def _build_head(self, build_top: Callable[[], nn.Module], below: list[Tensor]) -> Head:
        core = self.backbone.core
        classifier = partial(Classifier, core, self.settings, self.processes, below)
        if self.is_joint:
            top = build_top()
            assert isinstance(top, Head)
            return add_classifier(top, classifier())
        head = ClassHead(core, build_top, classifier())
        if self.settings.linear_evaluation:
            head.feature_norm.requires_grad_(False)
        return head

    def sequence(self, batch: Batch) -> SequenceBatch:
        """Return the paper's sequence with the labels as the last target.

        Without the paper's own loss, the inputs are those for features. They never contain labels.
        """
        if not self.is_joint:
            return SequenceBatch(self.backbone.feature_inputs(batch), (batch.labels,))
        return _with_labels(self.backbone.sequence(batch.unlabelled()), batch.labels)

    def training_sequence(self, batch: Batch) -> SequenceBatch:
        """Return the sequence for training; mixed images have class probabilities as labels."""
        images, classes = self._mixed(batch) if self.mixes else (batch.inputs, batch.labels)
        return self._sequence_of(batch, images, classes)

    def blank_sequence(self, num_images: int, device: torch.device) -> SequenceBatch:
        """Return the training sequence of blank images, which are not mixed: they need no pairs."""
        batch = self.blank_batch(num_images, device)
        if not self.mixes:
            return self.training_sequence(batch)
        classes = torch.zeros(num_images, self.settings.num_classes, device=device)
        return self._sequence_of(batch, batch.inputs, classes)

    def _sequence_of(self, batch: Batch, images: Tensor, classes: Tensor) -> SequenceBatch:
        shown = dataclasses.replace(batch, inputs=images)
        if not self.is_joint:
            inputs = self.backbone.feature_inputs(shown)
            return self.backbone.with_samples(SequenceBatch(inputs, (classes,)), batch)
        return _with_labels(self.backbone.training_sequence(shown.unlabelled()), classes)

    def _mixed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        settings = self.settings
        return mix(
            batch.inputs,
            batch.labels,
            batch.sample_index,
            num_classes=settings.num_classes,
            mixup=settings.mixup,
            cutmix=settings.cutmix,
            sharing=settings.images_per_mix,
            seed=self.config.seed,
        )

    def loss(self, predictions: Any, targets: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross-entropy in nats, plus the weighted loss of the paper.

        Unlabelled images contribute 0 to the cross-entropy. The last of `targets` is labels int64
        `[b]` or class probabilities float32 `[b, c]`; the paper's come before.
        """
        return self._loss(predictions, targets, self.settings.label_smoothing)

    def held_out_loss(
        self, predictions: Any, targets: tuple[Tensor, ...], num_images: int
    ) -> SumAndCount:
        """Return the same without label smoothing, which is for training alone."""
        return self._loss(predictions, targets, 0.0) * num_images, num_images

    def _loss(
        self, predictions: Any, targets: tuple[Tensor, ...], label_smoothing: float
    ) -> Tensor:
        own, logits = divide(predictions)
        *own_targets, labels = targets
        nats = F.cross_entropy(
            logits,
            labels,
            ignore_index=NO_LABEL,
            label_smoothing=label_smoothing,
            reduction="sum",
        )
        # Not the mean over the labelled images: their number differs between micro-batches, so the
        # loss would depend on the layout.
        loss = nats / len(labels)
        if self.is_joint:
            loss = loss + self.settings.generative_weight * self.backbone.loss(
                own, tuple(own_targets)
            )
        return loss

    def measures(self, predictions: Any, targets: tuple[Tensor, ...]) -> Mapping[str, SumAndCount]:
        """Return top-1 and top-5 accuracy as `accuracy` and `top5`, as sums and counts."""
        logits, labels = divide(predictions)[1], targets[-1]
        return {
            name: (is_among_likeliest(logits, labels, count).sum(), len(labels))
            for name, count in (("accuracy", 1), ("top5", 5))
        }

    def outputs(self, predictions: Any) -> Tensor:
        """Return class logits `[b, c]`."""
        return divide(predictions)[1]


def classifier_of(objective: Trainable) -> Classification | None:
    """Return the classifier that a fine-tuning run trains; None for others."""
    return objective if isinstance(objective, Classification) else None


def _with_labels(own: SequenceBatch, labels: Tensor) -> SequenceBatch:
    return SequenceBatch(own.inputs, (*own.targets, labels))


def divide(predictions: Any) -> tuple[Any, Tensor]:
    """Split predictions into the paper's own, `()` if there are none, and class logits `[b, c]`."""
    if isinstance(predictions, Tensor):
        return (), predictions
    *own, logits = predictions
    return (own[0] if len(own) == 1 else tuple(own)), logits


def is_among_likeliest(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return bool `[b]`, true if the label is among the `count` largest logits `[b, c]`."""
    likeliest = logits.topk(min(count, logits.shape[1]), dim=1).indices
    return (likeliest == labels[:, None]).any(1)
