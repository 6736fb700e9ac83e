"""`megavis import timm`: a Vision Transformer of timm's as a run that can be fine-tuned."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megavis.config.schema import RunConfig
    from megavis.objectives.timm_folder import TimmViT


def import_timm(args: argparse.Namespace) -> None:
    """Convert and compare.

    Raises:
        UserError: the folder is no plain ViT of timm's, or the two networks do not agree.
    """
    from megavis.checkpoint.whole import write_weights
    from megavis.commands.quiet import quietly
    from megavis.config.load import dump_config

    with quietly():
        from megavis.objectives.timm_folder import from_timm, read_timm_folder

    model = read_timm_folder(args.source, num_heads=args.heads)
    config = _config(args, model)
    args.run_folder.mkdir(parents=True)
    (args.run_folder / "config.yaml").write_text(dump_config(config))
    write_weights(args.run_folder, from_timm(model), seed=config.seed, tokenizer=None)
    difference = _compare(args, model)
    sys.stdout.write(
        f"{args.run_folder}: features and class logits agree with {args.source} to"
        f" {difference:.1e} on random input\n"
    )


def _config(args: argparse.Namespace, model: TimmViT) -> RunConfig:
    from megavis.config.schema import (
        DataConfig,
        FinetuneConfig,
        ModelConfig,
        OptimizerConfig,
        RunConfig,
        TrainingConfig,
    )
    from megavis.objectives.darl_config import DARLConfig

    return RunConfig(
        name=args.run_folder.name,
        output=str(args.run_folder.parent),
        objective=DARLConfig(patch_size=model.patch_size),
        model=ModelConfig(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_heads,
            ffn_hidden_size=model.mlp_size,
            normalization="layer_norm",
            norm_epsilon=1e-6,
            activation="gelu",
            add_bias=True,
            positions="learned",
        ),
        # The weights come without their data and their training; these keys are for going on.
        data=DataConfig(
            train="shards/train", validation="shards/validation", image_size=model.image_size
        ),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        training=TrainingConfig(steps=1, batch_size=128, validate_every=1),
        finetune=FinetuneConfig(
            num_classes=max(2, model.num_classes), visibility="full", read_out="first"
        ),
    )


def _compare(args: argparse.Namespace, model: TimmViT) -> float:
    import torch

    from megavis.notebook import Run
    from megavis.objectives.imagegpt_folder import check_agreement
    from megavis.objectives.timm_folder import timm_features

    generator = torch.Generator().manual_seed(0)
    shape = (2, model.image_size, model.image_size, 3)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    run = Run.open(args.run_folder, device="cpu")
    theirs = timm_features(model, images)
    difference = check_agreement(run.features(images, layer=model.num_layers), theirs.mean(1))
    if model.num_classes:
        logits = theirs[:, 0] @ model.tensors["head.weight"].t() + model.tensors["head.bias"]
        difference = max(difference, check_agreement(run.outputs(images), logits))
    return difference
