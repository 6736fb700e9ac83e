"""`megavis evaluate`, except `watch`: compare generated or predicted images with real ones.

`samples`, `statistics`, `classes`, `reconstruction`, and `panoptic` and `depth` for label maps: a
VAE of label maps reconstructs them, an encoder-decoder predicts them from images. Predicted maps
are resized to the size of the originals by nearest neighbors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megavis.commands.opening import first_images, job_closed, open_run, open_unseen
from megavis.commands.options.shared import (
    chosen_options,
    refuse_options,
    result_place,
    spelled,
)
from megavis.config.errors import UserError
from megavis.config.load import exported_names, load_run_config
from megavis.config.places import check_file
from megavis.data.codecs.jpeg import decode_png, split
from megavis.data.codecs.label_maps import TargetKind, nearest
from megavis.data.format.files import write_atomically
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.labels import check_numbering
from megavis.data.loading.leakage import check_no_overlap, find_shards
from megavis.data.loading.loader import evaluation_batches
from megavis.evaluation.classes import class_accuracies, fit_classifier
from megavis.evaluation.images.feature_networks import FeatureNetwork, open_network
from megavis.evaluation.images.generation import (
    MANIFOLD_COUNT,
    FeatureCollector,
    FeatureSummary,
    compare,
    read_statistics,
    write_statistics,
)
from megavis.evaluation.images.image_files import (
    FolderImages,
    Images,
    NpzImages,
    ShardImages,
    holds_array,
    image_batches,
    open_images,
)
from megavis.evaluation.images.pair_metrics import (
    DepthErrors,
    Distances,
    PairScores,
    PanopticQuality,
    reconstructions,
)
from megavis.evaluation.images.results import (
    ClassesResult,
    DepthResult,
    PanopticResult,
    ReconstructionResult,
    SamplingOptions,
)
from megavis.grammar.paper import PaperConfig
from megavis.grammar.words import Labels
from megavis.model.autoencoder_losses import open_perceptual
from megavis.notebook import Run
from megavis.parallel.device import choose_device, set_arithmetic
from megavis.parallel.progress_bar import shown
from megavis.reports.published import STAGES, dense_table, markdown_of, reconstruction_of
from megavis.tokenizers.network_tokenizer import LatentTokenizer, open_tokenizer

_BATCH_SIZE = 64


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the selected device, or the machine's best, with exact float32."""
    set_arithmetic(tf32=False, deterministic=False)
    # Without an index: in a job, this process's GPU.
    return torch.device(choose_device(args.device, local_rank=0).type)


def collect_features(
    images: Images,
    network: FeatureNetwork,
    args: argparse.Namespace,
    *,
    num_images: int | None = None,
    num_kept: int,
) -> FeatureSummary:
    """Compute features of `num_images` evenly spread images, by default all of them.

    At most `num_kept` feature vectors are kept.
    """
    count = min(num_images or len(images), len(images))
    # ADM's evaluator reads arrays in order; the order of files in a folder means nothing.
    in_order = isinstance(images, NpzImages)
    collector = FeatureCollector(network, num_images=count, num_kept=num_kept, in_order=in_order)
    batches = image_batches(images, num_images=count, batch_size=args.batch_size)
    for batch in shown(batches, images.path.name, total=count, size=len):
        collector.add(batch)
    return collector.summary(source=str(images.path), sha256=images.sha256)


def say(line: str, caution: str | None) -> None:
    """Print a line of results, and a caution to standard error."""
    sys.stdout.write(line + "\n")
    if caution is not None:
        sys.stderr.write(f"note: {caution}\n")


def evaluate_samples(args: argparse.Namespace) -> int:
    """Compare generated with real images."""
    device = device_of(args)
    file = samples_of(args.samples)
    out = place_of(args, file)
    images = open_images(file, image_size=args.image_size if file.is_dir() else None)
    network = open_network(args.inception, args.network, device)
    reference = _reference(args, network)
    samples = collect_features(
        images, network, args, num_images=args.num_images, num_kept=MANIFOLD_COUNT
    )
    result = compare(samples, reference, device=device)
    say(result.line, result.caution)
    if isinstance(images, FolderImages) and images.num_jpeg:
        sys.stderr.write(
            f"note: {images.num_jpeg} of {len(images)} samples are JPEG files, whose losses count"
            " as differences: save generated images as PNG or .npz\n"
        )
    result.write(out)
    sys.stdout.write(f"{out}\n")
    return 0


