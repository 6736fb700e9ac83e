"""megavis against `transformers` and timm: the same training, step by step.

    OMP_NUM_THREADS=1 python -m benchmarks.peers --images shards/train --tokens shards/tokens

The first 100 steps must agree within 1e-4; otherwise the exit code is 1. Rates are images per
processor second of the thread that trains, which means something only with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.peers.sizes import Sizes
from benchmarks.timing import machine
from megavis.config.errors import UserError

KINDS = ("mae", "igpt", "finetune")
_NEEDS = {"mae": "transformers", "igpt": "transformers", "finetune": "timm"}
_OPTIONS = tuple(
    field.name for field in fields(Sizes) if field.type == "int" and field.name != "seed"
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=_title())
    made.add_argument("--images", type=Path, help="labelled JPEG shards, for mae and finetune")
    made.add_argument("--tokens", type=Path, help="palette shards, for igpt")
    made.add_argument(
        "--only", nargs="+", choices=KINDS, help="default: all whose shards are given"
    )
    default = Sizes()
    for name in _OPTIONS:
        made.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(default, name),
            help=f"default: {getattr(default, name)}",
        )
    made.add_argument("--rate", type=float, default=default.rate, help="peak learning rate")
    made.add_argument("--seed", type=int, nargs="+", default=[0], help="one run for each")
    made.add_argument(
        "--control",
        action="store_true",
        help="also train the peer from weights that differ by one rounding, to see how far rounding"
        " alone leads at this rate",
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="also write all losses here")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Compare, print a table, and return 0 if all agree."""
    made = parser()
    options = made.parse_args(words)
    folders = {"mae": options.images, "igpt": options.tokens, "finetune": options.images}
    kinds = options.only or [kind for kind in KINDS if folders[kind] is not None]
    if not kinds or any(folders[kind] is None for kind in kinds):
        made.error("give --images for mae and finetune, --tokens for igpt")
    for kind in kinds:
        _need(_NEEDS[kind])
    # Imported here: importing torch and DeepSpeed takes seconds, which --help should not need.
    from megavis.parallel.context import open_context
    from megavis.parallel.launch import read_launch

    context = open_context(read_launch({}), device="cpu")
    results = []
    for kind in kinds:
        for seed in options.seed:
            sizes = Sizes(
                **{name: getattr(options, name) for name in _OPTIONS},
                rate=options.rate,
                seed=seed,
                control=options.control,
            )
            module = importlib.import_module(f"benchmarks.peers.{kind}")
            results.append(module.run(sizes, folders[kind], context))
            print(_lines({**results[-1].row(), "seed": seed}), flush=True)
    timm = {"timm": importlib.metadata.version("timm")} if "finetune" in kinds else {}
    facts = {**machine(), **timm, "processor": _processor()}
    print(_lines(facts))
    if options.json is not None:
        _write(options.json, facts, results)
    return 0 if all(result.agrees for result in results) else 1


def _write(path: Path, facts: dict[str, Any], results: Sequence[Any]) -> None:
    rows = [{**result.row(), "losses": result.losses} for result in results]
    path.write_text(json.dumps({"about": facts, "rows": rows}, indent=1) + "\n")


def _lines(facts: dict[str, Any]) -> str:
    texts = {k: f"{v:.6g}" if isinstance(v, float) else str(v) for k, v in facts.items()}
    return "\n".join(f"{key + ':':34}{text}" for key, text in texts.items()) + "\n"


def _processor() -> str:
    """Return the processor's name, if Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "unknown")


def _need(package: str) -> None:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"this benchmark compares with {package}: pip install {package}")


def _title() -> str:
    assert __doc__ is not None
    return __doc__.splitlines()[0]


def _run() -> int:
    """Run the command; a user's mistake is one line and the exit code 2."""
    try:
        return main()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(_run())
