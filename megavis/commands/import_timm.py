"""`megavis import timm`: a Vision Transformer of timm's as a run that can be fine-tuned."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megavis.config.schema import RunConfig
    from megavis.papers.darl.timm_folder import TimmViT


def import_timm(args: argparse.Namespace) -> None:
    """Convert and compare.

    Raises:
        UserError: the folder is no plain ViT of timm's, or the two networks do not agree.
    """
    from megavis.commands.imported_run import write_run
    from megavis.commands.quiet import quietly

    with quietly():
        from megavis.papers.darl.timm_folder import from_timm, read_timm_folder

    model = read_timm_folder(args.source, num_heads=args.heads)
    write_run(args.run_folder, _config(args, model), from_timm(model))
    difference = _compare(args, model)
    sys.stdout.write(
        f"{args.run_folder}: features and class logits agree with {args.source} to"
        f" {difference:.1e} on random input\n"
    )


def _config(args: argparse.Namespace, model: TimmViT) -> RunConfig:
    from megavis.commands.imported_run import imported_config
    from megavis.config.schema import FinetuneConfig, ModelConfig
    from megavis.papers.darl.config import DARLConfig

    return imported_config(
        args.run_folder,
        DARLConfig(patch_size=model.patch_size),
        image_size=model.image_size,
        validation="shards/validation",
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
        finetune=FinetuneConfig(
            num_classes=max(2, model.num_classes), visibility="full", read_out="first"
        ),
    )


def _compare(args: argparse.Namespace, model: TimmViT) -> float:
    import torch

    from megavis.notebook import Run
    from megavis.papers.darl.timm_folder import timm_features
    from megavis.papers.igpt.imagegpt_folder import check_agreement

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
