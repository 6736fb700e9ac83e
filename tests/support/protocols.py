"""What the runs behind the rows of docs/papers train on, compared with what the papers say.

An expectation is a dictionary of a config's dotted keys and values, or of a name below:

- `epochs`, `warmup_epochs`: `training.steps` and `schedule.warmup_steps`, in epochs of `images`.
- `images`: size of the training set, as the paper's data set is published.
"""

import functools
import importlib
import re
import shlex
from pathlib import Path

import pytest

from megavis.cli import read_arguments
from megavis.config.load import load_config

ROOT = Path(__file__).parents[2]
IMAGENET = {
    "data.train": "shards/imagenet_jpeg/train",
    "data.validation": "shards/imagenet_jpeg/validation",
    "images": 1_281_167,
}
# Accuracy is of the 50,000 validation images; the step is chosen on held-out training images.
IMAGENET_LABELS = {
    **IMAGENET,
    "data.validation": "shards/imagenet_jpeg/selection",
    "finetune.test": "shards/imagenet_jpeg/validation",
    "finetune.num_classes": 1000,
}
# ADE20K: BEiT's UPerNet of 512² for 160,000 steps of 16 images, from
# 1,500 steps of warm-up to 0 linearly; scales of 0.5 to 2, flips and colour distortion.
ADE20K = {
    "data.train": "shards/ade20k/training",
    "data.validation": "shards/ade20k/validation",
    "data.image_size": 512,
    "data.crop": "jittered",
    "data.jitter": (0.5, 2.0),
    "data.flip": True,
    "data.color_distortion": True,
    "training.steps": 160_000,
    "training.batch_size": 16,
    "schedule.decay": "linear",
    "schedule.warmup_steps": 1500,
    "optimizer.weight_decay": 0.05,
    "finetune.task": "segments",
    "finetune.num_classes": 150,
    "finetune.head_dropout": 0.1,
    "finetune.auxiliary_weight": 0.4,
    "finetune.layer_decay": 0.65,
}
# COCO 2017: 1024², flips, objects of 80 classes; images beyond the square's end are padded.
COCO = {
    "data.train": "shards/coco_instances/train",
    "data.validation": "shards/coco_instances/validation",
    "data.image_size": 1024,
    "data.crop": "jittered",
    "data.flip": True,
    "data.color_distortion": False,
    "training.batch_size": 64,
    "schedule.decay": "cosine",
    "optimizer.betas": (0.9, 0.999),
    "model.position_scale": 14 / 64,
    "finetune.task": "instances",
    "finetune.num_classes": 80,
    "finetune.window": 16,
}
# "Benchmarking Detection Transfer Learning" in MIMDet's configs; 100 epochs are 184,375 steps.
BENCHMARKING = {
    **COCO,
    "data.jitter": (0.1, 2.0),
    "optimizer.learning_rate": 1.6e-4,
    "optimizer.weight_decay": 0.2,
    "schedule.warmup_steps": 461,
    "finetune.detector": "mask",
    "finetune.relative_positions": True,
    "finetune.layer_decay": 1.0,
}
DURATIONS = {"epochs": "training.steps", "warmup_epochs": "schedule.warmup_steps"}


@functools.cache
def claims_module():
    """Return `paper_claims` of docs/scripts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/scripts"))
        return importlib.import_module("paper_claims")


@functools.cache
def claims_and_runs():
    """Return the claims of all papers' presets, and configs by run folder."""
    headers = claims_module()
    claims = headers.read_claims()
    runs = {folder: run.config for folder, run in headers.known_runs().items()}
    runs |= {str(claim.config.folder): claim.config for claim in claims if claim.words}
    return claims, runs


@functools.cache
def row_words():
    """Return path and words, by run name, of all rows of docs/papers that override keys."""
    headers = claims_module()
    papers = [path.stem for path in sorted(headers.PAGES.glob("*.yaml"))]
    runs = [run for paper in papers for run in headers.row_runs(paper)]
    found = [*runs, *(claim for claim in headers.read_claims() if claim.words)]
    return {
        word.removeprefix("name="): (run.path, run.words)
        for run in found
        for word in run.words
        if word.startswith("name=")
    }


