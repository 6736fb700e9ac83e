"""Fine-tuning of a ViT against timm's model, schedule, mixing, loss and average of the weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import beta
from torch import Tensor

from benchmarks.peers.comparison import Ours, Peer, Result, batches, compare
from benchmarks.peers.plain import adamw, pixels, round_once, step_of
from benchmarks.peers.sizes import Sizes
from megavis.config.schema import (
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from megavis.config.section import DataConfig, ParallelConfig
from megavis.data.codecs.transforms import training_transform
from megavis.data.format.manifest import Manifest
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import Batch
from megavis.papers.darl.config import DARLConfig
from megavis.parallel.context import ParallelContext
from megavis.parallel.random import uniform
from megavis.weights.timm_folder import EPSILON
from megavis.weights.vits import from_timm

WEIGHT_DECAY, LAYER_DECAY, SMOOTHING = 0.05, 0.75, 0.1
MIXUP, CUTMIX, EMA = 0.8, 1.0, 0.99


def config_of(sizes: Sizes, num_classes: int) -> RunConfig:
    """Return MAE's recipe of fine-tuning in the given sizes, for a ViT with a class token."""
    return RunConfig(
        name="peers_finetune",
        seed=sizes.seed,
        objective=DARLConfig(patch_size=sizes.patch_size),
        model=ModelConfig(
            num_layers=sizes.layers,
            hidden_size=sizes.width,
            num_attention_heads=sizes.heads,
            normalization="layer_norm",
            norm_epsilon=EPSILON,
            activation="gelu",
            add_bias=True,
            positions="learned",
        ),
        data=DataConfig(train="", image_size=sizes.image_size, crop="random_resized", flip=True),
        parallel=ParallelConfig(zero_stage=0),
        optimizer=OptimizerConfig(
            learning_rate=sizes.rate, weight_decay=WEIGHT_DECAY, ema_decay=EMA
        ),
        schedule=ScheduleConfig(warmup_steps=sizes.warmup),
        training=sizes.training(),
        finetune=FinetuneConfig(
            num_classes=num_classes,
            visibility="full",
            read_out="first",
            label_smoothing=SMOOTHING,
            mixup=MIXUP,
            cutmix=CUTMIX,
            mixing_batch=sizes.batch_size,
            layer_decay=LAYER_DECAY,
        ),
    )


