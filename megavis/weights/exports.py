"""Export a run as a folder for the Hub, in another library's format or in megavis' own.

A run is exported as a ViT of `timm` or `transformers` if its model is one: it reads patches,
prepends one learned token, adds positions and has a ViT's blocks. Backbones pretrained with another
visibility use full attention here, as with `finetune.visibility: full`. Each folder has a model
card, generated from the run folder.

Legend: n patches, h hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megavis.checkpoint.format.folder import step_folder
from megavis.checkpoint.format.tensor_files import save_tensors
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.composition.model import Model
from megavis.composition.reader import Reader
from megavis.composition.tokens import Patches
from megavis.config.errors import UserError
from megavis.config.load import exported_names
from megavis.config.schema import FinetuneConfig, ModelConfig
from megavis.data.format.manifest import PALETTE_NAME
from megavis.grammar import words
from megavis.notebook import Run
from megavis.papers.igpt.config import IGPTConfig
from megavis.papers.mae.config import MAEConfig
from megavis.schedules.masked import Context
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN
from megavis.weights.card import CARD, model_card
from megavis.weights.imagegpt import (
    CENTERS,
    PROCESSOR,
    imagegpt_settings,
    imagegpt_table,
    zero_biases,
)
from megavis.weights.own_folder import (
    PlainForm,
    composition_of,
    loader_source,
    norm_name,
    write_run_folder,
)
from megavis.weights.released import SETTINGS, WEIGHTS
from megavis.weights.tables import Table, count, ours_of, write_table
from megavis.weights.timm_folder import timm_settings
from megavis.weights.vit_mae import sines, vit_mae_settings, vit_mae_table
from megavis.weights.vits import (
    TIMM,
    TRANSFORMERS,
    ViTNames,
    transformers_settings,
    vit_sizes,
    vit_table,
)

_TASKS = {
    "classes": "image-classification",
    "segments": "image-segmentation",
    "instances": "object-detection",
}
"""The Hub's name for each `finetune.task`."""
_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC
_CONTENT = "embedding.content"


class Exported(NamedTuple):
    """How to open a folder, the largest error of its card's loader, if tried, and a note."""

    form: str
    difference: float | None = None
    note: str = ""


def write_huggingface(run: Run, folder: Path) -> Exported:
    """Write a folder for ImageGPT, ViTMAE or ViT, or one for megavis if none of them fits."""
    weights, reasons = read_weights(step_folder(run.folder, run.step)), list[str]()
    for convert in (_imagegpt, _vit_mae, _transformers_vit):
        try:
            settings, tensors = convert(run, weights)
        except UserError as error:
            reasons.append(str(error))
            continue
        name, kind = settings["architectures"][0], settings["model_type"]
        processor = _palette_processor(run) if kind == "imagegpt" else _image_processor(run)
        options = ", add_pooling_layer=False" if name == "ViTModel" else ""
        use = _IMAGEGPT_USE if kind == "imagegpt" else _VIT_USE.format(name=name, options=options)
        limits = _sees_more(run) if kind == "vit" else ()
        _write_files(folder, settings, tensors, processor)
        if kind == "imagegpt" and processor is not None:
            run.palette.save(folder / CENTERS)
        if processor is not None:
            limits = (*limits, _SQUASHES)
        _write_card(run, weights, folder, library="transformers", use=use, limits=limits)
        return Exported(f"transformers' {name}")
    return _write_own(run, weights, folder, why=_why(run, *reasons))


def _why(run: Run, no_imagegpt: str, no_vit_mae: str, no_vit: str) -> str:
    """Return why no class of transformers fits a run, from the reasons of each."""
    paper, backbone = run.config.objective, run.objective.backbone
    if isinstance(paper, IGPTConfig):
        return no_imagegpt
    if isinstance(paper, MAEConfig) and run.config.finetune is None:
        return no_vit_mae
    if isinstance(backbone, Model) and not isinstance(backbone.reads, Patches):
        return "its ViTs read patches of pixels, its ImageGPT is a run of igpt; this run is neither"
    return no_vit


def write_timm(run: Run, folder: Path) -> Exported:
    """Write a folder for timm's Vision Transformer.

    Raises UserError if the run is not a plain ViT.
    """
    weights = read_weights(step_folder(run.folder, run.step))
    try:
        vit = as_vit(run, weights)
        read_out = run.config.finetune.read_out if run.config.finetune else "first"
        settings = timm_settings(_sizes(run, vit), _classes(run, vit), read_out=read_out)
    except UserError as error:
        raise UserError(f"--to timm: {error}") from None
    _write_files(folder, settings, write_table(_vit_rows(run, vit, TIMM), vit), None)
    _write_card(run, weights, folder, library="timm", use=_TIMM_USE, limits=_sees_more(run))
    return Exported("timm's VisionTransformer")


Converted = tuple[dict[str, Any], dict[str, Tensor]]
"""`config.json` and the tensors of a folder of transformers."""


def _imagegpt(run: Run, weights: Mapping[str, Tensor]) -> Converted:
    model, settings = run.config.model, imagegpt_settings(run.config)
    table = imagegpt_table(model.num_layers, model.num_attention_heads)
    return settings, _written(table, {**zero_biases(weights), **weights}, settings)


