"""Export a run's backbone as a Vision Transformer of `timm` or `transformers`.

Any run qualifies whose model is a ViT: it reads patches, prepends one learned token, adds positions
and has a ViT's blocks. Backbones pretrained with another visibility use full attention here, as
with `finetune.visibility: full`.

Legend: b images, s tokens (the class token and n patches), h hidden size, c classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.checkpoint.state.restore import load_weights
from megavis.composition.composition import Composition
from megavis.composition.reader import Reader
from megavis.composition.released_run import random_images
from megavis.composition.tokens import Patches
from megavis.config.errors import UserError
from megavis.data.loading.loader import Batch
from megavis.hub.plain import norm_name
from megavis.model.inference import Inference
from megavis.model.stack import LayerStack, LocalLayers, watch_features
from megavis.model.vit_blocks import TIMM, block_to
from megavis.notebook import Run
from megavis.papers.darl.vit_folders import EPSILON, TimmViT, timm_features

_WORDS = {"layer_norm": "normalization", "all": "norm_bias", "gelu": "activation"}
_ADDED = ("learned", "sincos", "none")


def as_vit(run: Run, weights: Mapping[str, Tensor]) -> TimmViT:
    """Convert a run on one process, and its unsharded parameters, to timm's parameter names.

    Raises UserError if it is not a plain ViT with a class token; names the config key.
    """
    paper = _paper(run)
    reader = run.runner.layers.modules[0]
    assert isinstance(reader, Reader)
    prefix, side = f"{run.runner.layers.plans[0].name}.", paper.paper.patch_size
    content = f"{prefix}{paper.part_names['content']}"
    heads, norm = run.config.model.num_attention_heads, norm_name(run.runner)
    kernel = weights[f"{content}.weight"].unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)
    tensors = {
        "cls_token": _first_token(reader).detach().view(1, 1, -1),
        "pos_embed": F.pad(_positions(paper, reader), (0, 0, 1, 0))[None],
        "patch_embed.proj.weight": kernel,
        "patch_embed.proj.bias": weights[f"{content}.bias"],
        "norm.weight": weights[f"{norm}.weight"],
        "norm.bias": weights[f"{norm}.bias"],
    }
    found = {int(m[1]) for name in weights if (m := re.match(r"blocks\.(\d+)\.mlp", name))}
    for layer in sorted(found):
        block = block_to(weights, f"blocks.{layer}.", TIMM, num_heads=heads)
        tensors |= {f"blocks.{layer}.{name}": tensor for name, tensor in block.items()}
    if classifies(run):
        for kind in ("weight", "bias"):
            name = f"{norm.rpartition('.')[0]}.classifier.linear.{kind}"
            tensors[f"head.{kind}"] = weights[name]
    whole = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    return TimmViT(whole, heads, epsilon=run.config.model.norm_epsilon)


def classifies(run: Run) -> bool:
    """Return True if the run computes class logits from the class token, like a ViT."""
    tuned = run.config.finetune
    if tuned is None or tuned.read_out != "first" or tuned.concatenate > 1:
        return False
    return not (tuned.linear_evaluation and tuned.standardize)


def _paper(run: Run) -> Composition:
    """Return the composition of a run; raise UserError if it is not a ViT."""
    paper, model = run.objective.backbone, run.config.model
    if not isinstance(paper, Composition):
        raise UserError(f"a run of {run.config.objective.name} has no Transformer")
    if not isinstance(paper.reads, Patches):
        raise UserError("a ViT reads patches of pixels, which this run does not")
    for wanted, key in _WORDS.items():
        if getattr(model, key) != wanted:
            raise UserError(f"a ViT has model.{key} {wanted}, not {getattr(model, key)}")
    if not (model.add_bias and model.has_biased_attention):
        raise UserError("a ViT has biases; model.add_bias or attention_bias is false")
    if paper.position_kind not in _ADDED:
        raise UserError(f"a ViT adds its positions; model.positions is {paper.position_kind}")
    if paper.has_transform or "memory" in paper.condition.roles:
        raise UserError("a ViT has neither an adapter nor an encoder")
    sees_all = paper.core.visibility_kind in ("full", "context")
    if run.config.finetune is not None and not sees_all:
        raise UserError("a ViT has full attention; finetune.visibility is not full")
    return paper


def _first_token(reader: Reader) -> Tensor:
    """Return the learned token before the patches, `[h]`; raise UserError if there is none."""
    parts = [part for role in ("start", "front") if (part := reader.part(role)) is not None]
    width = reader.core.model.hidden_size
    if len(parts) != 1 or not isinstance(parts[0], nn.Parameter) or parts[0].numel() != width:
        raise UserError("a ViT has one learned token before the patches; this run does not")
    return parts[0].view(-1)


@torch.no_grad()
def _positions(paper: Composition, reader: Reader) -> Tensor:
    """Return the position embedding of each patch, `[n, h]`."""
    count, width = paper.reads.num_tokens, reader.core.model.hidden_size
    return reader.add_positions(
        torch.zeros(1, count, width), torch.arange(count)[None], "positions"
    )[0]


@torch.no_grad()
def compared_vit(run: Run, vit: TimmViT) -> tuple[Tensor, Tensor]:
    """Return both networks' features of random images, `[2, b, h]`.

    They are the first token and the mean over all tokens of the final norm's output.
    """
    images = random_images(run.config.data.image_size)
    tokens = (full_attention_tokens(run, images), timm_features(vit, images))
    ours, theirs = (torch.stack([each[:, 0], each.mean(1)]) for each in tokens)
    return ours, theirs


@torch.no_grad()
def full_attention_tokens(run: Run, images: Tensor) -> Tensor:
    """Return the final norm's output `[b, s, h]` on images uint8 `[b, H, W, 3]`, full attention."""
    paper, runner = run.objective.backbone, run.runner
    assert isinstance(paper, Composition)
    if run.config.finetune is None:
        paper = paper.with_full_attention()
        plans = paper.layer_plans()
        layers = LocalLayers(plans, list(LayerStack(plans, paper.loss).layers))
        assert run.checkpoint is not None
        load_weights(run.checkpoint, layers, run.context)
        runner = Inference(layers, run.context)
    kept: list[Tensor] = []
    with watch_features(runner.layers.feature_layers()[-1], kept.append):
        batch = Batch(images, torch.full((len(images),), -1), torch.arange(len(images)))
        runner.features(paper.feature_inputs(batch))
    return kept[0].transpose(0, 1)


def timm_settings(vit: TimmViT) -> dict[str, Any]:
    """Return the `config.json` for `timm.create_model("local-dir:DIR")`.

    Raises UserError if the norms' epsilon is not that of timm's ViTs.
    """
    if vit.epsilon != EPSILON:
        raise UserError(f"timm's ViTs have model.norm_epsilon {EPSILON}, not {vit.epsilon}")
    size = [3, vit.image_size, vit.image_size]
    return {
        "architecture": "vit_base_patch16_224",
        "num_classes": vit.num_classes,
        "num_features": vit.hidden_size,
        "global_pool": "token",
        "model_args": {
            "img_size": vit.image_size,
            "patch_size": vit.patch_size,
            "embed_dim": vit.hidden_size,
            "depth": vit.num_layers,
            "num_heads": vit.num_heads,
            "mlp_ratio": vit.mlp_size / vit.hidden_size,
        },
        "pretrained_cfg": {
            "num_classes": vit.num_classes,
            "input_size": size,
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "mean": list(vit.mean),
            "std": list(vit.deviation),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
