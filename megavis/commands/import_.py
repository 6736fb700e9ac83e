"""`megavis import`: make a run from released weights."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavis.checkpoint.format.folder import chosen_checkpoint
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.checkpoint.state.convert import write_weights
from megavis.config.data import DataConfig
from megavis.config.errors import UserError
from megavis.config.load import dump_config, load_config
from megavis.config.schema import (
    FinetuneConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)
from megavis.data.format.manifest import PALETTE_NAME
from megavis.hub.agreement import check_agreement, random_images
from megavis.hub.folders import compared_vit_mae
from megavis.hub.vit import from_transformers
from megavis.notebook import Run
from megavis.papers.darl.config import DARLConfig
from megavis.papers.darl.timm_folder import TimmViT, from_timm, read_timm_folder, timm_features
from megavis.papers.givt.released import read_arrays, vae_shape, vae_weights
from megavis.papers.givt.weights import ReleasedModel
from megavis.papers.igpt.imagegpt import from_imagegpt, has_biases, model_section
from megavis.papers.igpt.imagegpt_folder import (
    folder_logits,
    read_clusters,
    read_folder,
    read_json,
    read_tensors,
)
from megavis.papers.igpt.paper import IGPTConfig
from megavis.papers.mae.vit_mae import from_vit_mae, has_sines, vit_mae_sections
from megavis.papers.vae.config import VAEConfig
from megavis.papers.vqgan.config import VQGANConfig
from megavis.tokenizers.palette import Palette
from megavis.tokenizers.vqgan_released import read_released, released_shape


def run(args: argparse.Namespace) -> int:
    """Convert; delete the run if it does not match the released weights.

    Raises:
        UserError: the weights do not have this form.
    """
    try:
        _IMPORTERS[args.form](args)
    except BaseException:
        shutil.rmtree(args.run_folder, ignore_errors=True)
        raise
    return 0


def _import_imagegpt(args: argparse.Namespace) -> None:
    settings, tensors = read_folder(args.source)
    _write_imagegpt(args, settings, tensors)
    difference = _compare(args.run_folder, settings, tensors)
    sys.stdout.write(
        f"{args.run_folder}: logits agree with {args.source} to {difference:.1e} on random input\n"
    )


def _write_imagegpt(
    args: argparse.Namespace, settings: dict[str, Any], tensors: dict[str, Any]
) -> None:
    side = math.isqrt(settings["n_positions"])
    if side * side != settings["n_positions"]:
        raise UserError(f"config.json: n_positions {settings['n_positions']} is not a square image")
    num_colors = settings["vocab_size"] - 1
    config = imported_config(
        args.run_folder,
        IGPTConfig(vocabulary_size=num_colors),
        image_size=side,
        model=ModelConfig(**model_section(settings, add_bias=has_biases(tensors))),
    )
    palette = _palette(args, num_colors)
    weights = from_imagegpt(tensors, num_heads=settings["n_head"])
    write_run(args.run_folder, config, weights, palette=palette)


def _palette(args: argparse.Namespace, num_colors: int) -> Palette | None:
    """Return the named palette, or the folder's own; None if it has none."""
    given = args.palette is not None
    palette = Palette.load(args.palette) if given else read_clusters(args.source)
    if palette is not None and palette.num_tokens > num_colors:
        raise UserError(
            f"{args.palette if given else args.source}: {palette.num_tokens} colours, more than the"
            f" {num_colors} of the model"
        )
    return palette


def _compare(run_folder: Path, settings: dict[str, Any], tensors: dict[str, Any]) -> float:
    generator = torch.Generator().manual_seed(0)
    shape = (2, settings["n_positions"])
    ids = torch.randint(settings["vocab_size"] - 1, shape, generator=generator)
    ours = Run.open(run_folder, device="cpu").outputs(ids)
    return check_agreement(ours, folder_logits(tensors, settings, ids))


