"""`--measure`: measure images for `filter` while their shards are written.

The source is read once: the shards and measurements of all images are made from the same bytes,
`filter` finds the measurements and decides, and `reshard --selection` copies the images it keeps.
The measurements are byte for byte those that `filter` would make itself.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.measurements import MeasurementEncoder, check_installed
from data_tools.selection import MEASURED
from data_tools.shard_tasks import Encoded, ShardEncoder
from data_tools.sources import SourceImage
from megavis.config.errors import UserError


def add_measure_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option of `measuring_too`."""
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="FOLDER",
        help="also measure the images for `filter --out FOLDER`, which then does not read them;"
        " `reshard --selection FOLDER` copies what it keeps",
    )


def measuring_too(encoder: ShardEncoder, arguments: argparse.Namespace) -> ShardEncoder:
    """Return the encoder, which also measures if the command says so. Raises UserError."""
    if arguments.measure is None:
        return encoder
    check_installed()
    if arguments.split != "all" or arguments.selection or arguments.only_classes:
        raise UserError(
            "--measure measures all images, as `filter` does: remove --split, --selection and"
            " --only-classes"
        )
    return MeasuringEncoder(encoder, str((arguments.measure / MEASURED).resolve()))


@dataclass(frozen=True)
class MeasuringEncoder(ShardEncoder):
    """Encodes images, and measures them into a separate folder, given as an absolute path."""

    inner: ShardEncoder
    measured: str
    measure: MeasurementEncoder = MeasurementEncoder()

    @property
    def suffix(self) -> str:
        """Suffix of the encoded samples."""
        return self.inner.suffix

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the encoder, and the one of the measurements."""
        return (*self.inner.folders, self.measured)

    @property
    def batch_size(self) -> int:
        """Images per call, of the encoder."""
        return self.inner.batch_size

    def _of(self, folder: str) -> ShardEncoder:
        return self.measure if folder == self.measured else self.inner

    def suffix_in(self, folder: str) -> str:
        """Return the suffix of samples or measurements."""
        return self._of(folder).suffix_in(folder)

    def has_manifest(self, folder: str) -> bool:
        """Measurements have none."""
        return folder != self.measured

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes of `folder`."""
        return self._of(folder).settings(folder)

    def prepare(self, directory: Path) -> None:
        """Prepare a shard folder."""
        self._of(str(directory)).prepare(directory)

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return payloads and measurement of each image; either may be rejected separately."""
        both = zip(self.inner.encode(pictures), self.measure.encode(pictures), strict=True)
        count = len(self.inner.folders)
        return [[*_each(encoded, count), *_each(measured, 1)] for encoded, measured in both]

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of `folder`."""
        return self._of(folder).describe(folder)


def _each(encoded: Encoded, count: int) -> list[Any]:
    """Return the result for each of `count` folders."""
    return [encoded] * count if isinstance(encoded, Exception) else list(encoded)