def load_run(paper, name):
    """Return the config of a preset of a paper, or of a row of docs/papers without a file."""
    path = ROOT / "yaml_configs" / paper / f"{name}.yaml"
    path, words = (path, ()) if path.exists() else row_words()[f"{paper}_{name}"]
    return load_config(path, words).config


class Protocols:
    """The runs that the headers of a paper's presets claim for its rows."""

    def __init__(self, paper):
        self.headers = claims_module()
        claims, self.runs = claims_and_runs()
        self.claims = [claim for claim in claims if claim.paper == paper]

    def rows(self):
        """Return lists of chains of configs by row, and by item and run for items without rows."""
        found = {}
        for claim in self.claims:
            for config in self.configs_of(claim):
                chain = self.chain_of(config)
                found.setdefault(self.key_of(claim, config), []).append(chain)
        return found

    def commands(self):
        """Return lists of parsed commands by row, and by item for items without rows."""
        found = {}
        for claim in self.claims:
            if claim.command.startswith("megavis"):
                row = f", {claim.row} {claim.column}".rstrip() if claim.row else ""
                args = read_arguments(shlex.split(claim.command)[1:])
                found.setdefault(claim.item + row, []).append(args)
        return found

    def configs_of(self, claim):
        """Return the configs that a claim trains, or whose runs its command reads."""
        if not claim.command:
            return [claim.config]
        words = shlex.split(claim.command)
        paths = [word for word in words if word.endswith(".yaml")]
        found = [self.runs[folder] for folder in re.findall(r"runs/[\w.-]+", claim.command)]
        for path in paths:
            # Keys of a command are those of its first config.
            keys = read_arguments(words[1:]).overrides if path is paths[0] else ()
            found.append(load_config(ROOT / path, keys).config)
        return found

    @staticmethod
    def key_of(claim, config):
        """Return `Table 1, 2 FT`, or `Figure 3: run` for an item without rows."""
        if claim.row:
            return f"{claim.item}, {claim.row} {claim.column}".strip()
        return f"{claim.item}: {config.name}"

    def chain_of(self, config):
        """Return the shipped configs to train before one, in order, and that one."""
        chain = {}
        for folder in self.headers.runs_before(config):
            for earlier in self.chain_of(self.runs[folder]) if folder in self.runs else ():
                chain[earlier.folder] = earlier
        return [*chain.values(), config]


def differences(config, expected):
    """Return (found, expected) by the keys in which a config differs."""
    pairs = {}
    for key, value in expected.items():
        if key in DURATIONS:
            steps = value * expected["images"] / config.training.batch_size
            found = value_of(config, DURATIONS[key])
            # Rounded to whole steps, or to a round number as in the released code.
            if abs(found - steps) > max(1, 1e-4 * steps):
                pairs[key] = (found, steps)
        elif key != "images" and not same(found := value_of(config, key), value):
            pairs[key] = (found, value)
    return pairs


def value_of(config, key):
    """Return the value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def same(found, expected):
    """Compare values, floats to 1e-6."""
    if isinstance(found, float) and isinstance(expected, float):
        return abs(found - expected) <= 1e-6 * abs(expected)
    return found == expected


def contradictions(chains, expected):
    """Return the differences of a row's chains from the expected runs, first to last.

    A header line may stand for the first part of a row, such as pre-training; another one must
    then complete it.
    """
    found = []
    if max(map(len, chains)) != len(expected):
        found.append(f"{max(map(len, chains))} runs, not {len(expected)}")
    for chain in chains:
        for config, wanted in zip(chain, expected, strict=False):
            if pairs := differences(config, wanted):
                found.append(f"{config.name}: {pairs}")
    return found