def _vit_mae(run: Run, weights: Mapping[str, Tensor]) -> Converted:
    settings = vit_mae_settings(run.config)
    positions = sines(settings, run.config.model.position_scale)
    return settings, _written(vit_mae_table(settings), {**positions, **weights}, settings)


def _written(
    table: Table, weights: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Apply a table; raise UserError if it has no row for one of the run's tensors."""
    left = sorted(weights.keys() - ours_of(table))
    if left:
        raise UserError(f"{settings['architectures'][0]} has no place for {left[0]}")
    return write_table(table, weights)


def _transformers_vit(run: Run, weights: Mapping[str, Tensor]) -> Converted:
    vit = as_vit(run, weights)
    tuned = run.config.finetune
    if tuned is not None and tuned.read_out != "first":
        raise UserError(
            "ViTForImageClassification reads classes from the class token; finetune.read_out is"
            f" {tuned.read_out}"
        )
    classes = _classes(run, vit)
    settings = transformers_settings(_sizes(run, vit), classes)
    return settings, write_table(_vit_rows(run, vit, TRANSFORMERS, "vit." * bool(classes)), vit)


def _vit_rows(run: Run, vit: Mapping[str, Tensor], names: ViTNames, prefix: str = "") -> Table:
    return vit_table(
        names,
        prefix=prefix,
        num_layers=count(vit, "blocks."),
        num_heads=run.config.model.num_attention_heads,
        patch_size=_patch_size(run),
        classifies=bool(_classes(run, vit)),
    )


def _sizes(run: Run, vit: Mapping[str, Tensor]) -> dict[str, Any]:
    return vit_sizes(run.config, num_layers=count(vit, "blocks."), patch_size=_patch_size(run))


def _patch_size(run: Run) -> int:
    reads = composition_of(run).grammar.reads
    assert isinstance(reads, words.Patches), "other tokens have been refused"
    return reads.patch_size


def _classes(run: Run, vit: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the classes; empty if there is no classifier."""
    num_classes = len(vit.get("head.classifier.linear.bias", ()))
    if not num_classes:
        return ()
    return run.classes or tuple(f"class {number}" for number in range(num_classes))


def _write_own(run: Run, weights: Mapping[str, Tensor], folder: Path, *, why: str) -> Exported:
    note = f"transformers has no class for it: {why}"
    limits = [f"{note}."]
    settings: dict[str, Any] = {"model_type": "megavis", "paper": run.config.objective.name}
    form: PlainForm | None = None
    try:
        form = PlainForm(run)
    except UserError as error:
        limits.append(f"Only `megavis.load` opens it: {error}.")
    limits += [f"Its tokenizer is in `{name}`." for name in exported_names(run.config).values()]
    backbone = run.objective.backbone
    if isinstance(backbone, Model) and isinstance(backbone.reads, Patches):
        limits.append(_PATCHES.format(p=backbone.reads.patch_size, d=backbone.reads.width))
    use, difference = _OWN_USE, None
    folder.mkdir(parents=True)
    if form is not None:
        settings["plain"] = form.settings
        use += f"\n# Or, without megavis, features of tokens:\n{loader_source()}"
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    write_run_folder(folder, run, weights, {} if form is None else form.tensors)
    if form is not None:
        difference = form.check(folder)
    _write_card(run, weights, folder, library="megavis", use=use, limits=tuple(limits))
    return Exported("megavis.load", difference, note)


def _sees_more(run: Run) -> tuple[str, ...]:
    """Return a limitation if the run was pretrained with another visibility than the export."""
    model = composition_of(run)
    if run.config.finetune is not None:
        return ()
    if model.core.visibility_kind in ("causal", "two_stream"):
        return (
            "In pretraining each token attended only to earlier tokens; this network uses full"
            " attention, as in fine-tuning.",
        )
    if model.core.visibility_kind == "context":
        return _sees_more_than_context(model)
    return ()


def _sees_more_than_context(model: Model) -> tuple[str, ...]:
    schedule = model.schedule
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


def _write_files(
    folder: Path,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    processor: Mapping[str, Any] | None,
) -> None:
    folder.mkdir(parents=True)
    save_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    if processor is not None:
        (folder / PROCESSOR).write_text(json.dumps(processor, indent=2) + "\n")


def _palette_processor(run: Run) -> dict[str, Any] | None:
    """Return the `preprocessor_config.json` of ImageGPT; None for a run without a palette."""
    if not (run.folder / PALETTE_NAME).exists():
        return None
    size = run.config.data.image_size
    return {
        "image_processor_type": "ImageGPTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": size, "width": size},
        "resample": _BICUBIC,
        "do_normalize": True,
        "do_color_quantize": True,
        "clusters": run.palette.centers.tolist(),
    }


def _image_processor(run: Run) -> dict[str, Any]:
    size = run.config.data.image_size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": True,
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
    if config.finetune is not None:
        task = _TASKS[config.finetune.task]
    text = model_card(run, weights, library=library, task=task, use=use, limits=limits)
    (folder / CARD).write_text(text, encoding="utf-8")


_WORDS = {"layer_norm": "normalization", "all": "norm_bias", "gelu": "activation"}
_ADDED = ("learned", "sincos", "learned_sincos", "none")


def as_vit(run: Run, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a run's tensors as a plain ViT's, by the names of `vit_table`.

    Raises UserError if it is not a plain ViT with a class token; names the config key.
    """
    model = _vit_of(run)
    reader = run.inference.layers.modules[0]
    assert isinstance(reader, Reader)
    norm = norm_name(run.inference)
    renamed = {"head.norm": norm, _CONTENT: _CONTENT}
    if run.config.finetune is not None:
        layer = "classifier.linear"
        renamed[f"head.{layer}"] = f"{norm.rpartition('.')[0]}.{layer}"
    vit = {
        "embedding.start": _first_token(reader).detach(),
        "embedding.positions.weight": _positions(model, reader),
        **{name: tensor for name, tensor in weights.items() if name.startswith("blocks.")},
    }
    for kind in ("weight", "bias"):
        vit |= {f"{ours}.{kind}": weights[f"{own}.{kind}"] for ours, own in renamed.items()}
    return vit


def _vit_of(run: Run) -> Model:
    """Return the model of a run; raise UserError if it is not a ViT."""
    model, sizes, tuned = composition_of(run), run.config.model, run.config.finetune
    if tuned is not None:
        _check_classifier(tuned, sizes)
    if not isinstance(model.reads, Patches):
        raise UserError("a ViT reads patches of pixels, which this run does not")
    if model.reads.embedding_norm:
        raise UserError("a ViT does not normalise embedded patches, which this run does")
    for wanted, key in _WORDS.items():
        if getattr(sizes, key) != wanted:
            raise UserError(f"a ViT has model.{key} {wanted}, not {getattr(sizes, key)}")
    if not (sizes.add_bias and sizes.has_biased_attention):
        raise UserError("a ViT has biases; model.add_bias or attention_bias is false")
    _check_norms(model)
    if model.grammar.positions not in _ADDED:
        raise UserError(f"a ViT adds its positions; model.positions is {model.grammar.positions}")
    if model.has_transform or "encoder" in model.condition.roles:
        raise UserError("a ViT has neither an adapter nor an encoder")
    sees_all = model.core.visibility_kind in ("full", "context")
    if tuned is not None and not sees_all:
        raise UserError("a ViT has full attention; finetune.visibility is not full")
    return model


def _check_classifier(tuned: FinetuneConfig, sizes: ModelConfig) -> None:
    """Raise UserError if a ViT's classifier reads other features than a fine-tuned run's."""
    if tuned.task != "classes":
        raise UserError(f"a ViT gives features or classes, and this run finds {tuned.task}")
    if tuned.read_out not in ("first", "mean"):
        raise UserError(
            "a ViT reads classes from the class token, or the mean of all tokens;"
            f" finetune.read_out is {tuned.read_out}"
        )
    if sizes.features != "norms" or tuned.layer not in (None, sizes.num_layers):
        raise UserError(
            "a ViT reads classes from the last norm; finetune.layer or model.features chooses"
            " other features"
        )
    if max(tuned.concatenate, tuned.average) > 1:
        raise UserError(
            "a ViT reads classes from one layer; finetune.concatenate or average joins several"
        )
    if tuned.linear_evaluation and tuned.standardize:
        raise UserError("a ViT does not standardise features; finetune.standardize is true")


def _check_norms(model: Model) -> None:
    """Raise UserError if a norm does not belong to a ViT."""
    if model.core.model.qk_norm:
        raise UserError("a ViT does not normalise queries and keys; model.qk_norm is true")
    if model.grammar.is_modulated:
        raise UserError("a ViT has no norms that a class modulates, which this run has")
    if model.grammar.asks.norm:
        raise UserError("a ViT does not normalise rows before its blocks, which this run does")


def _first_token(reader: Reader) -> Tensor:
    """Return the learned token before the patches, `[h]`; raise UserError if there is none."""
    parts = [part for role in ("start", "front") if (part := reader.part(role)) is not None]
    width = reader.core.model.hidden_size
    if len(parts) != 1 or not isinstance(parts[0], nn.Parameter) or parts[0].numel() != width:
        raise UserError("a ViT has one learned token before the patches; this run does not")
    return parts[0].view(-1)


@torch.no_grad()
def _positions(model: Model, reader: Reader) -> Tensor:
    """Return the position embedding of each patch, `[n, h]`."""
    count, width = model.reads.num_tokens, reader.core.model.hidden_size
    return reader.add_positions(
        torch.zeros(1, count, width), torch.arange(count)[None], "positions"
    )[0]


_PATCHES = (
    "Its tokens are patches of {p} × {p} pixels in raster order. A patch has {d} numbers in the"
    " order row, column, channel (red, green, blue): its pixels, standardised by ImageNet's mean"
    " and deviation."
)
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
image = Image.open("photograph.png").convert("RGB")
outputs = model(**processor(image, return_tensors="pt"))
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
