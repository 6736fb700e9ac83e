"""`megavis import` and `megavis export`: runs from released weights, and weights in other forms."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megavis.checkpoint.format.folder import chosen_checkpoint, step_folder
from megavis.checkpoint.format.manifest import read_manifest
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.checkpoint.state.convert import write_weights
from megavis.commands.terminal import quietly
from megavis.composition.released_run import ReleasedRun, read_json
from megavis.config.errors import UserError
from megavis.config.load import dump_config, load_config, tokenizers_inside, with_tokenizers
from megavis.config.papers import ImportSpec, paper_imports
from megavis.config.schema import OptimizerConfig, RunConfig, TrainingConfig
from megavis.config.section import DataConfig
from megavis.data.format.manifest import PALETTE_NAME
from megavis.hub.folders import write_huggingface, write_timm
from megavis.hub.plain import check_agreement
from megavis.notebook import Run
from megavis.tokenizers.palette import Palette


def import_run(args: argparse.Namespace) -> int:
    """Convert; delete the run if it does not match the released weights."""
    try:
        if args.form == "huggingface" and _model_type(args.source) == "megavis":
            _import_own(args)
        else:
            _import(args, _form(args))
    except BaseException:
        shutil.rmtree(args.run_folder, ignore_errors=True)
        raise
    return 0


def _form(args: argparse.Namespace) -> ImportSpec:
    """Return the named form, or for a folder of the Hub what its `config.json` names."""
    specs = {spec.name: spec for spec in paper_imports()}
    if args.form != "huggingface":
        return specs[args.form]
    kind = _model_type(args.source)
    by_type = {name: spec for spec in specs.values() for name in spec.model_types}
    if kind not in by_type:
        raise UserError(
            f"{args.source / 'config.json'}: model_type is {kind!r}; use one of"
            f" {', '.join([*by_type, 'megavis'])}"
        )
    return by_type[kind]


def _model_type(folder: Path) -> str:
    """Return `model_type`, which timm's files do not have."""
    settings = read_json(folder / "config.json")
    return "timm" if "architecture" in settings else str(settings.get("model_type"))


def _import(args: argparse.Namespace, form: ImportSpec) -> None:
    module, _, function = form.read.partition(":")
    released: ReleasedRun = getattr(importlib.import_module(module), function)(args)
    config = imported_config(args.run_folder, released)
    write_run(args.run_folder, config, released.weights, palette=released.palette)
    if released.compare is None:
        total = sum(tensor.numel() for tensor in released.weights.values())
        sys.stdout.write(f"{args.run_folder}: {total:,} parameters from {args.source}\n")
        return
    opened = Run.open(args.run_folder, device="cpu")
    difference = max(check_agreement(*pair) for pair in released.compare(opened))
    sys.stdout.write(
        f"{args.run_folder}: {released.compared} agree with {args.source} to {difference:.1e} on"
        " random input\n"
    )


def _import_own(args: argparse.Namespace) -> None:
    source = chosen_checkpoint(args.source)
    names = {"name": args.run_folder.name, "output": str(args.run_folder.parent)}
    config = load_config(args.source / "config.yaml").config.model_copy(update=names)
    inside = tokenizers_inside(config, args.source)
    # The config of a run that is trained further names them from where the command runs.
    config = with_tokenizers(config, {name: str(args.run_folder / name) for name in inside})
    palette = args.source / PALETTE_NAME
    colors = Palette.load(palette) if palette.exists() else None
    tokenizer, weights = read_manifest(source).tokenizer, read_weights(source)
    write_run(args.run_folder, config, weights, palette=colors, tokenizer=tokenizer)
    for name in inside:
        shutil.copytree(args.source / name, args.run_folder / name)
    sys.stdout.write(f"{args.run_folder}: the weights of {args.source}\n")


def imported_config(run_folder: Path, released: ReleasedRun) -> RunConfig:
    """Return the config of an imported run; its training keys are for further training."""
    validation = "shards/validation" if released.validates else None
    return RunConfig(
        name=run_folder.name,
        output=str(run_folder.parent),
        objective=released.objective,
        data=DataConfig(
            train="shards/train", validation=validation, image_size=released.image_size
        ),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        training=TrainingConfig(steps=1, batch_size=128, validate_every=int(released.validates)),
        **released.sections,
    )


def write_run(
    run_folder: Path,
    config: RunConfig,
    weights: Mapping[str, Tensor],
    *,
    palette: Palette | None = None,
    tokenizer: str | None = None,
) -> None:
    """Write a new run folder with a checkpoint of step 0.

    Args:
        run_folder: the new folder.
        config: of the run.
        weights: unsharded parameters under megavis' names.
        palette: to keep with the run, if any.
        tokenizer: SHA-256 of the tokenizer that it was trained with; default: the palette's.
    """
    run_folder.mkdir(parents=True)
    (run_folder / "config.yaml").write_text(dump_config(config))
    if palette is not None:
        palette.save(run_folder / PALETTE_NAME)
    if tokenizer is None and palette is not None:
        tokenizer = palette.sha256
    write_weights(run_folder, weights, seed=config.seed, tokenizer=tokenizer)


def export(args: argparse.Namespace) -> int:
    """Export; the output appears only when it is complete and agrees with the run."""
    with quietly():
        opened = Run.open(args.run_folder, step=args.step, device="cpu")
    if args.to == "safetensors":
        weights = read_weights(step_folder(opened.folder, opened.step))
        with renamed_when_complete(args.out) as partial:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial)
        sys.stdout.write(f"{args.out}: {len(weights)} tensors\n")
        return 0
    write = {"huggingface": write_huggingface, "timm": write_timm}[args.to]
    with renamed_when_complete(args.out) as partial:
        exported = write(opened, partial)
    sys.stdout.write(f"{args.out}: opens with {exported.form}\n")
    if exported.difference is not None:
        sys.stdout.write(f"  differs from the run by {exported.difference:.1e} on random input\n")
    return 0


@contextlib.contextmanager
def renamed_when_complete(target: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is renamed to `target` after the block.

    It is removed after an error, and by the next call if the process was killed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    _remove(partial)
    try:
        yield partial
        os.rename(partial, target)
    except BaseException:
        _remove(partial)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
