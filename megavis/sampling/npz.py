"""Generate many images into one `.npz`, the format of the evaluation suite of ADM.

("Diffusion Models Beat GANs on Image Synthesis".) The file holds `arr_0`, uint8 `[N, H, W, 3]`.
Batches are distributed over the processes, and each is written to its own file; an interrupted job
resumes with the missing ones.

Legend: N images, b images of a batch, H and W pixels.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megavis.config.errors import UserError
from megavis.data.format.files import atomic_writer, write_atomically
from megavis.parallel.context import ParallelContext

Draw = Callable[[Tensor], Tensor]
"""Maps indices of images, int64 `[b]`, to images uint8 `[b, H, W, 3]`."""


def write_npz(
    path: Path,
    draw: Draw,
    *,
    num_images: int,
    batch_size: int,
    context: ParallelContext,
    settings: Mapping[str, Any],
) -> None:
    """Generate N images into `path`; collective over all processes of the job.

    Args:
        path: the file; batches are kept in `<path>.parts` until all are complete.
        settings: JSON values that determine the images, including the network.

    Raises:
        UserError: existing batches were generated with other settings.
    """
    folder = path.with_name(f"{path.name}.parts")
    wanted = json.dumps({**settings, "num_images": num_images, "batch_size": batch_size})
    _check_settings(folder / "settings.json", wanted, context)
    starts = range(0, num_images, batch_size)
    # All processes list before any writes: those that share layers must run the same batches.
    missing = [start for start in starts if not _part(folder, start).exists()]
    dist.barrier()
    for start in missing[context.data.rank :: context.data.size]:
        images = draw(torch.arange(start, min(start + batch_size, num_images)))
        if context.tensor.rank == context.context.rank == 0:
            with atomic_writer(_part(folder, start)) as file:
                np.save(file, images.cpu().numpy())
    dist.barrier()
    if context.is_main:
        joined = np.concatenate([np.load(_part(folder, start)) for start in starts])
        with atomic_writer(path) as file:
            np.savez(file, arr_0=joined)
        shutil.rmtree(folder)
    dist.barrier()


def _check_settings(path: Path, wanted: str, context: ParallelContext) -> None:
    if context.is_main and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, wanted.encode())
    dist.barrier()
    if path.read_text() != wanted:
        raise UserError(
            f"{path.parent} holds images generated with other settings ({path.read_text()});"
            " delete it or choose another file"
        )


def _part(folder: Path, start: int) -> Path:
    return folder / f"{start:09d}.npy"
