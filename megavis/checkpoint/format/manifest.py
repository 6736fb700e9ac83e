"""The `manifest.json` of a checkpoint folder, and the detection of damaged files.

A logical tensor has the same name and shape in every layout. It is stored as slices along at most
one dimension; each slice is written by one process.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
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

from megavis.config.errors import NOT_ALLOWED, UserError
from megavis.data.format.files import sha256_of_file, write_atomically
from megavis.parallel.progress_bar import shown

MANIFEST = "manifest.json"
CHECKSUMS = "crc32"
"""Key in the safetensors header: CRC-32 of each tensor, as JSON."""
_CHECKSUM = "checksum"

TensorKind = Literal["weight", "exp_avg", "exp_avg_sq", "momentum", "average"]
"""Weights, Adam's two moments, LARS's momentum, and the EMA of the weights."""
_PIECE = 1 << 24
_LENGTH_BYTES = 8


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorSlice(_Part):
    """A contiguous slice of a logical tensor."""

    file: str
    key: str
    start: int
    length: int


class LogicalTensor(_Part):
    """A parameter or one of its optimizer states, in float32."""

    shape: tuple[int, ...]
    dimension: int | None
    """Dimension that is sliced; None for a single slice."""
    slices: tuple[TensorSlice, ...]

    @classmethod
    def whole(cls, shape: Sequence[int], file: str, key: str) -> LogicalTensor:
        """Return a tensor in a single slice, which readers can cut along any dimension."""
        piece = TensorSlice(file=file, key=key, start=0, length=shape[0] if shape else 1)
        return cls(shape=tuple(shape), dimension=None, slices=(piece,))


class StoredFile(_Part):
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


class LossScale(_Part):
    """State of fp16's dynamic loss scale."""

    scale: float
    iteration: int
    """Number of steps, including skipped ones."""
    last_overflow: int
    """Last step whose gradients overflowed; -1 if none did."""
    hysteresis: int
    """Overflows left until the scale is reduced."""


class LossHistory(_Part):
    """Loss history for the detection of bad steps."""

    recent: tuple[float, ...] = ()
    """Losses of the last good steps, oldest first."""
    bad_since: int | None = None
    """First step of the current streak of bad steps, counted from 1; None after a good one."""
    bad_steps: int = 0
    """Bad steps in that streak; fp16 also skips others, which do not count."""


class RollbackRecord(_Part):
    """A rollback to this checkpoint after bad steps, whose data is skipped."""

    times: int
    """Number of rollbacks so far."""
    first_bad_step: int
    last_bad_step: int
    """Last bad step before the most recent rollback, counted from 1."""


