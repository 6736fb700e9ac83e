"""Export a run as a folder for the Hub, in another library's format or in megavis' own.

Each folder has a model card, generated from the run folder.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megavis.checkpoint.format.folder import step_folder
from megavis.checkpoint.format.tensor_files import save_tensors
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.composition.model import Model
from megavis.config.errors import UserError
from megavis.config.load import exported_names
from megavis.config.schema import RunConfig
from megavis.data.format.manifest import PALETTE_NAME
from megavis.notebook import Run
from megavis.schedules.masked import Context
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN
from megavis.weights import plain_loader
from megavis.weights.card import CARD, model_card
from megavis.weights.forms import (
    WEIGHTS,
    PlainForm,
    as_vit,
    check_agreement,
    classifies,
    compared_vit,
    composition_of,
    timm_settings,
    write_run,
)
from megavis.weights.imagegpt import (
    fits_imagegpt,
    folder_logits,
    folder_settings,
    to_imagegpt,
    write_folder,
)
from megavis.weights.vit_mae import compared_vit_mae, fits_vit_mae, settings_of, to_vit_mae
from megavis.weights.vits import to_transformers, transformers_settings

SETTINGS = "config.json"
PROCESSOR = "preprocessor_config.json"
_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC


class Exported(NamedTuple):
    """What opens a written folder, and its difference from the run on random inputs, if known."""

    form: str
    difference: float | None


def write_huggingface(run: Run, folder: Path) -> Exported:
    """Write a folder for ImageGPT, ViTMAE or ViT, or one for megavis if none of them fits.

    Raises UserError if the exported network does not match the run.
    """
    weights = read_weights(step_folder(run.folder, run.step))
    if run.config.finetune is None and _passes(fits_imagegpt, run):
        return _write_imagegpt(run, weights, folder)
    if _passes(fits_vit_mae, run):
        return _write_vit_mae(run, weights, folder)
    try:
        vit = as_vit(run, weights)
    except UserError as error:
        return _write_own(run, weights, folder, why=str(error))
    difference = check_agreement(*compared_vit(run, vit))
    settings = transformers_settings(vit)
    _write(folder, settings, to_transformers(vit), _image_processor(run))
    class_name, options = settings["architectures"][0], ""
    if not vit.num_classes:
        options = ", add_pooling_layer=False"
    use = _VIT_USE.format(name=class_name, options=options)
    limits = _sees_more(run)
    _write_card(run, weights, folder, library="transformers", use=use, limits=limits)
    return Exported(f"transformers' {class_name}", difference)


def write_timm(run: Run, folder: Path) -> Exported:
    """Write a folder for timm's Vision Transformer.

    Raises UserError if the run is not a plain ViT, or the exported network does not match it.
    """
    weights = read_weights(step_folder(run.folder, run.step))
    try:
        vit = as_vit(run, weights)
        settings = timm_settings(vit)
    except UserError as error:
        raise UserError(f"--to timm: {error}") from None
    difference = check_agreement(*compared_vit(run, vit))
    _write(folder, settings, dict(vit.tensors), None)
    _write_card(run, weights, folder, library="timm", use=_TIMM_USE, limits=_sees_more(run))
    return Exported("timm's VisionTransformer", difference)


def _passes(check: Callable[[RunConfig], object], run: Run) -> bool:
    try:
        check(run.config)
    except UserError:
        return False
    return True


def _write_imagegpt(run: Run, weights: Mapping[str, Tensor], folder: Path) -> Exported:
    model, colors = run.config.model, fits_imagegpt(run.config)
    pixels = run.objective.backbone.num_tokens
    settings = folder_settings(model, num_colors=colors, num_pixels=pixels)
    tensors = to_imagegpt(weights, num_heads=model.num_attention_heads)
    ids = torch.randint(colors, (2, pixels), generator=torch.Generator().manual_seed(0))
    difference = check_agreement(run.outputs(ids), folder_logits(tensors, settings, ids))
    has_palette = (run.folder / PALETTE_NAME).exists()
    write_folder(folder, settings, tensors, palette=run.palette if has_palette else None)
    _write_card(run, weights, folder, library="transformers", use=_IMAGEGPT_USE)
    return Exported("transformers' ImageGPTForCausalImageModeling", difference)


def _write_vit_mae(run: Run, weights: Mapping[str, Tensor], folder: Path) -> Exported:
    settings = settings_of(run.config)
    tensors = to_vit_mae(weights, settings, position_scale=run.config.model.position_scale)
    difference = check_agreement(*compared_vit_mae(run, tensors, settings))
    _write(folder, settings, tensors, _image_processor(run))
    use = _VIT_USE.format(name="ViTMAEForPreTraining", options="")
    _write_card(run, weights, folder, library="transformers", use=use)
    return Exported("transformers' ViTMAEForPreTraining", difference)


def _write_own(run: Run, weights: Mapping[str, Tensor], folder: Path, *, why: str) -> Exported:
    limits = [f"`transformers` has no class for it: {why}."]
    settings: dict[str, Any] = {"model_type": "megavis", "paper": run.config.objective.name}
    form: PlainForm | None = None
    try:
        form = PlainForm(run)
    except UserError as error:
        limits.append(f"Only `megavis.load` opens it: {error}.")
    limits += [f"Its tokenizer is in `{name}`." for name in exported_names(run.config).values()]
    use, difference = _OWN_USE, None
    folder.mkdir(parents=True)
    if form is not None:
        settings["plain"] = form.settings
        use += f"\n# Or, without megavis, features of tokens:\n{_loader()}"
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    write_run(folder, run, weights, {} if form is None else form.tensors)
    if form is not None:
        difference = form.check(folder)
    _write_card(run, weights, folder, library="megavis", use=use, limits=tuple(limits))
    return Exported("megavis.load", difference)


def _loader() -> str:
    """Return the loader's source without its module docstring."""
    return inspect.getsource(plain_loader).split('"""\n', 1)[1].strip()


