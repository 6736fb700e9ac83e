"""`megavis probe` and `megavis transfer`: linear probes of a run, on its own or other data sets.

The baselines are raw pixels and untrained networks of the same model. Other data sets are shards
with a folder per split, listed on the command line or in a YAML file:

cifar10: {path: shards/cifar10}
pets:
  path: shards/pets
  splits: {train: trainval, test: test, validation: null}
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from megavis.commands.opening import (
    feature_cache,
    first_images,
    layout_job,
    network_of,
    open_run,
    open_shards,
    probe_run,
    read_layers,
    report_cache,
    untrained_networks,
)
from megavis.commands.options.shared import result_place
from megavis.config.errors import UserError
from megavis.config.schema import ConfigIssue
from megavis.config.section import Section
from megavis.config.yaml_tree import ConfigSource, read_tree
from megavis.data.loading.dataset import ShardDataset, Subset
from megavis.data.loading.leakage import Shards, training_shards
from megavis.evaluation.features import FeatureCache
from megavis.evaluation.linear import RECIPES
from megavis.evaluation.networks import Network
from megavis.evaluation.probe import Pair, ProbeData, ProbeSettings
from megavis.evaluation.results import ConcatenatedScore, LayerScore, ProbeResult, TransferRow
from megavis.evaluation.transfer import (
    PIXELS,
    TRAINED,
    Task,
    first_examples,
    markdown_of,
    num_fitted,
    transfer,
    write_transfer,
)
from megavis.notebook import Run


def run(args: argparse.Namespace) -> int:
    """Probe, write the result as JSON and as a table."""
    with layout_job(args):
        opened = open_run(args.run_folder, step=args.step, precision=args.precision)
        settings = ProbeSettings(
            layers=read_layers(args.layers, opened.last_layer),
            seed=args.seed,
            concatenate=args.concatenate,
            images_per_class=args.images_per_class,
            draws=args.draws,
            recipe=RECIPES[args.classifier],
        )
        result = probe_run(opened, args, settings)
    if result is None:
        return 0
    out = result_place(args)
    sys.stdout.write(table(result))
    result.write(out)
    sys.stdout.write(f"{out}\n")
    return 0


def table(result: ProbeResult) -> str:
    """Return the accuracies as lines of text, the best layer marked."""
    networks = len(result.untrained)
    lines = [
        f"linear probe at step {result.step}: {result.num_classes} classes,"
        f" {result.num_fitted} + {result.num_held_out} training images,"
        f" {result.num_validation} validation images, seed {result.seed},"
        f" {networks} untrained networks",
        f"{'layer':>9}{'trained':>10}{'untrained':>11}" + "   vote" * (result.num_views > 1),
    ]
    for trained, *untrained in zip(result.trained, *result.untrained, strict=True):
        mark = "  <- best on held-out training images" if trained == result.best_layer else ""
        mean = sum(score.accuracy for score in untrained) / networks
        lines.append(
            f"{trained.layer:>9}{trained.accuracy:>10.1%}{mean:>11.1%}{_vote(trained)}{mark}"
        )
    lines += [*_concatenated(result), *_low_data(result), _summary(result)]
    return "\n".join(lines) + "\n"


def _vote(score: LayerScore | ConcatenatedScore) -> str:
    return "" if score.vote_accuracy is None else f"{score.vote_accuracy:>7.1%}"


def _summary(result: ProbeResult) -> str:
    best = result.best_layer
    vote = (
        ""
        if best.vote_accuracy is None
        else f" ({best.vote_accuracy:.1%} by the vote of {result.num_views} masks)"
    )
    return (
        f"best layer {best.accuracy:.1%}{vote}, raw pixels {result.pixels.accuracy:.1%},"
        f" untrained network {result.untrained_accuracy:.1%}"
    )


def _concatenated(result: ProbeResult) -> Iterator[str]:
    if not result.concatenated:
        return
    trained, *untrained = result.concatenated
    mean = sum(score.accuracy for score in untrained) / len(untrained)
    layers = f"{trained.layers[0]}-{trained.layers[-1]}"
    yield (
        f"{layers:>9}{trained.accuracy:>10.1%}{mean:>11.1%}{_vote(trained)}"
        f"  {trained.num_features} features concatenated"
    )


def _low_data(result: ProbeResult) -> Iterator[str]:
    """Yield a line per number of labels: mean ± standard deviation for each kind of features."""
    if not result.low_data:
        return
    kinds = ("trained", "untrained", "pixels")
    draws = len(result.low_data[0].accuracies)
    yield f"few labels, mean ± standard deviation over {draws} draws:"
    yield f"{'per class':>9}" + "".join(f"{kind:>16}" for kind in kinds)
    for count in dict.fromkeys(score.images_per_class for score in result.low_data):
        scores = {s.features: s for s in result.low_data if s.images_per_class == count}
        cells = [f"{scores[kind].mean:.1%} ± {scores[kind].deviation:.1%}" for kind in kinds]
        yield f"{count:>9}" + "".join(f"{cell:>16}" for cell in cells)


def probe_data_sets(args: argparse.Namespace) -> int:
    """Probe each data set, write and print the table."""
    data_sets = read_data_sets(args.data_sets)
    if unknown := sorted(set(args.per_class) - set(data_sets)):
        known = ", ".join(data_sets)
        raise UserError(f"--per-class: {unknown[0]} is not among --data-sets: {known}")
    with layout_job(args):
        opened = open_run(args.run_folder, step=args.step, precision=args.precision)
        results = _results(opened, data_sets, args)
    if not results:
        return 0
    title = _title(opened, args)
    sys.stdout.write(markdown_of(results, title=title, per_class=args.per_class))
    written = write_transfer(result_place(args), results, title=title, per_class=args.per_class)
    sys.stdout.writelines(f"{path}\n" for path in written)
    return 0


def _results(
    opened: Run, data_sets: Mapping[str, LabelledFolders], args: argparse.Namespace
) -> list[TransferRow]:
    """Return the scores of each data set and kind of features; none on other processes."""
    settings = _settings(opened, args)
    cache = feature_cache(opened, args)
    # Open all before evaluating the first, so mistakes are reported immediately.
    trained_on = list(training_shards(opened.config))
    data = {
        name: _open(opened, folders, trained_on, examples=args.examples)
        for name, folders in data_sets.items()
    }
    for images in data.values():
        images.check(settings, num_features=opened.last_layer + 1)
    seen = _features(opened, data, args, cache)
    if opened.context.world.size > 1:
        # Compute all features first, so no process waits for the main one to fit a classifier.
        seen = iter([each for each in seen if opened.context.is_main])
        if not opened.context.is_main:
            return []
    results: list[TransferRow] = []
    for name, features, pair in seen:
        task = _task(name, data[name], features, pair, args)
        results += transfer(task, settings, step=opened.step, layer=args.layer)
    report_cache(cache)
    order = list(data)
    return sorted(results, key=lambda result: order.index(result.data_set))


def _settings(opened: Run, args: argparse.Namespace) -> ProbeSettings:
    num_layers = opened.last_layer
    if args.layer is not None and args.layer > num_layers:
        raise UserError(f"--layer {args.layer}: must be a number from 0 to {num_layers}")
    return ProbeSettings(
        layers=read_layers(args.layers, num_layers),
        images_per_class=args.images_per_class,
        draws=args.draws,
        seed=args.seed,
        recipe=RECIPES[args.classifier],
    )


def _features(
    opened: Run, data: Mapping[str, ProbeData], args: argparse.Namespace, cache: FeatureCache | None
) -> Iterator[tuple[str, str, Pair]]:
    """Yield data set name, network name and features, one network after another."""
    for features, network in _networks(opened, args, cache):
        for name, images in data.items():
            yield name, features, images.features(network)
    if args.no_pixels or not opened.context.is_main:
        return
    for name, images in data.items():
        if images.train.manifest.kind != "ids":  # ids are not quantities
            yield name, PIXELS, images.pixels()


def _networks(
    opened: Run, args: argparse.Namespace, cache: FeatureCache | None
) -> Iterator[tuple[str, Network]]:
    yield TRAINED, network_of(opened, cache)
    for number, network in enumerate(untrained_networks(opened, args, cache)):
        yield f"untrained, seed {args.seed + number}", network


def _task(name: str, data: ProbeData, features: str, pair: Pair, args: argparse.Namespace) -> Task:
    """Return a data set with its splits."""
    train, test = pair
    if args.examples is None:
        selection = data.divide(train.labels, ProbeSettings(seed=args.seed))
    else:
        train, selection = first_examples(train, args.examples, name=name)
    return Task(name, features, train, test, selection, _splits(data), num_equal=data.num_equal)


def _open(
    opened: Run, folders: LabelledFolders, trained_on: Sequence[Shards], *, examples: int | None
) -> ProbeData:
    """Open the splits of a data set."""
    features = functools.partial(open_shards, opened, own_classes=False)
    train = features(folders.train)
    selection: ShardDataset | Subset | None = None
    if folders.validation:
        selection = features(folders.validation)
        if examples is not None:
            # Either may be sorted by class.
            selection = first_images(opened, selection, examples - num_fitted(examples))
            examples = num_fitted(examples)
    return ProbeData(
        first_images(opened, train, examples),
        features(folders.test),
        palette=opened.palette if train.manifest.kind == "palette" else None,
        num_train=examples,
        selection=selection,
        trained_on=trained_on,
    )


def _splits(data: ProbeData) -> dict[str, str]:
    """Describe the images of each split, from the shards' manifests."""
    folders = {"train": data.train, "selection": data.selection, "test": data.validation}
    return {
        part: f"{shards.manifest.source.description} ({shards.directory})"
        for part, shards in folders.items()
        if shards is not None
    }


