"""`megavis evaluate watch`: evaluate each checkpoint of a run as it appears."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from megavis.checkpoint.format.folder import (
    latest_checkpoint,
    saved_steps,
    step_folder,
    watched_file,
)
from megavis.commands.evaluate import device_of
from megavis.commands.opening import (
    feature_cache,
    first_images,
    job_closed,
    network_of,
    open_held_out,
    open_run,
    probe_data,
)
from megavis.commands.options.images import DISTANCE
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.leakage import check_no_overlap, training_shards
from megavis.data.loading.loader import read_round_robin
from megavis.evaluation.classes import accuracy_by_layer
from megavis.evaluation.event_files import EventFile
from megavis.evaluation.images.feature_networks import open_network
from megavis.evaluation.images.generation import (
    FeatureCollector,
    compare,
    read_statistics,
)
from megavis.evaluation.images.results import SamplesResult, measured_by
from megavis.evaluation.likelihood import mean_loss
from megavis.evaluation.linear import HeldOutSplit, score_layers
from megavis.evaluation.probe import Pair, ProbeData, ProbeSettings
from megavis.evaluation.results import WatchedCheckpoint, best_layer
from megavis.notebook import Run
from megavis.sampling.pictures import Gallery, save_png
from megavis.training.search.trial import is_finished

_KEYS = {"loss": "validation_loss", "probe": "probe_accuracy", "neighbors": "neighbors_accuracy"}
"""Number that a measure records."""
_NEIGHBORS = 20
_PICTURES = 8
_BATCH_SIZE = 64


def watch(args: argparse.Namespace) -> int:
    """Evaluate until the run is finished or a signal arrives."""
    # By default the signal would end the process without leaving `job_closed`.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with job_closed():
            _watch(args)
    except KeyboardInterrupt:
        sys.stdout.write("stopped\n")
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _watch(args: argparse.Namespace) -> None:
    distance = SampleFID(args) if DISTANCE in args.what else None
    seen: set[int] = set()
    is_last_look = False
    while True:
        for step, what in _waiting_steps(args, distance, seen):
            seen.add(step)
            if (record := _measured(args, step, what, distance)) is None:
                sys.stdout.write(
                    f"step {step} was pruned, or rolled back, before it was evaluated\n"
                )
            else:
                _keep(args.run_folder, record)
        if is_last_look:
            return
        # A checkpoint may have appeared just before the end: look once more.
        is_last_look = _wait(args)


def _waiting_steps(
    args: argparse.Namespace, distance: SampleFID | None, seen: set[int]
) -> Iterator[tuple[int, list[str]]]:
    """Yield the steps of checkpoints to evaluate, and what to measure, polling after each."""
    path = watched_file(args.run_folder)
    wanted = WatchedCheckpoint(step=0, seconds=0.0, **_settings(args)).settings
    while True:
        records = WatchedCheckpoint.read(path) if path.exists() else []
        records = [record for record in records if record.settings == wanted]
        newest, last = _newest_step(args.run_folder), _last_step(args.run_folder)
        # A run that rolls back takes steps again.
        seen.intersection_update(saved_steps(args.run_folder))
        missing = (
            (step, _missing(args, step, records, distance))
            for step in saved_steps(args.run_folder)
            if step <= newest and step not in seen and (step % args.every == 0 or step == last)
        )
        waiting = next(((step, what) for step, what in missing if what), None)
        if waiting is None:
            return
        yield waiting


def _missing(
    args: argparse.Namespace,
    step: int,
    records: Sequence[WatchedCheckpoint],
    distance: SampleFID | None,
) -> list[str]:
    """Return the measures of a step that are in none of the records, which have these options."""
    records = [record for record in records if record.step == step]

    def is_measured(name: str) -> bool:
        if name == "samples":
            return bool(records) and _picture(args.run_folder, step).exists()
        if name == DISTANCE:
            assert distance is not None
            return any(map(distance.has_measured, records))
        return any(_KEYS[name] in record.numbers for record in records)

    return [name for name in args.what if not is_measured(name)]


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that metrics depend on, as recorded."""
    return {
        "train_images": args.train_images,
        "validation_images": args.validation_images,
        "seed": args.seed,
        "train": args.train,
        "validation": args.validation,
        "selection": args.selection,
        "precision": None if args.precision == "float32" else args.precision,
    }


