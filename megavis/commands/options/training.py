"""Options of the commands that train or plan: train, finetune, search-lr, sweep, parity, ..."""

from __future__ import annotations

import argparse
from pathlib import Path

from megavis.commands.options.shared import (
    add_config,
    add_device,
    add_json,
    read_config,
    refuse_options,
)
from megavis.config.arguments import (
    SweepAxis,
    comma_separated,
    non_negative,
    non_negative_number,
    positive,
)
from megavis.config.errors import UserError


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis train`."""
    parser.description = (
        "Train a run, alone or under deepspeed, torchrun or srun. An existing run"
        " resumes from its newest checkpoint, in any layout."
    )
    parser.epilog = "example: megavis train yaml_configs/igpt/demo.yaml training.steps=100"
    add_config(parser)
    add_device(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check config, layout, data, disk and checkpoint for a job of --processes, without"
        " training; exit code 2 if it could not start",
    )
    parser.add_argument(
        "--processes", type=positive, help="size of the job that --dry-run checks; default: 1"
    )
    parser.set_defaults(run="train:train", check=_check_train)


def _check_train(args: argparse.Namespace) -> None:
    if args.processes is not None and not args.dry_run:
        raise UserError(
            "--processes applies only to --dry-run; a job's size comes from its launcher"
        )
    read_config(args)


def add_finetune(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis finetune`."""
    parser.description = (
        "Fine-tune all weights of the run finetune.from_run on the classes of"
        " the images. The step with the best accuracy on the selection images is kept and evaluated"
        " on other images; accuracy and confusion matrix go to RUN/evaluation. Runs alone,"
        " or under torchrun, deepspeed or srun, in any layout."
    )
    parser.epilog = (
        "example: megavis finetune yaml_configs/igpt/finetune_demo.yaml training.steps=100"
    )
    add_config(parser, text="YAML file with a finetune section")
    add_device(parser)
    parser.set_defaults(run="train:train", check=_check_finetune, dry_run=False)


def _check_finetune(args: argparse.Namespace) -> None:
    read_config(args)
    if args.loaded.config.finetune is None:
        raise UserError(
            f"{args.config}: has no finetune section; name the run to start from as"
            " finetune.from_run and the number of classes as finetune.num_classes, or use megavis"
            " train"
        )


def add_search_lr(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis search-lr`."""
    parser.description = (
        "Train the config with one learning rate after another, from large to small,"
        " and stop once the final validation loss starts to rise (iGPT, section 3.4) or, in"
        " fine-tuning, the best validation accuracy starts to fall. A run whose"
        " loss rises and stays high is stopped early. Each rate has its own run folder,"
        " NAME-lr-RATE; an interrupted search resumes. Table and plot go to"
        " NAME-search. Alone, or under deepspeed, torchrun or srun."
    )
    parser.epilog = "example: megavis search-lr yaml_configs/igpt/demo.yaml --rates 1e-2,3e-3,1e-3"
    add_config(parser)
    parser.add_argument(
        "--rates",
        type=comma_separated(float, "a list of numbers, for example 1e-2,3e-3"),
        metavar="R,R,…",
        help="default: 0.01,0.003,0.001,0.0003,0.0001, as in the paper",
    )
    parser.add_argument(
        "--patience",
        type=positive,
        default=10,
        help="stop a run after this many consecutive high logged losses",
    )
    add_device(parser)
    parser.set_defaults(run="search:search_rate")


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis sweep`."""
    parser.description = (
        "Train the config with every combination of values of some keys, each in its own run"
        " folder, and plot heat maps. Finished runs are kept, others resume. Runs alone, or under"
        " deepspeed, torchrun or srun, whose processes share each run; or as a SLURM array with one"
        " combination per task (launch/sweep.sh), followed by a call with --plot."
    )
    parser.epilog = (
        "example: megavis sweep yaml_configs/darl/demo.yaml --grid"
        " objective.noise_a=0.1..10:5 --grid objective.noise_b=0.1..10:5"
        " --then yaml_configs/darl/finetune_demo.yaml"
    )
    add_config(parser)
    parser.add_argument(
        "--grid",
        action="append",
        required=True,
        type=_axis,
        metavar="KEY=V,V,…|KEY=LOW..HIGH:COUNT",
        help="a key and its values, or a logarithmic grid; repeat for further keys",
    )
    parser.add_argument(
        "--then",
        action="append",
        metavar="CONFIG",
        help="fine-tuning config to start from each run, with the grid's objective.* and model.*"
        " keys; repeat to fine-tune its result",
    )
    parser.add_argument(
        "--index",
        type=non_negative,
        help="train only the N-th combination, counted from 0; default: all",
    )
    parser.add_argument("--count", action="store_true", help="print the number of combinations")
    parser.add_argument("--plot", action="store_true", help="only plot the existing runs")
    parser.add_argument(
        "--measure",
        choices=("probe", "accuracy", "test", "loss"),
        help="accuracy of the best layer's linear probe (default), validation accuracy of the"
        " fine-tuning at its last step (default with --then), accuracy on the test images at its"
        " best step (to report, not to choose), or validation loss, which is not comparable if the"
        " grid changes the task, such as its noise schedule",
    )
    parser.add_argument(
        "--train-images", type=positive, default=2000, help="training images of a probe"
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="always compute a probe's features; default: cache them in each run's"
        " evaluation/features",
    )
    add_device(parser)
    parser.set_defaults(run="search:sweep", check=_check_sweep)


def _check_sweep(args: argparse.Namespace) -> None:
    # The config is read later, with the values of each point, since it may lack a key of the grid.
    args.measure = args.measure or ("accuracy" if args.then else "probe")
    if args.measure != "probe":
        refuse_options(args, ("--train-images", "--no-cache"), f"to --measure {args.measure}")


def _axis(text: str) -> SweepAxis:
    try:
        return SweepAxis.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis bench`."""
    parser.description = (
        "Take training steps on random data, alone or under deepspeed, torchrun or srun, and print"
        " throughput, utilization relative to the vendor's peak and to a matrix product of this"
        " run, peak memory, the slowest process, and the share of each part of a step."
    )
    parser.epilog = "example: megavis bench yaml_configs/igpt/s_32.yaml data.train=none --steps 20"
    add_config(parser, writes="--profile")
    add_device(parser)
    parser.add_argument("--steps", type=positive, default=10, help="steps to time")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="also write a trace for chrome://tracing"
    )
    add_json(parser)
    parser.set_defaults(run="bench:time_step")


def add_parity(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis parity`."""
    parser.description = (
        "Compare every legal layout of N local processes with one process on the same"
        " data and seed, without dropout, and print the differences of loss and gradient norm. One"
        " process is also trained with the last bit of every weight changed: where that makes more"
        " than --tolerance, layouts are compared with it, step by step. Exit code 1 if any layout"
        " fails."
    )
    parser.epilog = (
        "example: megavis parity yaml_configs/igpt/demo.yaml --layouts all --processes 4"
    )
    add_config(parser, writes="--json")
    parser.add_argument(
        "--layouts",
        default="all",
        help="all (tensor × context × pipeline × ZeRO), everything (with sequence parallelism and"
        " activation checkpointing too), or names such as tp2-pp1-zero3,tp2-cp2-pp1-zero1-sp-full",
    )
    parser.add_argument("--processes", type=positive, default=4, help="local processes")
    parser.add_argument("--steps", type=positive, default=20, help="optimizer steps")
    parser.add_argument(
        "--tolerance",
        type=non_negative_number,
        default=1e-5,
        help="largest relative difference, unless rounding alone makes a larger one",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="default: cuda if each process has a GPU, else cpu",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    parser.set_defaults(run="parity:check_parity")


def add_params(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis params`."""
    parser.description = (
        "Count the parameters of a config by part and by matrix. No weights are"
        " allocated, so any size is counted in seconds. With --processes also memory of weights,"
        " gradients and optimizer states on each process in the config's layout."
    )
    parser.epilog = "example: megavis params yaml_configs/igpt/xl_64.yaml --processes 32"
    add_config(parser)
    parser.add_argument(
        "--processes", type=positive, help="also print the memory of each of N processes"
    )
    add_json(parser)
    parser.set_defaults(run="plan:count")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis plan`."""
    parser.description = (
        "Estimate whether a config fits on N GPUs, its memory and time, rank"
        " all legal layouts and recommend one. Nothing is allocated and no GPU is needed. Exit"
        " code 2 if no layout fits."
    )
    parser.epilog = "example: megavis plan yaml_configs/igpt/xl_64.yaml --gpus 64 --gpu a100"
    add_config(parser, writes="--write")
    parser.add_argument("--gpus", type=positive, required=True, help="total number of GPUs")
    parser.add_argument("--gpus-per-node", type=positive, default=8, help="GPUs per node")
    parser.add_argument("--gpu", default="h100", help="a100, h100, h200 or a YAML file")
    parser.add_argument("--gpu-memory", metavar="80GB", help="default: the GPU's own")
    parser.add_argument(
        "--interconnect",
        help="between nodes: 100ge, hdr, ndr, or GB/s per GPU; default: usual for the GPU",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FOLDER",
        help="take speeds and the host's time from a folder that gpu_check wrote on such a GPU, for"
        " example runs/gpu_check; default: assumptions, and the host's time of another machine",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        action="append",
        default=[],
        metavar="CONFIG",
        help="config of a frozen network that encodes images in each step, if its run does not"
        " exist yet; may be repeated",
    )
    add_json(parser)
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the recommended layout as a config"
    )
    parser.set_defaults(run="plan:run")
