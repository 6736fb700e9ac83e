"""Open what a command evaluates: a run, images in its form, its networks and their features.

`megavis features` lists or deletes the cache of features.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megavis.checkpoint.format.folder import require_run_folder
from megavis.commands.options.shared import refuse_options
from megavis.commands.terminal import quietly
from megavis.composition.classification import classifier_of
from megavis.composition.finetuned import finetuned_of
from megavis.config.errors import UserError, counted
from megavis.config.section import ParallelConfig
from megavis.data.codecs.transforms import evaluation_transform
from megavis.data.loading.dataset import ShardDataset, Subset, representative
from megavis.data.loading.labels import check_count, check_labels, check_numbering
from megavis.data.loading.leakage import check_no_overlap, training_shards
from megavis.evaluation.features import (
    FOLDER,
    CachedFile,
    FeatureCache,
    cached_features,
    clear_features,
    identity_of_network,
)
from megavis.evaluation.networks import Network
from megavis.evaluation.probe import Pair, ProbeData, ProbeSettings, probe
from megavis.evaluation.results import ProbeResult
from megavis.model.inference import Inference
from megavis.model.kernel_compiler import require_compiled
from megavis.notebook import Run
from megavis.parallel.context import (
    ParallelContext,
    leave_context,
    num_contexts,
    open_context,
)
from megavis.parallel.device import DTYPES
from megavis.parallel.launch import read_launch


@contextlib.contextmanager
def job_closed() -> Iterator[None]:
    """Close the job that the block creates, for example by opening a run, also after an error."""
    before, has_failed = num_contexts(), True
    try:
        yield
        has_failed = False
    finally:
        for _ in range(num_contexts() - before):
            leave_context(has_failed=has_failed)


def open_run(
    folder: Path,
    *,
    step: int | None,
    device: str | None = None,
    precision: str = "float32",
    image_size: int | None = None,
) -> Run:
    """Open a run, silencing libraries."""
    with quietly():
        return Run.open(
            folder, step=step, device=device, dtype=DTYPES[precision], image_size=image_size
        )


def network_identity(opened: Run, *, seed: int | None = None) -> Mapping[str, Any]:
    """Return what identifies a run's network, or one like it with fresh weights of a seed."""
    config, checkpoint = opened.config, opened.checkpoint
    if seed is not None:
        config, checkpoint = config.model_copy(update={"seed": seed}), None
    tokenizer = opened.objective.backbone.tokenizer_identity
    return identity_of_network(config, checkpoint, dtype=opened.dtype, tokenizer=tokenizer)


def open_shards(opened: Run, folder: str, *, own_classes: bool = True) -> ShardDataset:
    """Open images for evaluation in the form that the run reads, which they must fit.

    If only the first of them are used, see `first_images`.

    Args:
        own_classes: their labels must be the classes of the run, numbered as in training; False if
            labels are used only with features.

    Raises:
        UserError: they do not fit.
    """
    data = opened.config.data
    # Use the run's own copy: the config's file may be gone.
    palette, transform = opened.palette if data.palette else None, evaluation_transform(data)
    try:
        dataset = ShardDataset(
            folder,
            transform,
            cache=data.cache,
            cache_limit=data.cache_limit,
            palette=palette,
        )
    except UserError as error:
        if error.remedy is None:
            raise
        # The remedy is a key of the run's config, which commands do not take.
        size = f"{data.image_size}x{data.image_size}"
        form = f"that it crops to {size} pixels, such as JPEG files"
        if transform.crop == "none":
            form = f"stored at {size} pixels"
        raise UserError(f"{error.fault}; this run reads images {form}") from None
    for complaint in opened.objective.check_data(dataset.manifest):
        raise UserError(f"{folder} {complaint}")
    if dataset.manifest.kind == "palette" and dataset.manifest.identity != opened.palette.sha256:
        raise UserError(f"{folder} was made with another palette than the run")
    if own_classes:
        _check_classes(opened, dataset)
    return dataset


def _check_classes(opened: Run, dataset: ShardDataset) -> None:
    """Check that labels are what the run reads or predicts; raise UserError if they are not."""
    objective, where = opened.objective, dataset.directory
    found, tuned = objective.classes_of(dataset.manifest), finetuned_of(objective)
    if objective.backbone.needs_labels or classifier_of(objective) is not None:
        check_labels(None, dataset)
    # Released weights may name their classes in other words than folders of images.
    is_foreign = opened.step == 0 and set(found).isdisjoint(opened.classes)
    if opened.classes and not is_foreign:
        source, folder = "the run's training set", "the shards that the run was trained on"
        check_numbering(
            where, found, opened.classes, source=source, folder=folder, may_lack_last=True
        )
    if tuned is not None:
        check_count(None, where, found, tuned.settings.num_classes)


def first_images(opened: Run, dataset: ShardDataset, count: int | None) -> ShardDataset | Subset:
    """Return a data set whose first `count` images can stand for it; says if they are drawn."""
    return representative(dataset, count, announces=opened.context.is_main)


def open_held_out(
    opened: Run, folder: str | None, *, option: str, own_classes: bool = True
) -> ShardDataset:
    """Open the shards named by an option, or else the run's `data.validation`."""
    folder = folder or opened.config.data.validation
    if folder is None:
        raise UserError(f"the run has no data.validation; name a shard folder with {option}")
    return open_shards(opened, folder, own_classes=own_classes)


def open_unseen(
    opened: Run, folder: str | None, *, option: str, own_classes: bool = True
) -> ShardDataset:
    """Open shards as `open_held_out`; raise UserError if the run was trained on their images."""
    dataset = open_held_out(opened, folder, option=option, own_classes=own_classes)
    check_no_overlap(dataset, list(training_shards(opened.config)))
    return dataset


