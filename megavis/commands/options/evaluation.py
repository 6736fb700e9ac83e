"""Options of the commands that evaluate features and losses: probe, transfer, ensemble, ..."""

from __future__ import annotations

import argparse
from pathlib import Path

from megavis.commands.options.shared import (
    add_data_arguments,
    add_device,
    add_feature_arguments,
    add_few_label_arguments,
    add_image_arguments,
    add_layout_argument,
    add_precision,
    add_probe_arguments,
    add_run,
    add_runs,
    add_seed_argument,
    add_step,
    require_writable,
)
from megavis.config.arguments import non_negative, output_file, positive


def add_probe(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis probe`."""
    parser.description = (
        "Fit a linear classifier on the features of each layer (iGPT, section 2.4), on"
        " raw pixels, and on untrained networks (their mean), all in the same way: layer and"
        " regularisation are chosen on held-out training images, and accuracies are measured on"
        " the validation images."
    )
    parser.epilog = "example: megavis probe runs/igpt_demo --concatenate 5 --images-per-class 4,25"
    add_run(parser)
    parser.add_argument("--layers", default="all", help="all, or numbers such as 0,3,6")
    parser.add_argument(
        "--concatenate",
        type=non_negative,
        default=0,
        help="also concatenate the features of N adjacent layers around the best; default: no",
    )
    parser.add_argument(
        "--classifier",
        choices=("standardized", "plain"),
        default="standardized",
        help="standardized: standardise features, choose one of five penalties; plain: unscaled"
        " features and scikit-learn's default penalty (C = 1), as in iGPT, section 3.4",
    )
    add_few_label_arguments(parser)
    add_data_arguments(parser)
    add_layout_argument(parser)
    add_probe_arguments(parser)
    parser.add_argument("--out", type=output_file, help="default: RUN/evaluation/probe.json")
    parser.set_defaults(run="probe:run")


def add_transfer(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis transfer`."""
    parser.description = (
        "Fit a linear classifier on frozen features for each data set. Layer and"
        " regularisation are chosen on held-out training images; the classifier is then fitted on"
        " all training images and evaluated once on the test images. The baselines are an untrained"
        " network of the same model and raw pixels. Writes transfer.md and transfer.csv."
    )
    parser.epilog = (
        "example: megavis transfer runs/igpt_demo --data-sets"
        " cifar10:shards/cifar10,pets:shards/pets --examples 1000"
    )
    add_run(parser)
    parser.add_argument(
        "--data-sets",
        required=True,
        metavar="FILE.yaml|NAME:FOLDER,...",
        help="shards, FOLDER/train and FOLDER/test; layer and penalty are chosen on"
        " FOLDER/validation, else on a fifth of FOLDER/train. A file has `NAME: {path: FOLDER}`"
        " for each, and other folders with `splits: {train: , validation: , test: }`",
    )
    parser.add_argument(
        "--examples",
        type=positive,
        help="use only the first N training images, a fifth of them held out; VTAB has 1000;"
        " default: all",
    )
    parser.add_argument(
        "--layers", default="all", help="candidate layers: all, or numbers such as 0,3,6"
    )
    parser.add_argument(
        "--layer", type=non_negative, help="score this layer in addition to the best"
    )
    add_few_label_arguments(parser)
    parser.add_argument(
        "--untrained-networks",
        type=non_negative,
        default=1,
        help="number of untrained networks of the same model to compare with",
    )
    parser.add_argument(
        "--no-pixels",
        action="store_true",
        help="omit the baseline of raw pixels, which is slow for large images",
    )
    add_seed_argument(parser)
    add_step(parser)
    add_device(parser)
    add_feature_arguments(parser)
    add_layout_argument(parser)
    parser.add_argument("--out", type=Path, help="folder; default: RUN/evaluation")
    parser.set_defaults(run="probe:probe_data_sets")


def add_features(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis features`."""
    parser.description = (
        "List the features that `megavis probe` and `megavis figure` have cached in"
        " RUN/evaluation/features, with their weights, precision and number of images."
        " The cache is safe to delete: features are recomputed when needed."
    )
    parser.epilog = "example: megavis features runs/igpt_demo --clear"
    add_run(parser)
    parser.add_argument("--clear", action="store_true", help="delete all cached features")
    parser.set_defaults(run="opening:list_features")


def add_likelihood(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis likelihood`."""
    parser.description = (
        "Print the likelihood of held-out images under a run, if its loss"
        " is a likelihood: iGPT's next colour, GIVT's next latent. A dimension is what the model"
        " predicts, never a byte of the image; the output names it. `megavis figure"
        " likelihood` plots probe accuracy over validation loss."
    )
    parser.epilog = "example: megavis likelihood runs/igpt_demo"
    add_image_arguments(parser, num_images=None)
    add_precision(parser)
    parser.add_argument("--out", type=output_file, help="default: RUN/evaluation/likelihood.json")
    parser.set_defaults(run="held_out:measure")


def add_ensemble(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis ensemble`."""
    parser.description = (
        "Average the class probabilities of several fine-tuned runs, each at its selected step, and"
        " print the accuracy of each run and of the ensemble. The runs may be of different papers;"
        " their held-out shards must hold the same images. A single run is evaluated alone."
    )
    parser.epilog = "example: megavis ensemble runs/one_finetuned runs/another_finetuned"
    add_runs(parser, text="one or more")
    parser.add_argument(
        "--image-size",
        type=positive,
        metavar="PIXELS",
        help="side of the images; default: as in training; positions are interpolated (DARL, Table"
        " 1)",
    )
    parser.add_argument(
        "--images",
        metavar="FOLDER",
        help="shard folder; default: the test images of each run (finetune.test, or the half of"
        " data.validation that was not used for selection)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON")
    add_device(parser)
    parser.set_defaults(
        run="held_out:ensemble", check=lambda args: require_writable(args.json, "--json")
    )
