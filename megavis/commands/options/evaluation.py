"""Options of the commands that evaluate features and losses: probe, ensemble, figure, ..."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megavis.commands.options.shared import (
    add_classifier_argument,
    add_data_arguments,
    add_device,
    add_feature_arguments,
    add_few_label_arguments,
    add_image_arguments,
    add_layout_argument,
    add_precision,
    add_probe_arguments,
    add_result_file,
    add_result_folder,
    add_run,
    add_runs,
    add_seed_argument,
    add_step,
    refuse_options,
    require_writable,
)
from megavis.config.arguments import file_stem, non_negative, positive
from megavis.config.papers import FigureSpec, paper_figures


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
    add_classifier_argument(parser)
    add_few_label_arguments(parser)
    add_data_arguments(parser)
    add_layout_argument(parser)
    add_probe_arguments(parser)
    add_result_file(parser, "probe.json")
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
    parser.add_argument(
        "--per-class",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="NAME,...",
        help="data sets that enter the mean over data sets with the mean accuracy of their classes",
    )
    add_classifier_argument(parser)
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
    add_result_folder(parser)
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
    add_result_file(parser, "likelihood.json")
    parser.set_defaults(run="held_out:measure")


def add_ensemble(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis ensemble`."""
    parser.description = (
        "Average the class probabilities of several fine-tuned runs, each at its selected step, and"
        " print the accuracy of each run and of the ensemble. The runs may be of different papers;"
        " their held-out shards must hold the same images. A single run is evaluated alone, and an"
        " imported classifier on --images."
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


_OF_A_PROBE = (
    *("--train", "--validation", "--selection", "--train-images", "--validation-images", "--seed"),
    *("--step", "--masks", "--untrained-networks", "--precision", "--no-cache", "--classifier"),
)


def add_figure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis figure`."""
    parser.description = (
        "Plot a run's features or predictions: a PNG, and its numbers as CSV, in RUN/evaluation."
    )
    parser.epilog = "example: megavis figure depth runs/igpt_demo"
    figures = parser.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    _add_depth(figures)
    _add_likelihood(figures)
    _add_completions(figures)
    _add_neighbors(figures)
    for spec in (*GENERAL_FIGURES, *paper_figures()):
        _add_declared(figures, spec)


def _add_declared(figures: Any, spec: FigureSpec) -> None:
    parser = figures.add_parser(
        spec.name,
        help=spec.help,
        description=spec.description,
        epilog=f"example: megavis figure {spec.name} {spec.example}",
    )
    add_image_arguments(parser, num_images=spec.num_images)
    spec.add_options(parser)
    add_result_folder(parser)
    parser.set_defaults(run="figure:plot_declared", spec=spec)


def _add_depth(figures: Any) -> None:
    parser = figures.add_parser(
        "depth",
        help="accuracy of the linear probe by layer (iGPT, Figure 2)",
        description="Probe every layer of a run, of untrained networks like it, and raw pixels, and"
        " plot accuracy over depth.",
        epilog="example: megavis figure depth runs/igpt_demo --train-images 2000",
    )
    add_run(parser)
    parser.add_argument(
        "--probe",
        type=Path,
        metavar="FILE",
        help="plot this result of `megavis probe`, instead of probing",
    )
    _add_name(parser, "depth")
    add_classifier_argument(parser)
    add_data_arguments(parser)
    add_layout_argument(parser)
    add_probe_arguments(parser)
    add_result_folder(parser)
    parser.set_defaults(run="figure:plot_depth", check=_check_depth)


def _add_name(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--name",
        type=file_stem,
        default=name,
        help="of the files that are written, without ending: one for each data set; default:"
        f" {name}",
    )


def _check_depth(args: argparse.Namespace) -> None:
    if args.probe is not None:
        refuse_options(args, _OF_A_PROBE, "to --probe FILE, which is plotted as written")


def _add_likelihood(figures: Any) -> None:
    parser = figures.add_parser(
        "likelihood",
        help="accuracy over validation loss of all checkpoints (iGPT, Figure 3)",
        description="Compute the validation loss and the best layer's linear probe of every"
        " checkpoint in a run folder, and plot one over the other, one line per run. The probe may"
        " use another data set than the loss, which takes the run's own held-out images. Files"
        " go to the first run's folder. Set checkpoint.keep_at or keep_every in training to have"
        " checkpoints to plot.",
        epilog="example: megavis figure likelihood runs/igpt_s runs/igpt_m",
    )
    add_runs(parser)
    parser.add_argument(
        "--loss-images",
        metavar="FOLDER",
        help="shard folder for the loss; default: the run's data.validation, or --validation"
        " without one",
    )
    parser.add_argument(
        "--num-loss-images", type=positive, help="maximum number of these; default: all"
    )
    _add_name(parser, "likelihood")
    add_classifier_argument(parser)
    add_data_arguments(parser)
    add_result_folder(parser)
    parser.set_defaults(run="figure:plot_likelihood")


def _add_completions(figures: Any) -> None:
    completions = figures.add_parser(
        "completions",
        help="completed lower halves, and their PSNR (DARL, Figure 7)",
        description="Complete held-out images from their upper halves, and compare with repeating"
        " the last given row: PSNR of the lower halves, of single completions and of their"
        " mean, which is the best guess under squared error. The image shows the first eight:"
        " original, given part, completions.",
        epilog="example: megavis figure completions runs/darl_demo --sampling-steps 20",
    )
    add_image_arguments(completions, num_images=64)
    completions.add_argument(
        "--sampling-steps", type=positive, help="from noise to a patch; default: the config's"
    )
    completions.add_argument(
        "--temperature", type=float, help="noise temperature; default: the config's"
    )
    completions.add_argument("--seed", type=non_negative, default=0, help="random seed")
    completions.add_argument(
        "--completions", type=positive, default=3, help="completions shown per image"
    )
    completions.add_argument(
        "--draws", type=positive, default=8, help="completions per image for the mean"
    )
    add_result_folder(completions)
    completions.set_defaults(run="figure:plot_completions")


def _add_neighbors(figures: Any) -> None:
    neighbors = figures.add_parser(
        "neighbors",
        help="accuracy of nearest neighbours by layer",
        description="Classify held-out images by the nearest training images among the features of"
        " each layer, of the run and of an untrained network like it.",
        epilog="example: megavis figure neighbors runs/demo --train-images 2000",
    )
    add_image_arguments(neighbors, num_images=1000)
    neighbors.add_argument(
        "--train-images", type=positive, default=5000, help="maximum number to compare with"
    )
    neighbors.add_argument(
        "--neighbors", type=positive, default=20, help="number of neighbours that vote"
    )
    add_feature_arguments(neighbors)
    add_result_folder(neighbors)
    neighbors.set_defaults(run="figure:plot_neighbors")


GENERAL_FIGURES = (
    FigureSpec(
        "attention",
        help="attention of each head by offset, and its entropy",
        description="Average the attention of every head over held-out images by the offset between"
        " query and key, and print its entropy.",
        num_images=256,
        plot="megavis.evaluation.token_relations:attention_figure",
        applies="sees_both_ways",
    ),
    FigureSpec(
        "correlation",
        help="correlation of the last layer's tokens, by position",
        description="Correlate the last layer's tokens at every two positions, within an image and"
        " between two.",
        num_images=512,
        plot="megavis.evaluation.token_relations:correlation_figure",
        applies="has_square_features",
    ),
)
"""Declared like the figures of papers, but for runs of any paper."""
