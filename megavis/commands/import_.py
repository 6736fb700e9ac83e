"""`megavis import`: make a run out of weights that were released elsewhere."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.options import refuse_options
from megavis.config.arguments import non_negative_number, positive
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.tokenizers.palette import Palette

_FORMS = {
    "imagegpt": ("--palette",),
    "givt": ("--mode", "--num-classes", "--adapter", "--tokenizer"),
    "givt-vae": ("--beta", "--image-size"),
    "vqgan": ("--image-size",),
    "timm": ("--heads",),
}
"""Each form, and the options that it has."""


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "import",
        help="make a run out of released weights",
        description="imagegpt: read an ImageGPT folder (config.json and model.safetensors as"
        " transformers saves them; kmeans_centers.npy or preprocessor_config.json for the palette),"
        " write a run folder, and compare the logits of both on random input. givt, givt-vae: read"
        " an .npz file of GIVT's released Transformers or VAEs. vqgan: read a checkpoint of"
        " taming-transformers."
        " timm: read a Vision Transformer with a class token (model.safetensors, and config.json)"
        " as timm's save_for_hf saves it, and compare both; the run can be fine-tuned.",
        epilog="example: megavis import imagegpt imagegpt-small runs/imagegpt_small\n"
        "         megavis import givt givt.npz runs/givt --tokenizer runs/givt_vae",
    )
    parser.add_argument("form", choices=tuple(_FORMS), help="what it holds")
    parser.add_argument("source", type=Path, metavar="DIR|FILE", help="the released weights")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="new run folder")
    parser.add_argument(
        "--palette", type=Path, help="kmeans_centers.npy; default: the folder's own"
    )
    givt = parser.add_argument_group("givt")
    givt.add_argument("--mode", choices=("causal", "maskgit"), help="default: read from the file")
    givt.add_argument("--num-classes", type=positive, help="default: read from the file")
    givt.add_argument(
        "--beta",
        type=non_negative_number,
        metavar="B",
        help="givt-vae: what it was trained with; default: 5e-5",
    )
    givt.add_argument("--adapter", type=Path, help=".npz file of an adapter that stands apart")
    givt.add_argument("--tokenizer", type=Path, help="run folder of its VAE")
    givt.add_argument(
        "--image-size", type=positive, default=256, help="givt-vae, vqgan: of its images"
    )
    timm = parser.add_argument_group("timm")
    timm.add_argument("--heads", type=positive, help="attention heads; default: width / 64")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert; a run that is not what was released is not kept.

    Raises:
        UserError: the weights are not of this form, or the run exists.
    """
    from megavis.commands.import_givt import import_transformer, import_vae
    from megavis.commands.import_timm import import_timm
    from megavis.commands.import_vqgan import import_vqgan

    others = {option for options in _FORMS.values() for option in options} - {*_FORMS[args.form]}
    refuse_options(args, sorted(others), f"to {args.form}")
    if args.run_folder.exists():
        raise UserError(f"{args.run_folder} exists; choose another name")
    importers = (_import_imagegpt, import_transformer, import_vae, import_vqgan, import_timm)
    forms = dict(zip(_FORMS, importers, strict=True))
    try:
        forms[args.form](args)
    except BaseException:
        shutil.rmtree(args.run_folder, ignore_errors=True)
        raise
    return 0


def _import_imagegpt(args: argparse.Namespace) -> None:
    from megavis.commands.quiet import quietly

    with quietly():
        from megavis.papers.igpt.imagegpt_folder import read_folder

    settings, tensors = read_folder(args.source)
    _write_imagegpt(args, settings, tensors)
    difference = _compare(args.run_folder, settings, tensors)
    sys.stdout.write(
        f"{args.run_folder}: logits agree with {args.source} to {difference:.1e} on random input\n"
    )


def _write_imagegpt(
    args: argparse.Namespace, settings: dict[str, Any], tensors: dict[str, Any]
) -> None:
    from megavis.commands.imported_run import imported_config, write_run
    from megavis.config.schema import ModelConfig
    from megavis.papers.igpt.imagegpt import from_imagegpt, has_biases, model_section
    from megavis.papers.igpt.paper import IGPTConfig

    side = math.isqrt(settings["n_positions"])
    if side * side != settings["n_positions"]:
        raise UserError(f"config.json: n_positions {settings['n_positions']} is no square image")
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
    """Return the named palette, or the folder's own; None where it has none."""
    from megavis.papers.igpt.imagegpt_folder import read_clusters
    from megavis.tokenizers.palette import Palette

    given = args.palette is not None
    palette = Palette.load(args.palette) if given else read_clusters(args.source)
    if palette is not None and palette.num_tokens > num_colors:
        raise UserError(
            f"{args.palette if given else args.source}: {palette.num_tokens} colours, more than the"
            f" {num_colors} of the model"
        )
    return palette


def _compare(run_folder: Path, settings: dict[str, Any], tensors: dict[str, Any]) -> float:
    import torch

    from megavis.notebook import Run
    from megavis.papers.igpt.imagegpt_folder import check_agreement, folder_logits

    generator = torch.Generator().manual_seed(0)
    shape = (2, settings["n_positions"])
    ids = torch.randint(settings["vocab_size"] - 1, shape, generator=generator)
    ours = Run.open(run_folder, device="cpu").outputs(ids)
    return check_agreement(ours, folder_logits(tensors, settings, ids))