def write_reference(args: argparse.Namespace) -> int:
    """Compute and write the statistics of real images."""
    if args.out.suffix != ".npz":
        raise UserError(f"--out {args.out}: the name of a statistics file must end in .npz")
    images = open_images(args.images, image_size=args.image_size)
    network = open_network(args.inception, args.network, device_of(args))
    summary = collect_features(
        images, network, args, num_images=args.num_images, num_kept=args.features
    )
    write_statistics(args.out, summary)
    sys.stdout.write(
        f"{args.out}: N {summary.num_images} of {summary.source} {summary.sha256[:8]}, network"
        f" {network.about}, resize {network.about.resize}\n"
    )
    return 0


def samples_of(path: Path) -> Path:
    """Return the sample file; for a run folder, its newest `.npz` of samples."""
    if not (path / "config.yaml").exists():
        return path
    files = sorted(path.glob("samples/*.npz"), key=lambda file: file.stat().st_mtime)
    if not files and load_run_config(path).finetune is not None:
        raise UserError(
            f"{path} has no samples, since it is fine-tuned; `megavis ensemble {path} --images"
            " FOLDER` measures the accuracy of a run that classifies"
        )
    if not files:
        raise UserError(
            f"{path} has no samples; generate some: megavis sample {path} --num-images 50000 --npz"
            f" {path / 'samples' / 'images.npz'}"
        )
    return files[-1]


def place_of(args: argparse.Namespace, file: Path) -> Path:
    """Return where the results on the samples `file` go: in its run, or next to it if it has none.

    Raises:
        UserError: nothing can be written there.
    """
    if args.out is not None or args.samples != file:
        out = result_place(args)
    else:
        kind = {"samples.json": "evaluation.json"}.get(args.result_name, args.result_name)
        out = file.with_name(f"{file.name}.{kind}")
    check_file(out)
    return out


def _reference(args: argparse.Namespace, network: FeatureNetwork) -> FeatureSummary:
    """Read statistics, or compute them from images; both if an ADM file holds both."""
    path: Path = args.reference
    if not holds_array(path, "mu"):
        size = args.image_size if path.is_dir() else None
        return collect_features(
            open_images(path, image_size=size), network, args, num_kept=MANIFOLD_COUNT
        )
    statistics = read_statistics(path)
    if statistics.features is not None or not holds_array(path, "arr_0"):
        return statistics
    seen = collect_features(NpzImages(path), network, args, num_kept=MANIFOLD_COUNT)
    return replace(statistics, features=seen.features)


def evaluate_classes(args: argparse.Namespace) -> int:
    """Fit a classifier on real images, and classify samples and reconstructions."""
    device, file = device_of(args), samples_of(args.samples)
    out = place_of(args, file)
    samples, train, real = NpzImages(file), ShardImages(args.train), ShardImages(args.images)
    names = _common_classes(train, real)
    _check_generated_classes(args.samples, names, args.train)
    check_no_overlap(find_shards(str(args.images)), [find_shards(str(args.train))])
    images, labels = _labelled(train, device)
    classifier = fit_classifier(
        images, labels, num_classes=len(names), epochs=args.epochs, seed=args.seed
    )
    parts = {
        part: class_accuracies(classifier, images, labels, names)
        for part, (images, labels) in _to_classify(args, real, samples, len(names), device).items()
    }
    words = (f"{100 * p.overall:.1f} % of {p.images} {part}" for part, p in parts.items())
    sys.stdout.write(f"classified correctly: {', '.join(words)}\n")
    ClassesResult(
        real_images=parts["real images"],
        reconstructions=parts.get("reconstructions"),
        samples=parts["samples"],
        train=str(args.train),
        real=str(args.images),
        drawn=str(file),
        epochs=args.epochs,
        seed=args.seed,
    ).write(out)
    sys.stdout.write(f"{out}\n")
    return 0


