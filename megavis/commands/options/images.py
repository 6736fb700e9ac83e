"""Options of the commands that generate or compare images: sample, evaluate."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from megavis.checkpoint.format.folder import require_run_folder
from megavis.commands.options.shared import (
    add_data_arguments,
    add_device,
    add_image_arguments,
    add_image_file_arguments,
    add_layout_argument,
    add_network_arguments,
    add_options,
    add_precision,
    add_result_file,
    add_run,
    add_step,
    refuse_options,
)
from megavis.config.arguments import (
    add_perceptual_arguments,
    comma_separated,
    non_negative,
    output_file,
    positive,
)
from megavis.config.errors import UserError
from megavis.config.watching import MEASURES, WATCH_OPTIONS, Measure

DISTANCE: Measure = "frechet"


def add_sample(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis sample`."""
    parser.description = (
        "Generate images from a run, or complete held-out images with --prefix: one row"
        " per image, original | given part | completions. A run that predicts from images generates"
        " targets for held-out ones: image | target | generated targets. Under torchrun,"
        " processes share the images."
    )
    parser.epilog = (
        "example: megavis sample runs/igpt_demo --prefix half --top-p 0.95\n"
        "         megavis sample runs/givt --classes 207,360 --temperature 0.95 --guidance 0.4"
    )
    add_run(parser)
    parser.add_argument("--num-images", type=int, default=16, help="default: 16")
    parser.add_argument(
        "--prefix",
        type=prefix_share,
        default=0.0,
        metavar="none|half|SHARE",
        help="share of the image, first in the run's order, that is given; default: none",
    )
    parser.add_argument(
        "--completions",
        type=int,
        help="per image: completions, or generated targets; default: 3, or 1 if groups differ",
    )
    parser.add_argument("--images", help="shard folder of the images; default: the run's own")
    parser.add_argument("--seed", type=non_negative, default=0, help="random seed; default: 0")
    parser.add_argument(
        "--batch-size",
        type=positive,
        help="images per batch; default: as many as fit on a GPU, 64 on a CPU",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "bf16"),
        help="of the network's weights and activations; default: bf16 on a GPU, float32 on a CPU",
    )
    add_step(parser)
    parser.add_argument(
        "--out", type=output_file, help="PNG file, with --moments JSON; default: in RUN"
    )
    parser.add_argument(
        "--npz",
        type=output_file,
        metavar="FILE",
        help="write --num-images images, cycling through the classes, for evaluation; when"
        " interrupted, the command resumes",
    )
    add_device(parser)
    add_layout_argument(parser)
    _add_classes(parser)
    add_options(parser)
    parser.set_defaults(run="sample:run", check=_check_sample)


def _check_sample(args: argparse.Namespace) -> None:
    completions = 1 if args.completions is None else args.completions
    if min(args.num_images, completions, args.per_class) < 1:
        raise UserError("--num-images, --completions and --per-class must be at least 1")
    written = ".json" if args.moments else ".png"
    for option, path, suffix in (("--out", args.out, written), ("--npz", args.npz, ".npz")):
        _require_suffix(path, option, suffix)


def _add_classes(parser: argparse.ArgumentParser) -> None:
    """Add options for the classes to generate."""
    words = comma_separated(str, "a list of classes such as 0,3,7")
    classes = parser.add_argument_group("runs with classes")
    classes.add_argument(
        "--classes",
        type=words,
        metavar="C,C,...",
        help="one row per class: its number, from 0 (-1: none), or its name in the training set",
    )
    classes.add_argument("--per-class", type=int, default=8, help="images per class; default: 8")
    classes.add_argument(
        "--then-classes",
        type=words,
        metavar="C,C,...",
        help="other classes for the lower halves; equal classes begin with the same upper halves",
    )
    parser.add_argument(
        "--show-rounds", action="store_true", help="show a draw from the prior and every round"
    )
    parser.add_argument(
        "--moments",
        action="store_true",
        help="compare moments of --num-images generated and held-out latents; default of --out: in"
        " RUN/evaluation",
    )