def import_transformer(args: argparse.Namespace) -> None:
    """Write the run of a causal or masked model, with its adapter if the file has one.

    Raises:
        UserError: the file is not such a checkpoint, or lacks the requested part.
    """
    arrays = dict(read_arrays(args.source))
    if args.adapter is not None:
        adapter = read_arrays(args.adapter)
        arrays |= {f"params_adaptor/{name}": array for name, array in adapter.items()}
    released = ReleasedModel(arrays, mode=args.mode, num_classes=args.num_classes)
    paper = released.objective()
    if args.tokenizer is not None:
        pixels = _pixels_of_a_latent(args.tokenizer)
        update = {"tokenizer": str(args.tokenizer), "downsampling": pixels}
        paper = paper.model_copy(update=update)
    size = released.side * paper.downsampling
    if released.image_size not in (None, size):
        raise UserError(
            f"the encoder reads images of {released.image_size}² pixels, and the VAE of --tokenizer"
            f" gives {released.side}² latents of images of {size}²"
        )
    write_released(args, paper, released.weights(), image_size=size, model=released.model())


def _pixels_of_a_latent(run_folder: Path) -> int:
    path = run_folder / "config.yaml"
    paper = load_config(path).config.objective
    if not isinstance(paper, VAEConfig):
        raise UserError(f"--tokenizer: {run_folder} is a run of {paper.name}, not of a vae")
    return paper.shape.downsampling


def import_vae(args: argparse.Namespace) -> None:
    """Write the run of a VAE, without its discriminator, which was not released.

    Raises:
        UserError: the file is not such a checkpoint.
    """
    arrays = read_arrays(args.source)
    shape = vae_shape(arrays)
    paper = VAEConfig(
        latent_channels=shape.latent_channels,
        filters=shape.filters,
        multipliers=shape.multipliers,
        blocks_per_level=shape.blocks_per_level,
        perceptual_weight=0.0,
        adversarial_weight=0.0,
        **({} if args.beta is None else {"beta": args.beta}),
    )
    weights = {f"vae.network.{name}": tensor for name, tensor in vae_weights(arrays).items()}
    write_released(args, paper, weights, image_size=args.image_size)


def write_released(
    args: argparse.Namespace,
    paper: ObjectiveConfig,
    weights: Mapping[str, Tensor],
    *,
    image_size: int,
    **sections: Any,
) -> None:
    """Write the run folder and print its number of parameters; `sections` are config sections."""
    config = imported_config(args.run_folder, paper, image_size=image_size, **sections)
    write_run(args.run_folder, config, weights)
    total = sum(tensor.numel() for tensor in weights.values())
    sys.stdout.write(f"{args.run_folder}: {total:,} parameters from {args.source}\n")


def import_vqgan(args: argparse.Namespace) -> None:
    """Write the run of a VQGAN, without its discriminator, which differs here.

    Raises:
        UserError: the file is not such a checkpoint.
    """
    tensors = read_released(args.source)
    shape = released_shape(tensors)
    paper = VQGANConfig(**asdict(shape), perceptual_weight=0.0, adversarial_weight=0.0)
    weights = {f"vqgan.network.{name}": tensor for name, tensor in tensors.items()}
    write_released(args, paper, weights, image_size=args.image_size)


def import_huggingface(args: argparse.Namespace) -> None:
    """Write the run of what `config.json` names: ImageGPT, ViTMAE, a ViT, or a run of megavis.

    Raises:
        UserError: it names something else, or the two networks do not agree.
    """
    settings = read_json(args.source / "config.json")
    kind = "timm" if "architecture" in settings else str(settings.get("model_type"))
    if kind not in _HUGGINGFACE:
        raise UserError(
            f"{args.source / 'config.json'}: model_type is {kind!r}; use one of"
            f" {', '.join(_HUGGINGFACE)}"
        )
    _HUGGINGFACE[kind](args)


def _import_own(args: argparse.Namespace) -> None:
    source = chosen_checkpoint(args.source)
    names = {"name": args.run_folder.name, "output": str(args.run_folder.parent)}
    config = load_config(args.source / "config.yaml").config.model_copy(update=names)
    palette = args.source / PALETTE_NAME
    colors = Palette.load(palette) if palette.exists() else None
    write_run(args.run_folder, config, read_weights(source), palette=colors)
    sys.stdout.write(f"{args.run_folder}: the weights of {args.source}\n")


def _import_vit(args: argparse.Namespace) -> None:
    settings, tensors = _read_huggingface(args.source)
    _write_vit(args, from_transformers(tensors, settings))


