"""Options of the commands that manage runs and machines: report, checkpoint, import, ..."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from megavis.commands.options.shared import (
    add_json,
    add_run,
    add_runs,
    add_step,
    refuse_options,
    require_new,
    require_run_name,
)
from megavis.config.arguments import non_negative, output_file, positive
from megavis.config.papers import paper_imports


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis report`."""
    parser.description = (
        "Summarise runs from their folders: validation loss before and after, linear"
        " probe, images, and the TensorBoard command. Also write one self-contained HTML"
        " page with curves, events, images, all of RUN/evaluation, the"
        " paper's published numbers, config, versions and commands. Several runs are"
        " compared on one page."
    )
    parser.epilog = (
        "example: megavis report runs/igpt_demo\n"
        "         megavis report runs/igpt_s runs/igpt_m --html sizes.html"
    )
    add_runs(parser)
    parser.add_argument(
        "--html",
        type=output_file,
        metavar="FILE",
        help="the page; default: report.html in the first RUN",
    )
    parser.set_defaults(run="report:run")


def add_runs_table(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis runs`."""
    parser.description = (
        "List the runs of a folder and of folders in it: paper, step, last training and validation"
        " loss, and whether a run is training, finished, stopped or imported. The run that changed"
        " last comes last."
    )
    parser.epilog = "example: megavis runs runs"
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("runs"), metavar="FOLDER", help="default: runs"
    )
    add_json(parser)
    parser.set_defaults(run="report:list_runs")


def add_config_verbs(parser: argparse.ArgumentParser) -> None:
    """Add the verbs of `megavis config`."""
    parser.description = "Show or compare configs: YAML files, or the configs of run folders."
    parser.epilog = "example: megavis config show yaml_configs/igpt/demo.yaml training.steps=10"
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    text = "write all keys, each with the file and line of its value, or `default`"
    show = verbs.add_parser("show", help=text, description=f"{text[0].upper()}{text[1:]}.")
    show.epilog = "example: megavis config show yaml_configs/igpt/demo.yaml training.steps=10"
    show.add_argument("config", metavar="CONFIG|RUN", help="YAML file or run folder")
    show.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="keys to override"
    )
    show.add_argument(
        "--grammar",
        action="store_true",
        help="write the paper in the words of the grammar, as a config that trains the same run",
    )
    show.set_defaults(run="config:show")
    text = "write the keys whose values differ; exit code 1 if there are any"
    diff = verbs.add_parser("diff", help=text, description=f"{text[0].upper()}{text[1:]}.")
    diff.epilog = "example: megavis config diff yaml_configs/igpt/s_32.yaml runs/igpt_s_32"
    diff.add_argument("first", metavar="CONFIG|RUN", help="YAML file or run folder")
    diff.add_argument("second", metavar="CONFIG|RUN", help="YAML file or run folder")
    diff.set_defaults(run="config:diff")


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis completion`."""
    parser.description = (
        "Write shell code that completes commands, options and files. Needs the extra `completion`."
    )
    parser.epilog = (
        'example: megavis completion bash\n\nin ~/.bashrc: eval "$(megavis completion bash)"'
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="kind of shell")
    parser.set_defaults(run="terminal:write_completion")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis checkpoint`."""
    parser.description = (
        "Manage the checkpoints of a run. They are not tied to a layout: any layout can read them."
    )
    parser.epilog = "example: megavis checkpoint verify runs/igpt_demo"
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = _add_verb(
        verbs, "list", "list steps, layouts that saved them, and sizes", "weights:list_"
    )
    add_json(listing)
    verify = _add_verb(
        verbs, "verify", "read every byte; name damaged files and tensors", "weights:verify"
    )
    verify.add_argument("--step", type=non_negative, help="only this step; default: all")
    prune = _add_verb(
        verbs,
        "prune",
        "delete old checkpoints, but never the latest, the ones in checkpoint.keep_at, and the best"
        " of fine-tuning",
        "weights:prune",
    )
    prune.add_argument(
        "--keep-last", type=positive, required=True, help="number of newest checkpoints to keep"
    )
    prune.add_argument(
        "--keep-every", type=non_negative, default=0, help="also keep every N-th step; 0: none"
    )
    convert = _add_verb(
        verbs, "convert", "re-slice a checkpoint for another layout, offline", "weights:convert"
    )
    convert.add_argument("target", type=Path, help="run folder to write into")
    convert.add_argument("--step", type=non_negative, help="checkpoint; default: the newest")
    convert.add_argument("--tensor", type=positive, default=1, help="tensor-parallel size")
    convert.add_argument("--data", type=positive, default=1, help="data-parallel size")
    convert.set_defaults(check=_check_convert)


def _check_convert(args: argparse.Namespace) -> None:
    require_run_name(args.target)
    # Another step may be converted into the same run folder.
    if not os.path.isdir(args.target):
        require_new(args.target)


def _add_verb(verbs: Any, name: str, text: str, run: str) -> argparse.ArgumentParser:
    example = {
        "list": "",
        "verify": "",
        "prune": " --keep-last 2 --keep-every 10000",
        "convert": " runs/igpt_demo_tp2 --tensor 2",
    }[name]
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example: megavis checkpoint {name} runs/igpt_demo{example}",
    )
    add_run(parser)
    parser.set_defaults(run=run)
    return parser


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis import`."""
    specs = list(paper_imports())
    of_hub = ", ".join(name for spec in specs for name in spec.model_types)
    sentences = [f"{spec.name}: {spec.help}." for spec in specs]
    parser.description = (
        "Read released weights and write a run folder. All tensors must have the names and shapes"
        f" of the network's. huggingface: a folder of the Hub ({of_hub}), or"
        " what `megavis export` wrote. " + " ".join(sentences)
    )
    parser.epilog = (
        "example: megavis import huggingface vit-mae-base runs/vit_mae_base\n"
        "         megavis import imagegpt imagegpt-small runs/imagegpt_small\n"
        "         megavis import givt givt.npz runs/givt --tokenizer runs/givt_vae"
    )
    names = ("huggingface", *(spec.name for spec in specs))
    parser.add_argument("form", choices=names, help="form of the weights")
    parser.add_argument("source", type=Path, metavar="DIR|FILE", help="the released weights")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="new run folder")
    for option in dict.fromkeys(option for spec in specs for option in spec.options):
        forms = [spec.name for spec in specs if option in spec.options]
        parser.add_argument(
            option.name,
            type=option.type,
            choices=option.choices,
            default=option.default,
            metavar=option.metavar,
            help=f"{', '.join(forms)}: {option.help}",
        )
    parser.set_defaults(run="weights:import_run", check=_check_import)


def _check_import(args: argparse.Namespace) -> None:
    of_hub = [spec for spec in paper_imports() if spec.model_types]
    specs = of_hub if args.form == "huggingface" else paper_imports()
    every = {option.name for spec in paper_imports() for option in spec.options}
    taken = {
        option.name
        for spec in specs
        for option in spec.options
        if args.form in ("huggingface", spec.name)
    }
    refuse_options(args, sorted(every - taken), f"to {args.form}")
    require_run_name(args.run_folder)
    require_new(args.run_folder)


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis export`."""
    parser.description = (
        "Write a run's weights, from a checkpoint of any layout, as a folder with a model card."
        " huggingface: what transformers has a class for (ImageGPT, ViTMAE, ViT) by its names and"
        " with its preprocessing, any other run as a folder that megavis.load opens; timm: a Vision"
        " Transformer; safetensors: one file of named tensors. Before a folder of megavis is kept,"
        " the PyTorch code of its card is run on random input and compared with the run."
    )
    parser.epilog = (
        "example: megavis export runs/mae_demo --to huggingface exported/mae_demo\n"
        "         megavis export runs/mae_demo --to timm exported/mae_encoder"
    )
    add_run(parser)
    forms = ("huggingface", "timm", "safetensors")
    parser.add_argument("--to", choices=forms, required=True, help="form")
    parser.add_argument("out", type=Path, metavar="DIR", help="new folder, or .safetensors file")
    add_step(parser)
    parser.set_defaults(run="weights:export", check=lambda args: require_new(args.out))


def add_schema(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis schema`."""
    parser.description = (
        "Write the JSON schema of config files. An editor with a YAML language server"
        " uses it to complete and check keys."
    )
    parser.epilog = "example: megavis schema --out yaml_configs/schema.json"
    parser.add_argument("--out", metavar="FILE", help="default: standard output")
    parser.set_defaults(run="config:write_schema")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megavis doctor`."""
    parser.description = (
        "Check for the software and hardware that megavis can use. Exit code 0 if training can"
        " work, 1 if a requirement is missing."
    )
    parser.epilog = "example: megavis doctor --json"
    add_json(parser)
    parser.set_defaults(run="doctor:run")