def layer_groups(model: torch.nn.Module, num_layers: int) -> list[dict[str, Any]]:
    """Return a group for each layer and kind of parameter, as MAE's released code groups them.

    timm's own function puts the last norm with the last block; MAE's puts it with the classifier.
    timm's scheduler multiplies the rate by `lr_scale`.
    """
    groups: dict[tuple[int, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        depth = num_layers + 1
        if found := re.match(r"blocks\.(\d+)\.", name):
            depth = int(found[1]) + 1
        elif name.startswith(("cls_token", "pos_embed", "patch_embed")):
            depth = 0
        decays = parameter.ndim > 1 and name not in ("cls_token", "pos_embed")
        groups.setdefault((depth, decays), []).append(parameter)
    return [
        {
            "params": members,
            "weight_decay": WEIGHT_DECAY if decays else 0.0,
            "lr_scale": LAYER_DECAY ** (num_layers + 1 - depth),
        }
        for (depth, decays), members in groups.items()
    ]


class TimmPeer:
    """timm's ViT in timm's loop, with megavis' draws for mixing."""

    def __init__(self, sizes: Sizes, num_classes: int) -> None:
        import timm
        from timm.data.mixup import FastCollateMixup
        from timm.loss import SoftTargetCrossEntropy
        from timm.scheduler import CosineLRScheduler
        from timm.utils import ModelEmaV3

        self.sizes = sizes
        torch.manual_seed(sizes.seed)
        self.model: Any = timm.create_model(
            "vit_base_patch16_224",
            img_size=sizes.image_size,
            patch_size=sizes.patch_size,
            embed_dim=sizes.width,
            depth=sizes.layers,
            num_heads=sizes.heads,
            num_classes=num_classes,
            # The class token has no position: the sum of two vectors would train at twice the rate.
            no_embed_class=True,
        ).train()
        self.mixing = FastCollateMixup(
            mixup_alpha=MIXUP,
            cutmix_alpha=CUTMIX,
            label_smoothing=SMOOTHING,
            num_classes=num_classes,
        )
        self.criterion = SoftTargetCrossEntropy()
        self.optimizer = adamw(layer_groups(self.model, sizes.layers), rate=sizes.rate)
        self.schedule = CosineLRScheduler(
            self.optimizer,
            t_initial=sizes.steps - sizes.warmup,
            warmup_t=sizes.warmup,
            warmup_prefix=True,
            t_in_epochs=False,
        )
        self.ema = ModelEmaV3(self.model, decay=EMA)

    def set_rates(self, step: int) -> None:
        """Set the rates of a step: timm's warm-up starts with a rate of 0, megavis' does not."""
        self.schedule.step_update(step + (step < self.sizes.warmup))

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy of mixed images in nats."""
        images, targets = self.mixed(batch)
        return self.criterion(self.model(pixels(images.permute(0, 2, 3, 1))), targets)

    def mixed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mix a batch as timm's loader does: images uint8 `[b, 3, h, w]`, targets `[b, c]`.

        timm mixes image i with image b - 1 - i, megavis 2k with 2k + 1; the order makes them equal.
        """
        count, height, width, _ = batch.inputs.shape
        order = torch.cat([torch.arange(0, count, 2), torch.arange(1, count, 2).flip(0)])
        images = batch.inputs[order].permute(0, 3, 1, 2).numpy()
        labels = batch.labels[order].tolist()
        index = batch.sample_index[:1] // count
        which, share, *middle = uniform(index, 4, seed=self.sizes.seed, purpose="mixing")[
            0
        ].tolist()
        cuts = which < 0.5
        alpha = CUTMIX if cuts else MIXUP
        drawn = (float(beta.ppf(share, alpha, alpha)), cuts)
        place = [int(middle[0] * height), int(middle[1] * width)]
        with (
            patch.object(self.mixing, "_params_per_batch", return_value=drawn),
            patch.object(np.random, "randint", side_effect=place),
        ):
            found: tuple[Tensor, Tensor] = self.mixing(list(zip(images, labels, strict=True)))
        return found

    def step(self, batch: Batch, number: int) -> float:
        """Take a step, and average the weights."""
        loss = step_of(self.optimizer, self.set_rates, self.loss)(batch, number)
        self.ema.update(self.model, step=number + 1)
        return loss

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under megavis' names."""
        return self._converted(self.model)

    def average(self) -> dict[str, Tensor]:
        """Return the averaged weights under megavis' names."""
        return self._converted(self.ema.module)

    def _converted(self, model: torch.nn.Module) -> dict[str, Tensor]:
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        tensors["pos_embed"] = F.pad(tensors["pos_embed"], (0, 0, 1, 0))
        return from_timm(tensors, num_heads=self.sizes.heads)


def run(sizes: Sizes, folder: Path, context: ParallelContext) -> Result:
    """Compare on labelled shards of JPEG files."""
    num_classes = len(Manifest.read(folder).class_names)
    config = config_of(sizes, num_classes)
    dataset = ShardDataset(folder, training_transform(config.data, seed=config.seed))
    ours = Ours(config, context)
    peers = [TimmPeer(sizes, num_classes) for _ in range(1 + sizes.control)]
    ours.start_from(peers[0].weights())
    for other in peers[1:]:
        round_once(other.model)
    loops = [Peer(peer.step, peer.weights, peer.average) for peer in peers]
    result = Result("fine-tuning", "timm VisionTransformer", sizes.batch_size)
    return compare(result, ours, loops, config, batches(config, dataset))
