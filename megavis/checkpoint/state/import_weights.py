"""Write checkpoints from whole named tensors, for imported weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megavis.checkpoint.format.folder import partial_folder, publish
from megavis.checkpoint.format.manifest import (
    MANIFEST,
    CheckpointManifest,
    LogicalTensor,
    TensorSlice,
)
from megavis.checkpoint.state.save import write_tensors
from megavis.data.format.files import write_atomically


def write_weights(
    run_folder: Path, weights: Mapping[str, Tensor], *, seed: int, tokenizer: str | None
) -> Path:
    """Write a checkpoint of step 0 that holds weights alone; training begins Adam anew from it.

    Args:
        run_folder: the run; it must not have a checkpoint of step 0 yet.
        weights: float32 tensors by parameter name.
        seed: of the run's config.
        tokenizer: SHA-256 of the palette.
    """
    partial, name = partial_folder(run_folder, 0), "weights.safetensors"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    keyed = {f"weight/{key}": tensor for key, tensor in weights.items()}
    stored = write_tensors(partial / name, keyed)
    manifest = CheckpointManifest(
        step=0,
        samples_seen=0,
        optimizer_step=0,
        seed=seed,
        tokenizer=tokenizer,
        layout={},
        files={name: stored},
        tensors={key: _one_slice(tensor, name, key) for key, tensor in sorted(keyed.items())},
    )
    write_atomically(partial / MANIFEST, manifest.model_dump_json().encode())
    return publish(run_folder, 0)


def _one_slice(tensor: Tensor, file: str, key: str) -> LogicalTensor:
    # Cut by rows or columns, whichever a layout needs: the reader takes
    # any window of a tensor that lies in one slice.
    piece = TensorSlice(file=file, key=key, start=0, length=tensor.shape[0])
    return LogicalTensor(shape=tuple(tensor.shape), dimension=None, slices=(piece,))