def _title(opened: Run, args: argparse.Namespace) -> str:
    images = "all training images" if args.examples is None else f"{args.examples} training images"
    chosen = "Features are standardised. Layer and penalty were chosen"
    if not RECIPES[args.classifier].search:
        chosen = "Features are unscaled and C = 1. The layer was chosen"
    return (
        f"# Transfer of {opened.config.name}, step {opened.step}\n\n"
        f"Linear classifiers on frozen features, fitted on {images}. {chosen} on the held-out part"
        f" of these, never on the test images. Seed {args.seed}."
    )


@dataclass(frozen=True)
class LabelledFolders:
    """The shard folders of one data set; without `validation`, a part of `train` selects."""

    train: str
    test: str
    validation: str | None


class _Splits(Section):
    train: str = "train"
    validation: str | None = "validation"
    test: str = "test"


class _Entry(Section):
    path: str
    splits: _Splits = _Splits()

    @property
    def folders(self) -> LabelledFolders:
        splits, held_out = self.splits, None
        if splits.validation is not None:
            held_out = f"{self.path}/{splits.validation}"
            # The default folder may be missing; an explicitly named one must exist.
            if "validation" not in splits.model_fields_set and not Path(held_out).is_dir():
                held_out = None
        return LabelledFolders(
            f"{self.path}/{splits.train}", f"{self.path}/{splits.test}", held_out
        )


