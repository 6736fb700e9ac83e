"""The run of a released Vision Transformer, which sees everything and can be fine-tuned.

Legend: b images, n tokens, h hidden size, c classes.
"""

from __future__ import annotations

import argparse
from functools import partial

from megavis.checkpoint.format.hub_folder import read_hub_folder
from megavis.composition.released_run import Compared, OpenedRun, ReleasedRun, random_images
from megavis.config.schema import FinetuneConfig, ModelConfig
from megavis.papers.darl.config import DARLConfig
from megavis.papers.darl.timm_folder import TimmViT, from_timm, read_timm_folder, timm_features
from megavis.papers.darl.transformers_vit import from_transformers


def read_timm(args: argparse.Namespace) -> ReleasedRun:
    """Convert a folder of timm; raises UserError where it is no plain ViT."""
    return _run_of(read_timm_folder(args.source, num_heads=args.heads))


def read_vit(args: argparse.Namespace) -> ReleasedRun:
    """Convert a ViT folder of transformers; raises UserError where it is none."""
    settings, tensors = read_hub_folder(args.source)
    return _run_of(from_transformers(tensors, settings))


def _run_of(model: TimmViT) -> ReleasedRun:
    return ReleasedRun(
        DARLConfig(patch_size=model.patch_size),
        from_timm(model),
        image_size=model.image_size,
        sections={
            "model": ModelConfig(
                num_layers=model.num_layers,
                hidden_size=model.hidden_size,
                num_attention_heads=model.num_heads,
                ffn_hidden_size=model.mlp_size,
                normalization="layer_norm",
                norm_epsilon=model.epsilon,
                activation="gelu",
                add_bias=True,
                positions="learned",
            ),
            "finetune": FinetuneConfig(
                num_classes=max(2, model.num_classes), visibility="full", read_out="first"
            ),
        },
        validates=True,
        compare=partial(_compare, model),
        compared="features and class logits",
    )


def _compare(model: TimmViT, run: OpenedRun) -> Compared:
    images = random_images(model.image_size)
    theirs = timm_features(model, images)
    yield run.features(images, layer=model.num_layers), theirs.mean(1)
    if model.num_classes:
        logits = theirs[:, 0] @ model.tensors["head.weight"].t() + model.tensors["head.bias"]
        yield run.outputs(images), logits