def _sees_more(run: Run) -> tuple[str, ...]:
    """Return a limitation if the run was pretrained with another visibility than the export."""
    paper = composition_of(run)
    if run.config.finetune is not None:
        return ()
    if paper.core.visibility_kind in ("causal", "two_stream"):
        return (
            "In pretraining each token attended only to earlier tokens; this network uses full"
            " attention, as in fine-tuning.",
        )
    if paper.core.visibility_kind == "context":
        return _sees_more_than_context(paper)
    return ()


def _sees_more_than_context(paper: Model) -> tuple[str, ...]:
    schedule = paper.schedule
    assert isinstance(schedule, Context)
    total, sentences = schedule.num_positions, []
    if (seen := schedule.num_context(schedule.mask_ratio)) < total:
        sentences.append(
            f"In pretraining each patch attended only to {seen} of the {total} patches, drawn for"
            " each image; this network uses full attention, as in fine-tuning."
        )
    if schedule.num_placed:
        sentences.append(
            f"In pretraining only {schedule.num_placed} of the {total} patches had a position; here"
            " all have one."
        )
    return tuple(sentences)


def _write(
    folder: Path,
    settings: Mapping[str, Any],
    tensors: dict[str, Tensor],
    processor: Mapping[str, Any] | None,
) -> None:
    folder.mkdir(parents=True)
    save_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    if processor is not None:
        (folder / PROCESSOR).write_text(json.dumps(processor, indent=2) + "\n")


def _image_processor(run: Run) -> dict[str, Any]:
    size = run.config.data.image_size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": _BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(CHANNEL_MEAN),
        "image_std": list(CHANNEL_DEVIATION),
    }


def _write_card(
    run: Run,
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    library: str,
    use: str,
    limits: tuple[str, ...] = (),
) -> None:
    config = run.config
    makes_images = config.finetune is None and config.objective.cannot_generate(config) is None
    task = "unconditional-image-generation" if makes_images else "image-feature-extraction"
    if classifies(run):
        task = "image-classification"
    if library == "transformers" and (folder / PROCESSOR).exists():
        limits = (*limits, _SQUASHES)
    text = model_card(run, weights, library=library, task=task, use=use, limits=limits)
    (folder / CARD).write_text(text, encoding="utf-8")


_SQUASHES = (
    "The image processor of this folder resizes an image to a square without keeping its"
    " proportions, where megavis resizes the shorter side and keeps the centre: for a photograph"
    " that is not square the model sees other pixels. Crop it to a square first."
)

_VIT_USE = """
from PIL import Image
from transformers import AutoImageProcessor, {name}

processor = AutoImageProcessor.from_pretrained("DIR")
model = {name}.from_pretrained("DIR"{options}).eval()
outputs = model(**processor(Image.open("photograph.png"), return_tensors="pt"))
"""
_IMAGEGPT_USE = """
from transformers import ImageGPTForCausalImageModeling

model = ImageGPTForCausalImageModeling.from_pretrained("DIR").eval()
# The start token is config.vocab_size - 1; it comes before the first pixel.
"""
_TIMM_USE = """
import timm

model = timm.create_model("local-dir:DIR", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
"""
_OWN_USE = """
import megavis

run = megavis.load("DIR")  # run.features, run.outputs, run.sample
"""
