"""`megavis export` and `megavis checkpoint convert`: a run's weights in other forms."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file

from megavis.checkpoint.format.folder import step_folder
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.checkpoint.state import convert as conversion
from megavis.commands.checkpoint import chosen_step
from megavis.commands.quiet import quietly
from megavis.config.load import dump_config
from megavis.config.tokenizers import load_run_config
from megavis.data.format.files import write_atomically
from megavis.data.format.manifest import PALETTE_NAME
from megavis.hub.folders import write_huggingface, write_timm
from megavis.notebook import Run


def run(args: argparse.Namespace) -> int:
    """Export; the output appears only when it is complete and agrees with the run.

    Raises:
        UserError: the run cannot be opened, or has no such form.
    """
    with quietly():
        opened = Run.open(args.run_folder, step=args.step, device="cpu")
    if args.to == "safetensors":
        weights = read_weights(step_folder(opened.folder, opened.step))
        with renamed_when_complete(args.out) as partial:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial)
        sys.stdout.write(f"{args.out}: {len(weights)} tensors\n")
        return 0
    write = {"huggingface": write_huggingface, "timm": write_timm}[args.to]
    with renamed_when_complete(args.out) as partial:
        exported = write(opened, partial)
    sys.stdout.write(f"{args.out}: opens with {exported.form}\n")
    if exported.difference is not None:
        sys.stdout.write(f"  differs from the run by {exported.difference:.1e} on random input\n")
    return 0


@contextlib.contextmanager
def renamed_when_complete(target: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is renamed to `target` after the block.

    It is removed after an error, and by the next call if the process was killed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    _remove(partial)
    try:
        yield partial
        os.rename(partial, target)
    except BaseException:
        _remove(partial)
        raise


def _remove(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def convert(args: argparse.Namespace) -> int:
    """Write the checkpoint into another run folder, with the run's config under its name."""
    source = step_folder(args.run_folder, chosen_step(args.run_folder, args.step))
    contents = _run_files(args.run_folder, args.target)
    written = conversion.convert(source, args.target, tensor_size=args.tensor, data_size=args.data)
    for name, content in contents.items():
        if not (args.target / name).exists():
            write_atomically(args.target / name, content)
    sys.stdout.write(f"{written}\n")
    return 0


def _run_files(run_folder: Path, target: Path) -> dict[str, bytes]:
    """Return the config and the palette, if there are any, for a run in another folder."""
    contents = {}
    if (run_folder / "config.yaml").exists():
        place = {"name": target.name, "output": str(target.parent)}
        config = load_run_config(run_folder).model_copy(update=place)
        contents["config.yaml"] = dump_config(config).encode()
    if (run_folder / PALETTE_NAME).exists():
        contents[PALETTE_NAME] = (run_folder / PALETTE_NAME).read_bytes()
    return contents
