"""Read images to evaluate from an `.npz`, a folder of pictures, or a shard folder.

Images are read in order, one batch at a time, so memory use does not depend on their number. Each
source has a hash, so that results can be traced to it.

Legend: N images, b per batch, H and W pixels.
"""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.data.codecs.crops import cut_center
from megavis.data.codecs.jpeg import DamagedImageError, decode_rgb
from megavis.data.codecs.transforms import Transform
from megavis.data.format.files import sha256_of_file
from megavis.data.format.folders import has_image_suffix, holds_manifest, walk_files
from megavis.data.format.manifest import MANIFEST_NAME, PALETTE_NAME, Manifest
from megavis.data.loading.dataset import ShardDataset
from megavis.tokenizers.palette import Palette

_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")
_SUFFIXES = (".png", *_JPEG)
_MEMBER = "arr_0.npy"


class Images(Protocol):
    """Images of one size, in a fixed order."""

    path: Path
    sha256: str

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Read uint8 `[b, H, W, 3]`; indices int64 `[b]` ascend. Raises UserError."""


class NpzImages:
    """The array `arr_0`, uint8 `[N, H, W, 3]`, ADM's format; raise UserError if there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.sha256 = sha256_of_file(path)
            # Read a stream, since numpy would load all images at once.
            archive = zipfile.ZipFile(path)
            self._file: IO[bytes] = archive.open(_MEMBER)  # noqa: SIM115 - read as long as this lives
            shape, fortran, dtype = _read_header(self._file)
        except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{path} has no array arr_0 of images: {reason}") from None
        if fortran or dtype != np.uint8 or len(shape) != 4 or shape[3] != 3:
            raise UserError(f"arr_0 of {path} is {dtype} {list(shape)}, not uint8 [N, H, W, 3]")
        self._start, self._count = self._file.tell(), shape[0]
        self._image_shape = tuple(shape[1:])

    def __len__(self) -> int:
        return self._count

    def read(self, indices: np.ndarray) -> np.ndarray:
        """See `Images.read`."""
        size = int(np.prod(self._image_shape))
        images = np.empty((len(indices), size), np.uint8)
        try:
            for row, index in enumerate(indices.tolist()):
                self._file.seek(self._start + index * size)
                images[row] = np.frombuffer(self._file.read(size), np.uint8)
        except (zipfile.BadZipFile, EOFError, ValueError) as error:
            raise UserError(f"{self.path} is damaged or truncated: {error}") from None
        return images.reshape(-1, *self._image_shape)


class FolderImages:
    """All PNG and JPEG files in a folder and its subfolders, by name.

    Args:
        image_size: size to which the shorter side is resized and the center is cropped; None if all
            images have the same size already.

    Raises:
        UserError: there are none, a folder cannot be listed, or there are images of other formats.
    """

    def __init__(self, path: Path, image_size: int | None = None) -> None:
        self.path, self._size = path, image_size
        files = [path / name for name in walk_files(path)]
        self._files = sorted(file for file in files if file.suffix.lower() in _SUFFIXES)
        others = sorted(file for file in {*files} - {*self._files} if has_image_suffix(file.name))
        if others:
            are = f"and {len(others) - 1} more are images" if others[1:] else "is an image"
            raise UserError(
                f"{others[0]} {are}, and only PNG and JPEG files are read: convert them"
            )
        if not self._files:
            raise UserError(f"{path} has no PNG or JPEG files, no shards and no run")
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(f"{file.relative_to(path)}\0{sha256_of_file(file)}\n".encode())
        self.sha256 = digest.hexdigest()
        self._shape = self._decode(self._files[0]).shape

    @property
    def num_jpeg(self) -> int:
        """Number of files that are stored with loss, by their names."""
        return sum(file.suffix.lower() in _JPEG for file in self._files)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """See `Images.read`."""
        images = np.empty((len(indices), *self._shape), np.uint8)
        for row, index in enumerate(indices.tolist()):
            image = self._decode(self._files[index])
            if image.shape != self._shape:
                raise UserError(
                    f"{self._files[index]} has {_size_of(image.shape)} pixels, others in"
                    f" {self.path} {_size_of(self._shape)}; give --image-size"
                )
            images[row] = image
        return images

    def _decode(self, file: Path) -> np.ndarray:
        try:
            image = decode_rgb(file.read_bytes())
        except DamagedImageError as error:
            raise UserError(f"{file} is not an image, or damaged: {error}") from None
        if self._size is None:
            return image
        return cut_center(image, short_side=self._size, size=self._size)


class ShardImages:
    """The images of jpeg or palette shards.

    Attributes:
        labels: int64 `[N]`; -1 for images without a label.

    Raises:
        UserError: the shards are of another kind, or images differ in size without `image_size`.
    """

    def __init__(self, path: Path, image_size: int | None = None) -> None:
        manifest = Manifest.read(path)
        self.path, self.sha256 = path, sha256_of_file(path / MANIFEST_NAME)
        self._palette: Palette | None = None
        transform = None
        if manifest.kind == "palette":
            if image_size not in (None, manifest.image_size):
                raise UserError(
                    f"{path} holds ids of images of {manifest.image_size}², as they are"
                )
            self._palette = Palette.load(path / PALETTE_NAME)
        elif manifest.kind == "jpeg":
            size = image_size or manifest.image_size
            if size is None:
                raise UserError(f"{path} holds images of several sizes; give --image-size")
            transform = Transform(size, crop="center" if image_size else "none")
        else:
            raise UserError(f"{path} holds {manifest.kind} shards; images are in jpeg and palette")
        self._dataset = ShardDataset(path, transform)
        self.labels, self.class_names = self._dataset.labels, self._dataset.class_names

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """See `Images.read`."""
        samples, _ = self._dataset.read(indices)
        if self._palette is None:
            return samples
        side = math.isqrt(samples.shape[1])
        return self._palette.decode(samples).reshape(-1, side, side, 3)


def open_images(path: Path, *, image_size: int | None = None) -> Images:
    """Open images of any of the three kinds. Raises UserError: there are none."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if path.is_dir():
        kind = ShardImages if holds_manifest(path) else FolderImages
        return kind(path, image_size)
    if image_size is not None:
        raise UserError(f"--image-size is for folders; the images of {path} are not resized")
    return NpzImages(path)


def holds_array(path: Path, name: str) -> bool:
    """Return whether the file is an `.npz` with this array."""
    try:
        with zipfile.ZipFile(path) as file:
            return f"{name}.npy" in file.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def image_batches(images: Images, *, num_images: int, batch_size: int) -> Iterator[Tensor]:
    """Yield batches of `num_images` evenly spaced images, uint8 `[b, H, W, 3]`."""
    indices = np.arange(num_images, dtype=np.int64) * len(images) // num_images
    for start in range(0, num_images, batch_size):
        yield torch.from_numpy(images.read(indices[start : start + batch_size]))


def _read_header(file: IO[bytes]) -> tuple[Any, ...]:
    """Read the header of a `.npy` stream: shape, whether Fortran order, and dtype."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def _size_of(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}×{shape[1]}"