def _newest_step(run_folder: Path) -> int:
    """Return the step named by `latest`; later checkpoints are not published yet."""
    with contextlib.suppress(UserError):  # Between publishing and pruning of the named checkpoint.
        if checkpoint := latest_checkpoint(run_folder):
            return int(checkpoint.name.partition("-")[2])
    return -1


def _last_step(run_folder: Path) -> int | None:
    """Return the last step of the run; None before it has started."""
    path = run_folder / "config.yaml"
    if not path.exists():
        return None
    return int(yaml.safe_load(path.read_text(encoding="utf-8"))["training"]["steps"])


def _wait(args: argparse.Namespace) -> bool:
    """Wait until the next poll; return whether the run has ended."""
    if args.until_input_ends:
        # Training knows its last step better than the config, which may be from an earlier start.
        with selectors.PollSelector() as selector:
            selector.register(sys.stdin, selectors.EVENT_READ)
            return bool(selector.select(args.interval))
    path = args.run_folder / "config.yaml"
    if path.exists() and is_finished(load_config(path).config, args.run_folder):
        return True
    time.sleep(args.interval)
    return False


def _measured(
    args: argparse.Namespace, step: int, what: Sequence[str], distance: SampleFID | None
) -> WatchedCheckpoint | None:
    """Evaluate a checkpoint; None if it was pruned, or the run rolled back, meanwhile."""
    began = time.perf_counter()
    try:
        opened = open_run(args.run_folder, step=step, device=args.device, precision=args.precision)
        measures = CheckpointMeasures(opened, args, distance)
        numbers: dict[str, Any] = {}
        for name in what:
            if name == "samples":
                _show(args.run_folder, step, measures.picture())
            else:
                numbers |= measures.numbers(name)
    except (UserError, OSError):
        if step_folder(args.run_folder, step).is_dir():
            raise
        return None
    if 0 <= _newest_step(args.run_folder) < step:
        return None  # the run has rolled back
    return WatchedCheckpoint(
        step=step,
        **numbers,
        seconds=time.perf_counter() - began,
        **_settings(args),
    )


def _keep(run_folder: Path, record: WatchedCheckpoint) -> None:
    """Print a record, append it to the results and add it to TensorBoard."""
    words = ", ".join(f"{name} {value:.4g}" for name, value in record.numbers.items())
    words += f" | {record.distance_of}" if record.distance_of else ""
    sys.stdout.write(f"step {record.step}: {words}\n")
    sys.stdout.flush()
    path = watched_file(run_folder)
    path.parent.mkdir(exist_ok=True)
    record.append(path)
    events = _events(run_folder)
    for name, value in record.numbers.items():
        events.add_scalar(record.step, f"evaluation/{name}", value)
    events.write()


def _show(run_folder: Path, step: int, pixels: np.ndarray) -> None:
    save_png(_picture(run_folder, step), pixels)
    events = _events(run_folder)
    events.add_image(step, "evaluation/samples", pixels)
    events.write()


def _picture(run_folder: Path, step: int) -> Path:
    return run_folder / "samples" / f"watch-{step:08d}.png"


def _events(run_folder: Path) -> EventFile:
    """Return a file of events in the watch's folder, which is not training's."""
    return EventFile(run_folder, within="evaluation")