def _check_generated_classes(run: Path, names: Sequence[str], train: Path) -> None:
    """Raise UserError if the images of a run are not of these classes in turn."""
    if not (run / "config.yaml").exists():
        return
    config = load_run_config(run)
    assert isinstance(config.objective, PaperConfig), "others generate no samples"
    condition = config.objective.grammar(config).condition
    if not isinstance(condition, Labels):
        raise UserError(f"{run} generates images without a class, so none can be right")
    if condition.num_classes != len(names):
        raise UserError(
            f"{run} generates images of {condition.num_classes} classes in turn, and {train} has"
            f" {len(names)}: name shards of the same classes with --train and --images"
        )


def _common_classes(train: ShardImages, real: ShardImages) -> tuple[str, ...]:
    """Return the class names, which both shards must share."""
    place = str(train.path)
    check_numbering(real.path, real.class_names, train.class_names, source=place, folder=place)
    for shards in (train, real):
        if not len(shards) or min(shards.labels) < 0:
            raise UserError(f"{shards.path} holds images without a label")
    return train.class_names


def _to_classify(
    args: argparse.Namespace,
    real: ShardImages,
    samples: NpzImages,
    num_classes: int,
    device: torch.device,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return images and their classes by kind; samples cycle through the classes."""
    images, labels = _labelled(real, device)
    parts = {"real images": (images, labels)}
    if args.tokenizer is not None:
        parts["reconstructions"] = (_reconstruct(args.tokenizer, images), labels)
    cycled = torch.arange(len(samples), device=device) % num_classes
    parts["samples"] = (_read(samples, device), cycled)
    return parts


def _labelled(shards: ShardImages, device: torch.device) -> tuple[Tensor, Tensor]:
    return _read(shards, device), torch.from_numpy(shards.labels).long().to(device)


def _read(images: Images, device: torch.device) -> Tensor:
    return torch.from_numpy(images.read(np.arange(len(images)))).to(device)


def _reconstruct(run_folder: Path, images: Tensor) -> Tensor:
    tokenizer = open_tokenizer(run_folder, device=images.device)
    parts = []
    for batch in images.split(_BATCH_SIZE):
        tokens = tokenizer.encode(batch)
        parts.append(
            tokenizer.decode(tokens[:, 0] if isinstance(tokenizer, LatentTokenizer) else tokens)
        )
    return torch.cat(parts)


def evaluate_reconstruction(args: argparse.Namespace) -> int:
    """Reconstruct held-out images and compare."""
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        if not opened.objective.reconstructs:
            raise UserError(f"{opened.config.objective.name} does not reconstruct images")
        dataset = open_unseen(opened, args.images, option="--images")
        count = min(args.num_images, len(dataset))
        images = first_images(opened, dataset, count)
        scores = PairScores(open_perceptual(args.perceptual_weights, args.lpips_weights))
        distances = None
        if args.inception is not None or args.network is not None:
            network = open_network(args.inception, args.network, opened.context.device)
            distances = Distances(network, num_images=count)
        for pair in reconstructions(opened.inference, opened.objective, images, num_images=count):
            scores.add(*pair)
            if distances is not None:
                distances.add(*pair)
    compared = None
    means = scores.means()
    words = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
    if scores.num_identical:
        words += f", {scores.num_identical} identical, which the PSNR leaves out"
    sys.stdout.write(f"{words} | N {count} of {dataset.directory}, step {opened.step}\n")
    if distances is not None:
        compared = distances.result(run=args.run_folder, originals=dataset.directory)
        say(compared.line, compared.caution)
    path = result_place(args)
    ReconstructionResult(
        step=opened.step,
        images=count,
        identical=scores.num_identical or None,
        of=str(dataset.directory),
        **means,
        distance=compared,
    ).write(path)
    sys.stdout.write(f"{path}\n")
    return 0


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
        parts = {"overall": None, "things": things, "stuff": stuff}
        return {name: quality.quality(part) for name, part in parts.items()}

    return _evaluate_maps(args, "panoptic", score, PanopticResult)


def evaluate_depth(args: argparse.Namespace) -> int:
    """Print and write depth errors."""

    def score(pairs: Iterator[tuple[np.ndarray, np.ndarray]], dataset: ShardDataset) -> Any:
        errors = DepthErrors()
        for truth, predicted in pairs:
            errors.add(truth, predicted)
        return {"overall": errors.scores()}

    return _evaluate_maps(args, "depth", score, DepthResult)


def _evaluate_maps(
    args: argparse.Namespace,
    kind: TargetKind,
    score: Any,
    form: type[PanopticResult] | type[DepthResult],
) -> int:
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        dataset = open_unseen(opened, args.images, option="--images")
        target = dataset.manifest.target
        if target is None or target.kind != kind:
            raise UserError(f"{dataset.directory} holds no {kind} maps")
        count = min(args.num_images or len(dataset), len(dataset))
        scores = score(_pairs(opened, dataset, count, args), dataset)
        stage = STAGES[0] if opened.objective.reconstructs else STAGES[1]
    options = SamplingOptions(**chosen_options(args))
    result = form(opened.step, count, str(dataset.directory), args.seed, options, **scores)
    for part, values in result.record().items():
        if isinstance(values, dict):
            words = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
            sys.stdout.write(f"{part}: {words}\n")
    sys.stdout.write(f"N {count} of {dataset.directory}, step {opened.step}\n")
    path = result_place(args)
    result.write(path)
    sys.stdout.write(f"{path}\n")
    _write_table(path, opened, result, stage=stage, name=args.result_name)
    return 0


def _write_table(
    path: Path, opened: Run, result: PanopticResult | DepthResult, *, stage: str, name: str
) -> None:
    """Write a run's errors into its paper's table, next to `path`, if the paper has one.

    `stage` is what has made the maps; `name` is the file name of such results in run folders.
    """
    if (table := dense_table(opened.config.objective.name)) is None:
        return
    # None for a tokenizer's own run, which reconstructs maps.
    values = {f"{result.metric}, {stage}": result.value}
    for tokenizer in exported_names(opened.config):
        if (found := reconstruction_of(Path(tokenizer), name, result)) is not None:
            values[f"{result.metric}, {STAGES[0]}"] = found.value
    images = f"{result.images} images of {result.of}"
    text = markdown_of(table, opened.folder.name, values, images=images)
    written = path.with_name("dense_prediction.md")
    write_atomically(written, text.encode())
    sys.stdout.write(f"{written}\n")


def _pairs(
    opened: Run, dataset: ShardDataset, count: int, args: argparse.Namespace
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield original maps and predictions of the same size, uint8 `[h, w, 3]` each."""
    predict = _reconstructed_maps if opened.objective.reconstructs else _predicted_maps
    for batch in evaluation_batches(dataset, batch_size=args.batch_size, limit=count):
        maps = predict(opened, batch.inputs.to(opened.context.device), batch.sample_index, args)
        for index, predicted in zip(batch.sample_index.tolist(), maps.cpu().numpy(), strict=True):
            truth = decode_png(split(dataset.payload(index))[1])
            height, width = truth.shape[:2]
            yield truth, nearest(predicted, height=height, width=width)


def _reconstructed_maps(
    opened: Run, inputs: Tensor, index: Tensor, args: argparse.Namespace
) -> Tensor:
    others = [spelled(option) for option in chosen_options(args)]
    refuse_options(args, others, "to this run, which reconstructs label maps")
    predictions = opened.inference.predictions(opened.objective.inputs_from(inputs))
    return opened.objective.reconstructed_maps(predictions)


def _predicted_maps(opened: Run, inputs: Tensor, index: Tensor, args: argparse.Namespace) -> Tensor:
    """Sample maps for images; seed and image determine the draws."""
    sampler = opened.sampler(seed=args.seed, spell=spelled, **chosen_options(args))
    conditions = sampler.model.condition.from_samples(inputs)
    if "image" not in conditions:
        raise UserError("this run predicts no label maps from images")
    with torch.no_grad():
        tokens = sampler.tokens(index.to(sampler.device), conditions=conditions)
    return sampler.to_images(sampler.from_order(tokens, sampler.order_of(index.to(sampler.device))))