class CheckpointManifest(_Part):
    """The content of `manifest.json`."""

    version: Literal[1] = 1
    step: int
    """Optimizer steps taken."""
    samples_seen: int
    """Images trained on; with the seed and `batches_skipped`, this determines the data position."""
    batches_skipped: int = 0
    """Batches of the sample order skipped so far: step t, counted from 0, reads batch
    t + `batches_skipped`."""
    losses: LossHistory = LossHistory()
    rolled_back: RollbackRecord | None = None
    """Set if the run was rolled back to this checkpoint."""
    optimizer_step: int
    """Adam's step count; lower than `step` if fp16 skipped steps."""
    loss_scale: LossScale | None = None
    """Set for fp16 only."""
    seed: int
    tokenizer: str | None
    """SHA-256 of the tokenizer that made the training data; where inputs, targets or condition have
    tokenizers of their own, one of all of them."""
    data: str | None = None
    """SHA-256 of the training data, `Manifest.content`; none for released weights."""
    classes: tuple[str, ...] = ()
    """Names, by label, of the classes that the network reads or predicts; empty if there are none,
    and for released weights that do not name them."""
    words: dict[str, Any] | None = None
    """The paper in words, which give the weights their meaning; None for an autoencoder, and in
    checkpoints from before words were recorded."""
    origin: str | None = None
    """Where the imported weights that a run began with came from, in words; None for others."""
    layout: dict[str, int]
    """Layout of the job that saved it; informational, not needed for loading."""
    files: dict[str, StoredFile]
    tensors: dict[str, LogicalTensor]
    """Tensors by `<kind>/<parameter name>`."""

    @model_serializer(mode="wrap")
    def _seal(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Add a checksum of the content, to detect changes."""
        tree = plain(self)
        # The manifest holds the SHA-256 of the files, but nothing else would detect a flipped bit
        # in the manifest itself.
        return {**tree, _CHECKSUM: _checksum(tree)}

    @model_validator(mode="before")
    @classmethod
    def _check_seal(cls, tree: Any) -> Any:
        """Verify the checksum, which old manifests do not have."""
        if not isinstance(tree, dict) or _CHECKSUM not in tree:
            return tree
        content = {key: value for key, value in tree.items() if key != _CHECKSUM}
        if tree[_CHECKSUM] != _checksum(content):
            raise ValueError("its content has changed since it was written")
        return content


def _checksum(tree: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Write a checkpoint's manifest atomically."""
    write_atomically(folder / MANIFEST, manifest.model_dump_json().encode())


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest. Raises UserError if it is missing or damaged."""
    path = folder / MANIFEST
    try:
        return CheckpointManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: missing, so the checkpoint is incomplete") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: damaged at {place or 'the top'}: {first['msg']}") from None


def file_damage(path: Path, stored: StoredFile) -> str | None:
    """Describe how a checkpoint file differs from its size and SHA-256; None if it does not."""
    if shortfall := size_damage(path, stored):
        return shortfall
    if sha256_of_file(path) != stored.sha256:
        return (
            f"{path}: its SHA-256 differs from the manifest, so it has changed since it was saved"
        )
    return None


def size_damage(path: Path, stored: StoredFile) -> str | None:
    """Describe how a checkpoint file, which is not read, is missing or truncated; None if not."""
    if not path.exists():
        return f"{path}: missing, although the checkpoint's manifest lists it"
    size = path.stat().st_size
    if size != stored.size:
        return f"{path}: has {size} bytes, the manifest says {stored.size}; it was truncated"
    return None


def damages(folder: Path) -> Iterator[str]:
    """Read every byte of a checkpoint and yield a message for each damaged file.

    In a file with a wrong SHA-256, tensors are compared with the checksums in the file's header. A
    file that the disk cannot read is damaged too. Raises OSError if a file may not be read.
    """
    try:
        manifest = read_manifest(folder)
    except UserError as error:
        yield str(error)
        return
    except OSError as error:
        yield _unreadable(folder / MANIFEST, error)
        return
    total = sum(stored.size for stored in manifest.files.values())
    files = shown(
        sorted(manifest.files.items()),
        f"verifying {folder.name}",
        total=total,
        unit="B",
        size=lambda file: file[1].size,
    )
    for name, stored in files:
        path = folder / name
        try:
            if damage := file_damage(path, stored):
                yield f"{damage}: {', '.join(_damaged_tensors(path, stored))}"
        except OSError as error:
            yield _unreadable(path, error)


def _unreadable(path: Path, error: OSError) -> str:
    """Describe an error of the disk; raises one of permissions, which says nothing of the file."""
    if error.errno in NOT_ALLOWED:
        raise error
    return f"{path}: cannot be read: {error.strerror or error}"


def _damaged_tensors(path: Path, stored: StoredFile) -> list[str]:
    """Return the names of the tensors whose bytes have changed."""
    if not path.is_file() or path.stat().st_size != stored.size:
        return ["the whole file"]
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        try:
            # A damaged length could request more memory than there is.
            if length > stored.size:
                raise ValueError
            header = json.loads(file.read(length))
            checksums = json.loads(header.pop("__metadata__", {}).get(CHECKSUMS, "{}"))
            found = [
                key
                for key, entry in header.items()
                if key in checksums
                and _checksum_at(path, _LENGTH_BYTES + length, entry["data_offsets"])
                != checksums[key]
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            # Not JSON, or not of the expected form.
            return ["its header"]
    if found or checksums:
        return found or ["its header"]
    return ["any tensor: the file has no checksums of tensors"]


def _checksum_at(path: Path, start: int, offsets: list[int]) -> int:
    """Return the CRC-32 of the bytes `[begin, end)` after `start`."""
    begin, end = offsets
    checksum = 0
    with path.open("rb") as file:
        file.seek(start + begin)
        while begin < end:
            piece = file.read(min(_PIECE, end - begin))
            if not piece:
                break
            checksum, begin = zlib.crc32(piece, checksum), begin + len(piece)
    return checksum
