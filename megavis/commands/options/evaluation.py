"""Options of the commands that look at features and losses: probe, transfer, ensemble, ..."""

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
)
from megavis.config.arguments import non_negative, positive
from megavis.config.errors import UserError


def add_probe(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis probe`."""
    parser.description = (
        "Fit a linear classifier on the features of each layer (iGPT, section 2.4), on"
        " raw pixels, and on untrained networks (their mean), all by one procedure: layer and"
        " regularisation are chosen on a held-out part of the training images, the accuracies are"
        " those of the validation images."
    )
    parser.epilog = "example: megavis probe runs/igpt_demo --concatenate 5 --images-per-class 4,25"
    add_run(parser)
    parser.add_argument("--layers", default="all", help="all, or numbers such as 0,3,6")
    parser.add_argument(
        "--concatenate",
        type=non_negative,
        default=0,
        help="also the features of N adjacent layers around the best one; default: no",
    )
    parser.add_argument(
        "--classifier",
        choices=("standardized", "plain"),
        default="standardized",
        help="standardized: each feature standardised, the best of five penalties; plain: features"
        " as they are and scikit-learn's own penalty (C = 1), as iGPT, section 3.4, reads",
    )
    add_few_label_arguments(parser)
    add_data_arguments(parser)
    add_layout_argument(parser)
    add_probe_arguments(parser)
    parser.add_argument("--out", type=Path, help="default: RUN/evaluation/probe.json")
    parser.set_defaults(run="probe:run")


def add_transfer(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis transfer`."""
    parser.description = (
        "Fit a linear classifier on frozen features for each data set. Layer and"
        " regularisation are chosen on held-out training images, the classifier is then fitted on"
        " all training images and meets the test images once. An untrained network of the same"
        " model and raw pixels are listed for comparison. Writes transfer.md and transfer.csv."
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
        help="shards, FOLDER/train and FOLDER/test; where there is FOLDER/validation, it is held"
        " out, else a fifth of the training images. A file has `NAME: {path: FOLDER}` for each,"
        " and names splits in other folders by `splits: {train: , validation: , test: }`",
    )
    parser.add_argument(
        "--examples",
        type=positive,
        help="the first N training images alone, a fifth of them held out; VTAB has 1000;"
        " default: all",
    )
    parser.add_argument(
        "--layers", default="all", help="that may be the best: all, or numbers such as 0,3,6"
    )
    parser.add_argument("--layer", type=non_negative, help="score this layer as well as the best")
    add_few_label_arguments(parser)
    _add_baseline_arguments(parser)
    add_seed_argument(parser)
    add_step(parser)
    add_device(parser)
    add_feature_arguments(parser)
    add_layout_argument(parser)
    parser.add_argument("--out", type=Path, help="folder; default: RUN/evaluation")
    parser.set_defaults(run="transfer:run")


def _add_baseline_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--untrained-networks",
        type=non_negative,
        default=1,
        help="of the same model, to compare with",
    )
    parser.add_argument(
        "--no-pixels",
        action="store_true",
        help="leave out raw pixels, which are many numbers an image where images are large",
    )


def add_features(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis features`."""
    parser.description = (
        "List the features that `megavis probe` and `megavis figure` have computed and"
        " kept in RUN/evaluation/features: of which weights, in which precision, how many images."
        " Nothing there is needed: what is asked for again is computed again."
    )
    parser.epilog = "example: megavis features runs/igpt_demo --clear"
    add_run(parser)
    parser.add_argument("--clear", action="store_true", help="delete them all")
    parser.set_defaults(run="features:run")


def add_likelihood(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis likelihood`."""
    parser.description = (
        "Print how likely a run finds images that it was not trained on, where its loss"
        " is a likelihood: iGPT's next colour, GIVT's next latent. A dimension is what the model"
        " predicts, never a byte of the photograph; the output says what it is. `megavis figure"
        " likelihood` draws probe accuracy over validation loss."
    )
    parser.epilog = "example: megavis likelihood runs/igpt_demo"
    add_image_arguments(parser, num_images=None)
    add_precision(parser)
    parser.add_argument("--out", type=Path, help="default: RUN/evaluation/likelihood.json")
    parser.set_defaults(run="likelihood:run")


def add_ensemble(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis ensemble`."""
    parser.description = (
        "Average the class probabilities of several fine-tuned runs, each at the step"
        " that it chose, and print the accuracy of each and of all together. The runs may be of"
        " different papers; their held-out shards must hold the same images."
    )
    parser.epilog = "example: megavis ensemble runs/one_finetuned runs/another_finetuned"
    add_runs(parser, text="two or more")
    parser.add_argument(
        "--images",
        metavar="FOLDER",
        help="shard folder; default: the images that judged each run (finetune.test, or the half of"
        " data.validation that chose nothing)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    add_device(parser)
    parser.set_defaults(run="ensemble:run", check=_check_ensemble)


def _check_ensemble(args: argparse.Namespace) -> None:
    if len(args.run_folders) < 2:
        raise UserError("name two or more run folders")