class CheckpointMeasures:
    """The measures of one opened checkpoint; shared results are computed once.

    Args:
        opened: the run.
        args: the options of `add_data_arguments`.
        distance: for the measure `frechet`.
    """

    def __init__(
        self, opened: Run, args: argparse.Namespace, distance: SampleFID | None = None
    ) -> None:
        self.opened, self.args, self.distance = opened, args, distance

    def numbers(self, name: str) -> Mapping[str, float | str]:
        """Return the results of a measure other than `samples`, by name."""
        measures: Mapping[str, Callable[[], Mapping[str, float | str]]] = {
            "loss": self._loss,
            "probe": self._probe,
            "neighbors": self._neighbors,
            DISTANCE: self._distance,
        }
        return measures[name]()

    def picture(self) -> np.ndarray:
        """Return a grid of generated images, uint8 `[H, W, 3]`."""
        gallery = Gallery(self.opened.objective, self.opened.folder)
        examples = read_round_robin(self._validation, _PICTURES).to(self.opened.context.device)
        return gallery.plot(self.opened.inference, examples, num_images=_PICTURES)

    def _loss(self) -> Mapping[str, float]:
        opened, limit = self.opened, self.args.validation_images
        check_no_overlap(self._validation, list(training_shards(opened.config)))
        images = first_images(opened, self._validation, limit)
        loss = mean_loss(opened.inference, opened.objective, images, limit=limit)
        return {"validation_loss": loss}

    def _probe(self) -> Mapping[str, float]:
        best = best_layer(score_layers(*self._features, self._division))
        return {"probe_accuracy": best.accuracy, "probe_layer": best.layer}

    def _neighbors(self) -> Mapping[str, float]:
        """Choose the layer on the same training images as the probe's layer."""
        train, validation = self._features
        parts = (self._division.fitted, self._division.held_out)
        selection = accuracy_by_layer(*(train.subset(part) for part in parts), k=_NEIGHBORS)
        layer = max(range(len(selection)), key=selection.__getitem__)
        accuracy = accuracy_by_layer(train, validation, k=_NEIGHBORS)[layer]
        return {"neighbors_accuracy": accuracy, "neighbors_layer": layer}

    def _distance(self) -> Mapping[str, float | str]:
        assert self.distance is not None
        found = self.distance.measure(self.opened)
        return {found.distance_key: found.distance, "distance_of": found.conditions}

    @functools.cached_property
    def _validation(self) -> ShardDataset:
        return open_held_out(self.opened, self.args.validation, option="--validation")

    @functools.cached_property
    def _data(self) -> ProbeData:
        return probe_data(self.opened, self.args)

    @functools.cached_property
    def _features(self) -> Pair:
        return self._data.features(network_of(self.opened, feature_cache(self.opened, self.args)))

    @functools.cached_property
    def _division(self) -> HeldOutSplit:
        train, _ = self._features
        return self._data.divide(train.labels, ProbeSettings(seed=self.args.seed))


class SampleFID:
    """FID of generated images; network and reference are opened once for all checkpoints."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.reference is None or args.num_samples < 2:
            raise UserError(
                f"--what {DISTANCE} needs --reference FILE (`megavis evaluate statistics` writes"
                " one), and --num-samples of 2 or more"
            )
        self._num_images, self._seed = args.num_samples, args.seed
        self._device = device_of(args)
        self._network = open_network(args.inception, args.network, self._device)
        self._reference = read_statistics(args.reference)

    def has_measured(self, record: WatchedCheckpoint) -> bool:
        """Return whether a record has the distance of as many images by this network and reference.

        Its seed is among `WatchedCheckpoint.settings`.
        """
        found, reference = record.distance_of or "", self._reference
        of = measured_by(self._network.about, reference.source, reference.sha256)
        return found.startswith(f"N {self._num_images} of ") and f", {of} (" in found

    def measure(self, opened: Run) -> SamplesResult:
        """Generate images with the defaults of `megavis sample RUN` and compare them."""
        sampler = opened.sampler(seed=self._seed)
        # Precision and recall would need tens of thousands.
        collector = FeatureCollector(self._network, num_images=self._num_images, num_kept=0)
        digest = hashlib.sha256()
        for numbers in torch.arange(self._num_images).split(_BATCH_SIZE):
            images = sampler.balanced_images(numbers).cpu()
            digest.update(images.numpy().tobytes())
            collector.add(images)
        summary = collector.summary(
            source=f"{opened.config.name} at step {opened.step}, seed {self._seed}",
            sha256=digest.hexdigest(),
        )
        return compare(summary, self._reference, device=self._device)