def prefix_share(text: str) -> float:
    """Read `none`, `half` or a share in [0, 1)."""
    named = {"none": 0.0, "half": 0.5}
    try:
        share = named[text] if text in named else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not none, half or a share in [0, 1)")
    return share


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis evaluate`."""
    parser.description = (
        "Evaluate generated or reconstructed images, or each checkpoint of a run as it appears."
    )
    parser.epilog = (
        "example: megavis evaluate samples samples.npz --reference statistics.npz"
        " --inception weights.pth"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_samples(verbs)
    _add_class_accuracy(verbs)
    _add_reconstruction(verbs)
    _add_label_maps(verbs)
    _add_segmentation(verbs)
    _add_detection(verbs)
    _add_watch(verbs)


_OTHERWISE = ", or next to an .npz or a folder"


def _add_samples(verbs: Any) -> None:
    samples = verbs.add_parser(
        "samples",
        help="FID, inception score, precision and recall of generated images",
        description="Compare generated images with real ones: Fréchet distance, inception score"
        " (10 random splits; of an .npz also splits in order, as ADM's evaluator takes them),"
        " precision and recall (3 neighbours), and sFID. Results go to JSON next to the samples;"
        " for a run, to RUN/evaluation/samples.json.",
        epilog="example: megavis evaluate samples samples.npz --reference"
        " VIRTUAL_imagenet256_labeled.npz --inception"
        " weights-inception-2015-12-05-6726825d.pth",
    )
    samples.add_argument(
        "samples",
        metavar="SAMPLES",
        type=Path,
        help="an .npz of uint8 [N, H, W, 3] in arr_0, a folder of PNG or JPEG files, or a run"
        " folder, whose newest .npz in RUN/samples is used",
    )
    samples.add_argument(
        "--reference",
        required=True,
        type=Path,
        metavar="FILE",
        help="statistics from `megavis evaluate statistics`, ADM or pytorch-fid, or real images: an"
        " .npz, a folder, or jpeg or palette shards",
    )
    add_result_file(samples, "samples.json", otherwise=_OTHERWISE)
    add_network_arguments(samples)
    add_image_file_arguments(samples)
    samples.set_defaults(run="evaluate:evaluate_samples", check=_note_run)
    statistics = verbs.add_parser(
        "statistics",
        help="feature statistics of real images, for later comparisons",
        description="Write feature mean and covariance of real images, and a sample of the"
        " features, to a file for `megavis evaluate samples --reference`.",
        epilog="example: megavis evaluate statistics shards/train --out reference.npz --inception"
        " weights-inception-2015-12-05-6726825d.pth",
    )
    statistics.add_argument(
        "images", metavar="IMAGES", type=Path, help="an .npz, a folder, or jpeg or palette shards"
    )
    statistics.add_argument(
        "--out", required=True, type=output_file, metavar="FILE", help=".npz file"
    )
    statistics.add_argument(
        "--features",
        type=non_negative,
        default=10_000,
        help="feature vectors to store, for precision and recall",
    )
    add_network_arguments(statistics)
    add_image_file_arguments(statistics)
    statistics.set_defaults(run="evaluate:write_reference")


def _note_run(args: argparse.Namespace) -> None:
    """Treat SAMPLES as RUN if it is one: results go there, and its report lists the command."""
    if (args.samples / "config.yaml").exists():
        args.run_folder = args.samples


def _add_class_accuracy(verbs: Any) -> None:
    parser = verbs.add_parser(
        "classes",
        help="accuracy of a classifier of real images on generated ones",
        description="Fit a small convolutional classifier on labelled images and classify"
        " samples, which cycle through the classes as written by `megavis sample --npz`; real"
        " images that it was not fitted on; and a tokenizer's reconstructions of these.",
        epilog="example: megavis evaluate classes runs/givt --train shards/train --images"
        " shards/validation --tokenizer runs/vae",
    )
    parser.add_argument(
        "samples",
        metavar="SAMPLES",
        type=Path,
        help="an .npz of uint8 [N, H, W, 3] in arr_0, or a run folder, whose newest .npz in"
        " RUN/samples is used",
    )
    parser.add_argument(
        "--train", required=True, type=Path, metavar="FOLDER", help="jpeg shards to fit on"
    )
    parser.add_argument(
        "--images", required=True, type=Path, metavar="FOLDER", help="real images, in jpeg shards"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="RUN", help="reconstruct the real images with it"
    )
    parser.add_argument("--epochs", type=positive, default=5, help="training epochs; default: 5")
    parser.add_argument(
        "--seed", type=non_negative, default=0, help="random seed of the classifier"
    )
    add_device(parser)
    add_result_file(parser, "classes.json", otherwise=_OTHERWISE)
    parser.set_defaults(run="evaluate:evaluate_classes", check=_note_run)


def _add_reconstruction(verbs: Any) -> None:
    parser = verbs.add_parser(
        "reconstruction",
        help="PSNR, SSIM, LPIPS and FID of a tokenizer's reconstructions",
        description="Reconstruct held-out images with a tokenizer and compare: PSNR in"
        " dB and SSIM (Gaussian window of 11×11 pixels), averaged over the images; LPIPS and FID"
        " with weights that you supply.",
        epilog="example: megavis evaluate reconstruction runs/vae --num-images 50000",
    )
    add_image_arguments(parser, num_images=5000)
    add_perceptual_arguments(parser)
    add_network_arguments(parser)
    add_result_file(parser, "reconstruction.json")
    parser.set_defaults(run="evaluate:evaluate_reconstruction")


def _add_label_maps(verbs: Any) -> None:
    measures = {
        "panoptic": "panoptic, segmentation and recognition quality, for all classes, things and"
        " stuff",
        "depth": "RMSE in metres, absRel, log10 and delta 1 to 3",
    }
    # `megavis figure depth` writes depth.json.
    files = {"panoptic": "panoptic.json", "depth": "depth_errors.json"}
    for kind, measured in measures.items():
        parser = verbs.add_parser(
            kind,
            help=f"{measured.partition(',')[0]} of predicted {kind} maps",
            description=f"Compare {kind} maps in the size of the originals: {measured}. A run of"
            " vae_label_maps reconstructs them, one of givt_encoder_decoder predicts them from"
            " images.",
            epilog=f"example: megavis evaluate {kind} runs/givt --temperature 0.85 --beams 4",
        )
        add_image_arguments(parser, num_images=None)
        parser.add_argument("--seed", type=non_negative, default=0, help="of draws; default: 0")
        parser.add_argument(
            "--batch-size", type=positive, default=32, help="images per batch; default: 32"
        )
        add_options(parser)
        add_result_file(parser, files[kind])
        parser.set_defaults(run=f"evaluate:evaluate_{kind}")


def _add_segmentation(verbs: Any) -> None:
    parser = verbs.add_parser(
        "segmentation",
        help="mIoU of predicted classes of pixels, in the size of the originals",
        description="Predict the class of each pixel of whole images, with a run fine-tuned with"
        " finetune.task: segments. Windows of the training images' side slide over the image,"
        " whose shorter side has that length; their logits are averaged and resized to the"
        " original. Prints and writes mean IoU, mean accuracy of classes and accuracy of pixels."
        " Under torchrun, processes share the images.",
        epilog="example: megavis evaluate segmentation runs/ade20k --images shards/ade/validation",
    )
    add_image_arguments(parser, num_images=None)
    parser.add_argument(
        "--stride",
        type=positive,
        metavar="PIXELS",
        help="between windows; default: two thirds of their side (341 of 512)",
    )
    add_result_file(parser, "segmentation.json")
    add_precision(parser)
    add_layout_argument(parser)
    parser.set_defaults(run="held_out:evaluate_segmentation")


def _add_detection(verbs: Any) -> None:
    parser = verbs.add_parser(
        "detection",
        help="average precision of boxes and masks, in the size of the originals",
        description="Find the objects of whole images, with a run fine-tuned with finetune.task:"
        " instances. Images are resized to fit the training images' square, and padded. Prints"
        " COCO's twelve numbers of boxes and of masks, counted by pycocotools, and writes them,"
        " with those of each class, and a picture of the first images next to them. Under"
        " torchrun, processes share the images.",
        epilog="example: megavis evaluate detection runs/coco --images shards/coco/validation",
    )
    add_image_arguments(parser, num_images=None)
    parser.add_argument(
        "--batch-size", type=positive, default=4, help="images per batch; default: 4"
    )
    add_result_file(parser, "detection.json")
    add_precision(parser)
    add_layout_argument(parser)
    # A picture is written next to it, with the same name.
    parser.set_defaults(
        run="held_out:evaluate_detection",
        check=lambda args: _require_suffix(args.out, "--out", ".json"),
    )


def _require_suffix(path: Path | None, option: str, suffix: str) -> None:
    """Raise UserError unless the file of an option, if it was given, has the suffix."""
    if path is not None and path.suffix != suffix:
        raise UserError(f"{option} {path}: the name of the file must end in {suffix}")


def _add_watch(verbs: Any) -> None:
    parser = verbs.add_parser(
        "watch",
        help="evaluate each checkpoint of a run as it appears",
        description="Evaluate each checkpoint of a running job as it appears, existing ones"
        " first. Results go to RUN/evaluation/watch.jsonl, one line per checkpoint, and to"
        " TensorBoard under 'evaluation'; samples to RUN/samples. Ends when the run has reached its"
        " last step, or on Ctrl-C or SIGTERM; when restarted it continues with what has not been"
        " measured with the same options. The config section `evaluation` makes training start it.",
        epilog="example: megavis evaluate watch runs/igpt_demo --what loss,probe,samples",
    )
    add_run(parser)
    _add_key(parser, "what", type=read_measures, metavar="NAME,NAME")
    _add_key(parser, "every", type=positive)
    _add_key(parser, "interval", type=float)
    # Training ends the watch that it started by closing the pipe, even if killed.
    parser.add_argument("--until-input-ends", action="store_true", help=argparse.SUPPRESS)
    add_data_arguments(parser)
    _add_key(parser, "reference", type=Path, metavar="FILE")
    _add_key(parser, "num_samples", type=positive)
    add_network_arguments(parser)
    parser.set_defaults(run="evaluate_watch:watch", check=_check_watch)


def _add_key(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """Add an option that is a key of the config's section `evaluation`: its default, its words."""
    key = WATCH_OPTIONS[name]
    words = key.description[0].lower() + key.description[1:].rstrip(".")
    option = f"--{name.replace('_', '-')}"
    parser.add_argument(option, default=key.default, help=words, **settings)


def _check_watch(args: argparse.Namespace) -> None:
    if not 0 < args.interval < math.inf:  # not a number is not either
        raise UserError(f"--interval {args.interval:g}: must be a number of seconds above 0")
    if DISTANCE not in args.what and not args.until_input_ends:
        options = ("--reference", "--num-samples", "--inception", "--network")
        refuse_options(args, options, f"to --what without {DISTANCE}")
    if args.until_input_ends:
        os.nice(10)  # Training has priority, and may not have written its config yet.
    else:
        require_run_folder(args.run_folder)


def read_measures(text: str) -> tuple[str, ...]:
    """Parse comma-separated names."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in MEASURES:
            raise argparse.ArgumentTypeError(f"'{name}' is not one of {', '.join(MEASURES)}")
    return names