def read_data_sets(text: str) -> dict[str, LabelledFolders]:
    """Parse comma-separated `name:folder` pairs, or read the YAML file of that name."""
    if text.endswith((".yaml", ".yml")):
        return _read_file(Path(text))
    pairs = [part.partition(":")[::2] for part in text.split(",")]
    if not all(name and folder for name, folder in pairs) or len(dict(pairs)) < len(pairs):
        raise UserError(
            f"--data-sets {text}: neither a YAML file nor a list of distinct names such as"
            " cifar10:shards/cifar10,pets:shards/pets"
        )
    return {name: _Entry(path=folder).folders for name, folder in pairs}


def _read_file(path: Path) -> dict[str, LabelledFolders]:
    source = ConfigSource(str(path))
    found: dict[str, LabelledFolders] = {}
    complaints: list[ConfigIssue] = []
    for name, keys in read_tree(path, source).items():
        try:
            found[str(name)] = _Entry.model_validate(keys).folders
        except ValidationError as error:
            complaints += _explain(str(name), error)
    if complaints:
        raise source.error(complaints)
    if not found:
        raise UserError(f"{path} names no data set; one is, for example, cifar10: {{path: FOLDER}}")
    return found


def _explain(name: str, error: ValidationError) -> Iterator[ConfigIssue]:
    for each in error.errors():
        sections = [str(part) for part in each["loc"]]
        known = ", ".join((_Splits if "splits" in sections[:-1] else _Entry).model_fields)
        text = {
            "extra_forbidden": f"unknown key; known here: {known}",
            "missing": "is missing; it names the folder of the splits",
            "model_type": f"must hold keys, not {each['input']!r}; known here: {known}",
        }.get(each["type"], f"must be a string, not {each['input']!r}")
        yield ".".join([name, *sections]), text