def probe_data(opened: Run, args: argparse.Namespace) -> ProbeData:
    """Open the images named by the options."""
    train = args.train or opened.config.data.train
    if not isinstance(train, str):
        raise UserError("the run trained on several shard folders; name one with --train")
    features = functools.partial(open_shards, opened, own_classes=False)
    train_data = features(train)
    validation = open_held_out(opened, args.validation, option="--validation", own_classes=False)
    return ProbeData(
        first_images(opened, train_data, args.train_images),
        first_images(opened, validation, args.validation_images),
        palette=opened.palette if train_data.manifest.kind == "palette" else None,
        num_train=args.train_images,
        num_validation=args.validation_images,
        selection=features(args.selection) if args.selection else None,
        trained_on=list(training_shards(opened.config)),
    )


def read_layers(text: str, num_layers: int) -> Sequence[int] | None:
    """Parse `all` (None), or comma-separated numbers in 0 .. `num_layers`."""
    if text == "all":
        return None
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError:
        layers = [-1]
    if any(not 0 <= layer <= num_layers for layer in layers):
        raise UserError(
            f"--layers {text}: must be all, or numbers from 0 to {num_layers} such as 0,3"
        )
    return layers


@contextlib.contextmanager
def layout_job(args: argparse.Namespace, *, alone: bool = False) -> Iterator[ParallelContext]:
    """Join a launcher's job, or create one with this process alone; leave it at the end.

    Args:
        args: with `device`, and the options of `add_layout_argument` if not alone.
        alone: reject a launcher.

    Raises:
        UserError: the tensor size does not divide the job's processes.
    """
    launch, tensor_size = read_launch(os.environ), 1 if alone else args.tensor_parallel
    if alone and launch.world_size > 1:
        raise UserError("this command runs as one process; start it without a launcher")
    if tensor_size < 1 or launch.world_size % tensor_size:
        processes = counted(launch.world_size, "process", "processes")
        raise UserError(f"--tensor-parallel {tensor_size} does not divide the job's {processes}")
    with job_closed():
        with quietly():
            layout = ParallelConfig(tensor_model_parallel_size=tensor_size)
            context = open_context(launch, layout, device=args.device)
        require_compiled(context)
        yield context


def probe_run(opened: Run, args: argparse.Namespace, settings: ProbeSettings) -> ProbeResult | None:
    """Probe an opened run with the options of `add_data_arguments`.

    Called on every process of a job. All compute features; the main process fits the classifiers,
    and the others get None.
    """
    data, cache = probe_data(opened, args), feature_cache(opened, args)
    data.check(settings, num_features=opened.last_layer + 1)
    trained = network_of(opened, cache)
    if trained.num_views == 1:
        name = opened.config.objective.name
        refuse_options(args, ("--masks",), f"to {name}, whose inputs are not masked at random")
    num_views = args.masks or trained.num_views
    networks = itertools.chain([trained], untrained_networks(opened, args, cache))
    pairs: Iterator[Pair] = (data.features(network, num_views=num_views) for network in networks)
    if opened.context.world.size > 1:
        # Compute all features first, so no process waits for the main one to fit a classifier.
        pairs = iter([pair for pair in pairs if opened.context.is_main])
        if not opened.context.is_main:
            return None
    trained_pair, run = next(pairs), opened.config.name
    result = probe(trained_pair, pairs, data, step=opened.step, settings=settings, run=run)
    report_cache(cache)
    return result


def feature_cache(opened: Run, args: argparse.Namespace) -> FeatureCache | None:
    """Return a run's feature cache; None for --no-cache."""
    return None if args.no_cache else FeatureCache(opened.folder / FOLDER)


def report_cache(cache: FeatureCache | None) -> None:
    """Print in one line what was read and computed."""
    if cache is not None:
        sys.stdout.write(f"{cache.report()}\n")


def network_of(opened: Run, cache: FeatureCache | None, *, seed: int | None = None) -> Network:
    """Return the network of an opened run, or one like it with fresh weights of a seed.

    The latter is built only when it must compute.
    """

    def build() -> Inference:
        with quietly():
            return (opened if seed is None else opened.untrained(seed)).inference

    identity = network_identity(opened, seed=seed)
    return Network(opened.objective, opened.context, build, cache, identity)


def untrained_networks(
    opened: Run, args: argparse.Namespace, cache: FeatureCache | None
) -> Iterator[Network]:
    """Yield networks like the run's with fresh weights."""
    for number in range(args.untrained_networks):
        yield network_of(opened, cache, seed=args.seed + number)


def list_features(args: argparse.Namespace) -> int:
    """List the cached features of a run, or delete them."""
    require_run_folder(args.run_folder)
    if args.clear:
        sys.stdout.write(f"deleted {clear_features(args.run_folder) / 1e6:.1f} MB\n")
        return 0
    files = cached_features(args.run_folder)
    for file in files:
        sys.stdout.write(f"{file.path.name}  {_words(file)}\n")
    total = sum(file.path.stat().st_size for file in files)
    sys.stdout.write(f"{len(files)} files, {total / 1e6:.1f} MB\n")
    return 0


def _words(file: CachedFile) -> str:
    if file.key is None:
        return "damaged"
    layers, images, width = file.shape
    weights = file.key["weights"]
    network = f"fresh weights of seed {file.key['seed']}"
    if weights != "fresh":
        network = f"weights {weights[:12]}"
    view = f", view {file.key['view']}" if file.key["view"] else ""
    return (
        f"{network}, {file.key['precision']}, shards {file.key['shards'][:12]}{view}:"
        f" {images} images, {layers} layers of {width}"
    )