def _read_huggingface(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    settings = read_json(folder / "config.json")
    return settings, read_tensors(folder / "model.safetensors")


def _import_vit_mae(args: argparse.Namespace) -> None:
    settings, tensors = _read_huggingface(args.source)
    weights = from_vit_mae(tensors, settings)
    paper, model = vit_mae_sections(settings, has_tables=not has_sines(tensors, settings))
    size = settings["image_size"]
    config = imported_config(args.run_folder, paper, image_size=size, model=model)
    write_run(args.run_folder, config, weights)
    run = Run.open(args.run_folder, device="cpu")
    difference = check_agreement(*compared_vit_mae(run, tensors, settings))
    sys.stdout.write(
        f"{args.run_folder}: predictions agree with {args.source} to {difference:.1e} on random"
        " input\n"
    )


def import_timm(args: argparse.Namespace) -> None:
    """Convert and compare.

    Raises:
        UserError: the folder is not a plain timm ViT, or the two networks disagree.
    """
    _write_vit(args, read_timm_folder(args.source, num_heads=args.heads))


def _write_vit(args: argparse.Namespace, model: TimmViT) -> None:
    write_run(args.run_folder, _timm_config(args, model), from_timm(model))
    difference = _compare_timm(args, model)
    sys.stdout.write(
        f"{args.run_folder}: features and class logits agree with {args.source} to"
        f" {difference:.1e} on random input\n"
    )


def _timm_config(args: argparse.Namespace, model: TimmViT) -> RunConfig:
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
            norm_epsilon=model.epsilon,
            activation="gelu",
            add_bias=True,
            positions="learned",
        ),
        finetune=FinetuneConfig(
            num_classes=max(2, model.num_classes), visibility="full", read_out="first"
        ),
    )


def _compare_timm(args: argparse.Namespace, model: TimmViT) -> float:
    images = random_images(model.image_size)
    run = Run.open(args.run_folder, device="cpu")
    theirs = timm_features(model, images)
    difference = check_agreement(run.features(images, layer=model.num_layers), theirs.mean(1))
    if model.num_classes:
        logits = theirs[:, 0] @ model.tensors["head.weight"].t() + model.tensors["head.bias"]
        difference = max(difference, check_agreement(run.outputs(images), logits))
    return difference


def imported_config(
    run_folder: Path,
    paper: ObjectiveConfig,
    *,
    image_size: int,
    validation: str | None = None,
    **sections: Any,
) -> RunConfig:
    """Return the config of an imported run; its training keys are for further training.

    Args:
        run_folder: its name becomes the run's name.
        paper: the objective's section.
        image_size: side of the images in pixels.
        validation: folder of held-out shards, required by a `finetune` section.
        **sections: further sections, such as `model`.
    """
    is_validated = validation is not None
    return RunConfig(
        name=run_folder.name,
        output=str(run_folder.parent),
        objective=paper,
        data=DataConfig(train="shards/train", validation=validation, image_size=image_size),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        training=TrainingConfig(steps=1, batch_size=128, validate_every=int(is_validated)),
        **sections,
    )


def write_run(
    run_folder: Path,
    config: RunConfig,
    weights: Mapping[str, Tensor],
    *,
    palette: Palette | None = None,
) -> None:
    """Write a new run folder with a checkpoint of step 0. Raises OSError."""
    run_folder.mkdir(parents=True)
    (run_folder / "config.yaml").write_text(dump_config(config))
    if palette is not None:
        palette.save(run_folder / PALETTE_NAME)
    tokenizer = None if palette is None else palette.sha256
    write_weights(run_folder, weights, seed=config.seed, tokenizer=tokenizer)


_HUGGINGFACE: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "imagegpt": _import_imagegpt,
    "vit_mae": _import_vit_mae,
    "vit": _import_vit,
    "timm": import_timm,
    "megavis": _import_own,
}
"""By `model_type` of `config.json`."""

_IMPORTERS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "huggingface": import_huggingface,
    "imagegpt": _import_imagegpt,
    "givt": import_transformer,
    "givt-vae": import_vae,
    "vqgan": import_vqgan,
    "timm": import_timm,
}
