"""The `manifest.json` of a checkpoint folder.

A logical tensor has one name and one shape in every layout. It is stored as slices along at most
one dimension, each written by one process of the layout that saved it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file

MANIFEST = "manifest.json"
CHECKSUMS = "crc32"
"""In the header of a checkpoint's files: the CRC-32 of each tensor, as JSON."""
_CHECKSUM = "checksum"

TensorKind = Literal["weight", "exp_avg", "exp_avg_sq", "momentum", "average"]
"""Weights, Adam's two moments, LARS's one, and the moving average of the weights."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorSlice(_Part):
    """A contiguous piece of a logical tensor."""

    file: str
    key: str
    start: int
    length: int


class LogicalTensor(_Part):
    """A parameter or one of its optimizer states, in float32."""

    shape: tuple[int, ...]
    dimension: int | None
    """Along which the slices lie; None for one whole slice."""
    slices: tuple[TensorSlice, ...]


class StoredFile(_Part):
    """A file's size in bytes and SHA-256."""

    size: int
    sha256: str


class LossScale(_Part):
    """State of fp16's dynamic loss scale: it grows after enough steps without an overflow."""

    scale: float
    iteration: int
    """Steps that it has seen, skipped ones too."""
    last_overflow: int
    """The last of them whose gradients overflowed; -1 when none did."""
    hysteresis: int
    """Overflows that are still forgiven before the scale falls, plus one."""


class LossHistory(_Part):
    """What a run knows of its losses when it judges the next one."""

    recent: tuple[float, ...] = ()
    """Losses of the last good steps, oldest first."""
    bad_since: int | None = None
    """The first of the bad steps in a row that it ends with, counted from 1; None after a good one.
    """


class RollbackRecord(_Part):
    """That training came back to a checkpoint from bad steps, and leaves data out from here on."""

    times: int
    """So many times by now."""
    first_bad_step: int
    last_bad_step: int
    """Counted from 1, of the last time."""


class CheckpointManifest(_Part):
    """The whole checkpoint."""

    version: Literal[1] = 1
    step: int
    """Optimizer steps taken."""
    samples_seen: int
    """Images trained on; with the seed and `batches_skipped` this is the whole data position."""
    batches_skipped: int = 0
    """Batches of the sample order that were left out so far: step t, counted from 0, reads batch
    t + this."""
    losses: LossHistory = LossHistory()
    went_back: RollbackRecord | None = None
    """Present where the run went back to this very checkpoint."""
    optimizer_step: int
    """Adam's own count, which is lower than `step` where fp16 skipped steps."""
    loss_scale: LossScale | None = None
    """None in other precisions than fp16."""
    seed: int
    tokenizer: str | None
    """SHA-256 of the palette or VAE that made the training data."""
    layout: dict[str, int]
    """The layout that saved it, for people; reading does not need it."""
    files: dict[str, StoredFile]
    tensors: dict[str, LogicalTensor]
    """By `<kind>/<parameter name>`."""

    @model_serializer(mode="wrap")
    def _seal(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write a checksum of all else, so that a changed manifest does not pass for another."""
        tree = plain(self)
        return {**tree, _CHECKSUM: _checksum(tree)}

    @model_validator(mode="before")
    @classmethod
    def _check_seal(cls, tree: Any) -> Any:
        """Compare it; manifests from before it was written have none."""
        if not isinstance(tree, dict) or _CHECKSUM not in tree:
            return tree
        content = {key: value for key, value in tree.items() if key != _CHECKSUM}
        if tree[_CHECKSUM] != _checksum(content):
            raise ValueError("its content has changed since it was written")
        return content


def _checksum(tree: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest.

    Raises:
        UserError: when it is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        return CheckpointManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so this is no complete checkpoint") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: damaged at {place or 'the top'}: {first['msg']}") from None


def file_damage(path: Path, stored: StoredFile) -> str | None:
    """Return what is wrong with a file of a checkpoint; None where its size and SHA-256 agree."""
    if not path.exists():
        return f"{path}: missing, although the checkpoint's manifest lists it"
    size = path.stat().st_size
    if size != stored.size:
        return f"{path}: has {size} bytes where the manifest says {stored.size}; it was cut off"
    if sha256_of_file(path) != stored.sha256:
        return (
            f"{path}: its SHA-256 is not the manifest's, so its bytes have changed since it was"
            " saved"
        )
    return None
