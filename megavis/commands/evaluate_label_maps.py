"""`megavis evaluate panoptic` and `evaluate depth`: compare predicted label maps with the truth.

A VAE of label maps reconstructs them; an encoder-decoder predicts them from images. Predictions are
resized to the size of the originals by nearest neighbors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megavis.commands.opening import job_closed, open_held_out, open_run
from megavis.commands.options.shared import chosen_options, refuse_options, spelled
from megavis.config.errors import UserError
from megavis.data.codecs.jpeg import decode_png, split
from megavis.data.codecs.label_maps import TargetKind, nearest
from megavis.data.format.files import write_json
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import evaluation_batches
from megavis.evaluation.images.depth_errors import DepthErrors
from megavis.evaluation.images.panoptic_quality import PanopticQuality
from megavis.notebook import Run


def evaluate_panoptic(args: argparse.Namespace) -> int:
    """Print and write the panoptic quality."""

    def score(pairs: Iterator[tuple[np.ndarray, np.ndarray]], dataset: ShardDataset) -> Any:
        target = dataset.manifest.target
        assert target is not None
        quality = PanopticQuality(len(target.class_names))
        for truth, predicted in pairs:
            quality.add(truth, predicted)
        things = [number for number, is_thing in enumerate(target.things, start=1) if is_thing]
        stuff = [number for number, is_thing in enumerate(target.things, start=1) if not is_thing]
        parts = {"all": None, "things": things, "stuff": stuff}
        return {name: quality.quality(part).record() for name, part in parts.items()}

    return _evaluate(args, "panoptic", score, name="panoptic")


def evaluate_depth(args: argparse.Namespace) -> int:
    """Print and write depth errors."""

    def score(pairs: Iterator[tuple[np.ndarray, np.ndarray]], dataset: ShardDataset) -> Any:
        errors = DepthErrors()
        for truth, predicted in pairs:
            errors.add(truth, predicted)
        return {"all": errors.record()}

    # `megavis figure depth` writes depth.json.
    return _evaluate(args, "depth", score, name="depth_errors")


def _evaluate(args: argparse.Namespace, kind: TargetKind, score: Any, *, name: str) -> int:
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        dataset = open_held_out(opened, args.images, option="--images")
        target = dataset.manifest.target
        if target is None or target.kind != kind:
            raise UserError(f"{dataset.directory} holds no {kind} maps")
        count = min(args.num_images or len(dataset), len(dataset))
        scores = score(_pairs(opened, dataset, count, args), dataset)
        options = {"seed": args.seed, **chosen_options(args)}
    result = {"step": opened.step, "images": count, "of": str(dataset.directory), **options}
    for part, values in scores.items():
        words = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
        sys.stdout.write(f"{part}: {words}\n")
    sys.stdout.write(f"N {count} of {dataset.directory}, step {opened.step}\n")
    path: Path = args.run_folder / "evaluation" / f"{name}.json"
    write_json(path, {**result, **scores})
    sys.stdout.write(f"{path}\n")
    return 0


def _pairs(
    opened: Run, dataset: ShardDataset, count: int, args: argparse.Namespace
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield original maps and predictions of the same size, uint8 `[h, w, 3]` each."""
    predict = _reconstruct if opened.objective.reconstructs else _predict
    for batch in evaluation_batches(dataset, batch_size=args.batch_size, limit=count):
        maps = predict(opened, batch.inputs.to(opened.context.device), batch.sample_index, args)
        for index, predicted in zip(batch.sample_index.tolist(), maps.cpu().numpy(), strict=True):
            truth = decode_png(split(dataset.payload(index))[1])
            height, width = truth.shape[:2]
            yield truth, nearest(predicted, height=height, width=width)


def _reconstruct(opened: Run, inputs: Tensor, index: Tensor, args: argparse.Namespace) -> Tensor:
    others = [spelled(option) for option in chosen_options(args)]
    refuse_options(args, others, "to this run, which reconstructs label maps")
    predictions = opened.runner.predictions(opened.objective.inputs_from(inputs))
    return opened.objective.reconstructed_maps(predictions)


def _predict(opened: Run, inputs: Tensor, index: Tensor, args: argparse.Namespace) -> Tensor:
    """Sample maps for images; seed and image determine the draws."""
    sampler = opened.sampler(seed=args.seed, spell=spelled, **chosen_options(args))
    conditions = sampler.paper.condition.from_samples(inputs)
    if "image" not in conditions:
        raise UserError("this run predicts no label maps from images")
    with torch.no_grad():
        tokens = sampler.tokens(index.to(sampler.device), conditions=conditions)
    return sampler.to_images(sampler.from_order(tokens, sampler.order_of(index.to(sampler.device))))
