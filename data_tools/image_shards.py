"""`jpeg` and `pairs`: shards of images as JPEG files, alone or with target images as PNG.

`jpeg` with `--size` resizes every image, crops it to a square and encodes it again, for any number
of sizes in one decode. Without it, JPEG files are kept byte for byte and only other formats are
encoded; training crops them. With `--lossless`, images are encoded as PNG, under the same suffix.

`pairs` combines two folders of files with equal names. The second has the targets to predict from
the first: maps of labels or depths, other colours. Targets are stored losslessly and resized to the
nearest pixel, since interpolated label colours would be different labels. `TargetEncoder`, for the
verbs `maps`, keeps the original size.
"""

from __future__ import annotations

import argparse
import io
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_tools.decode import JPEG_START, RefusedImageError, decode_image
from data_tools.jobs import add_job_arguments, run_job
from data_tools.measuring import add_measure_argument, measuring_too
from data_tools.resize import (
    CROP,
    Library,
    add_resize_argument,
    check_aspect,
    nearest_square,
    preparation,
    resize_and_crop,
    resize_name,
    side,
)
from data_tools.shard_tasks import Encoded, ShardEncoder, encode_each
from data_tools.source_formats import (
    add_classes_argument,
    add_source_arguments,
    open_source,
    read_class_names,
)
from data_tools.sources import FileSource, SourceFile, SourceImage, list_images, read_file
from data_tools.stored_out import refuse_nested
from data_tools.user_text import whole_number
from megavis.config.errors import UserError
from megavis.data.codecs.jpeg import join, split
from megavis.data.codecs.label_maps import to_pixels
from megavis.data.format.manifest import SUFFIXES


def add_jpeg_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `jpeg` to its parser."""
    add_source_arguments(parser)
    parser.add_argument(
        "--size",
        type=side,
        metavar="N",
        nargs="+",
        default=(),
        help="side of the stored squares; JPEG files that have it are stored unchanged, others "
        "resized and encoded; several sizes get a folder each below --out; without it, JPEG files "
        "are stored unchanged and training crops (data.crop)",
    )
    add_resize_argument(parser)
    encoding = parser.add_mutually_exclusive_group()
    add_quality_argument(encoding)
    encoding.add_argument(
        "--lossless",
        dest="quality",
        action="store_const",
        const=None,
        help="encode images as PNG; for those published as raw pixels, such as CIFAR's",
    )
    add_measure_argument(parser)
    add_job_arguments(parser, stores=True)


def run_jpeg(arguments: argparse.Namespace) -> int:
    """Write the shard folders. Raises UserError and OSError."""
    sizes = tuple(dict.fromkeys(arguments.size))
    encoder = measuring_too(JpegEncoder(sizes, arguments.quality, arguments.resize), arguments)
    return run_job(open_source(arguments), encoder, arguments, label="jpeg")


def add_quality_argument(parser: argparse._ActionsContainer) -> None:
    """Add the option for the quality of encoded images."""
    parser.add_argument(
        "--quality",
        type=whole_number(1, 100),
        metavar="N",
        default=95,
        help="JPEG quality of encoded images, 1 to 100",
    )


@dataclass(frozen=True)
class JpegEncoder(ShardEncoder):
    """Write JPEG files; every image is decoded to reject those that training cannot read.

    JPEG files of the wanted size, one of `sizes`, are kept unchanged; so are all of them without
    `sizes`. Without `quality`, images to be encoded become PNG files. `library` resizes.
    """

    sizes: tuple[int, ...]
    quality: int | None
    library: Library
    suffix: str = SUFFIXES["jpeg"]

    @property
    def folders(self) -> tuple[str, ...]:
        """One folder per size, or `--out` itself for a single one."""
        return tuple(map(str, self.sizes)) if len(self.sizes) > 1 else ("",)

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        return {"jpeg": [self._size(folder), self.quality], "preparation": self._preparation()}

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return one JPEG file per image and folder."""
        return encode_each(
            pictures, lambda image: [[payload] for payload in self._payloads(image.content)]
        )

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a JPEG data set."""
        return {
            "kind": "jpeg",
            "image_size": self._size(folder),
            "preparation": self._preparation(),
        }

    def _size(self, folder: str) -> int | None:
        return int(folder) if folder else next(iter(self.sizes), None)

    def _preparation(self) -> dict[str, Any]:
        if not self.sizes:
            return preparation()
        return preparation(resize_name(self.library), CROP, library=self.library)

    def _payloads(self, content: bytes) -> list[bytes]:
        image = decode_image(content)
        if self.sizes:
            return [self._square(content, image, size) for size in self.sizes]
        check_aspect(image)  # training resizes it
        return [kept_jpeg(content, image, self.quality)]

    def _square(self, content: bytes, image: np.ndarray, size: int) -> bytes:
        if image.shape[:2] == (size, size):
            return kept_jpeg(content, image, self.quality)
        return encode(resize_and_crop(image, size=size, library=self.library), self.quality)


def kept_jpeg(content: bytes, image: np.ndarray, quality: int | None) -> bytes:
    """Return a JPEG file unchanged, and `encode` others from their pixels uint8 `[h, w, 3]`.

    What `decode_image` reads of a JPEG file, training reads too.
    """
    return content if content.startswith(JPEG_START) else encode(image, quality)


def encode(image: np.ndarray, quality: int | None) -> bytes:
    """Encode uint8 `[h, w, 3]` as JPEG, or as PNG without a quality, grey if the image is."""
    if quality is not None:
        return encode_jpeg(image, quality)
    is_grey = (image[..., :1] == image[..., 1:]).all()
    return encode_png(image[..., 0] if is_grey else image)


def encode_jpeg(image: np.ndarray, quality: int) -> bytes:
    """Encode uint8 `[h, w, 3]` as a JPEG file."""
    file = io.BytesIO()
    # Full colour resolution: chroma subsampling would be visible at the small sizes of demos.
    Image.fromarray(image).save(file, "JPEG", quality=quality, subsampling=0)
    return file.getvalue()


_SIZES_DIFFER = "image and target differ in size"
_NO_TARGET, _NO_IMAGE = "image without a target", "target without an image"
_SEVERAL = "several files of this name"


def add_pairs_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `pairs` to its parser."""
    parser.add_argument(
        "images", type=Path, help="a folder (the first folder on the path to a file is its class)"
    )
    parser.add_argument(
        "targets", type=Path, help="a folder with files of the same names except for suffixes"
    )
    add_classes_argument(parser)
    parser.add_argument(
        "--size", type=side, metavar="N", required=True, help="side of the stored squares"
    )
    parser.add_argument(
        "--target-resize",
        choices=("nearest", "bicubic"),
        default="nearest",
        help="nearest keeps the colours of a target, as needed for labels; bicubic: as for images",
    )
    add_resize_argument(parser)
    add_quality_argument(parser)
    add_job_arguments(parser, stores=True)


def run_pairs(arguments: argparse.Namespace) -> int:
    """Write the shard folder. Raises UserError and OSError."""
    refuse_nested(arguments.targets, arguments.out, "the targets")
    images = list_images(arguments.images, class_names=read_class_names(arguments.classes_from))
    source = pair_up(images, list_images(arguments.targets))
    encoder = PairEncoder(
        arguments.size, arguments.quality, arguments.target_resize, arguments.resize
    )
    return run_job(source, encoder, arguments, label="pairs")


@dataclass(frozen=True, slots=True)
class PairFile(SourceFile):
    """An image, and the path of its target."""

    target: str = ""


def pair_up(images: FileSource, targets: FileSource) -> FileSource:
    """Match images with targets; files without a partner are rejected and counted.

    Raises UserError if no two files have the same name.
    """
    partners, taken = _by_stem(targets), _by_stem(images)
    if not partners.keys() & taken.keys():
        raise UserError(
            f"no file in {targets.root} has the name of one in {images.root}, except for the suffix"
        )
    lonely = (
        file.but_refused(_NO_IMAGE)
        for stem, files in partners.items()
        if stem not in taken
        for file in files
    )
    pairs = (
        _pair(file, partners.get(stem, []), targets.root).but_refused(
            _SEVERAL if len(files) > 1 else ""
        )
        for stem, files in taken.items()
        for file in files
    )
    return FileSource.of(
        [*pairs, *lonely],
        description=f"{images.description} with targets {targets.root.name}",
        root=images.root,
        classes=images.class_names,
        extra=targets.sha256,
        read=read_pair,
    )


def _by_stem(source: FileSource) -> dict[str, list[SourceFile]]:
    """Return the files by their names without suffixes."""
    files = defaultdict(list)
    for file in source.files:
        files[os.path.splitext(file.name)[0]].append(file)
    return files


def _pair(image: SourceFile, partners: list[SourceFile], root: Path) -> SourceFile:
    if len(partners) != 1:
        return image.but_refused(_SEVERAL if partners else _NO_TARGET)
    [target] = partners
    return PairFile(
        image.name,
        image.label,
        image.num_bytes + target.num_bytes,
        image.path,
        refused=image.refused or target.refused,
        target=str(root.resolve() / (target.path or target.name)),
    )


def read_pair(file: SourceFile, root: Path) -> bytes:
    """Read both files and pack them with `join`. Raises OSError."""
    assert isinstance(file, PairFile)
    return join(file.read(root), read_file(Path(file.target)))


@dataclass(frozen=True)
class PairEncoder(ShardEncoder):
    """Decode, resize and crop image and target alike, to squares of `size`.

    `target_resize` is `nearest` or `bicubic`; `library` resizes images, and targets if bicubic.
    """

    size: int
    quality: int
    target_resize: str
    library: Library
    suffix: str = SUFFIXES["pairs"]

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        return {"pairs": [self.size, self.quality], "preparation": self._preparation()}

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return one payload per pair."""
        return encode_each(pictures, lambda pair: [[self._payload(*split(pair.content))]])

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a data set of pairs."""
        return {"kind": "pairs", "image_size": self.size, "preparation": self._preparation()}

    def _preparation(self) -> dict[str, Any]:
        name = f"{resize_name(self.library)}; targets: {self.target_resize}"
        return preparation(name, CROP, library=self.library)

    def _payload(self, image_file: bytes, target_file: bytes) -> bytes:
        image, target = decode_image(image_file), _decode_target(target_file)
        if image.shape != target.shape:
            raise RefusedImageError(_SIZES_DIFFER)
        nearest = self.target_resize == "nearest"
        label = nearest_square(target, size=self.size) if nearest else self._square(target)
        return join(encode_jpeg(self._square(image), self.quality), encode_png(label))

    def _square(self, image: np.ndarray) -> np.ndarray:
        return resize_and_crop(image, size=self.size, library=self.library)


def _decode_target(content: bytes) -> np.ndarray:
    try:
        return decode_image(content)
    except RefusedImageError as refusal:
        raise RefusedImageError(f"target: {refusal}") from None


def encode_png(image: np.ndarray) -> bytes:
    """Encode uint8 `[h, w, 3]`, or grey `[h, w]`, as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


SIZES_DIFFER = "image and label map differ in size"

ReadTarget = Callable[[bytes], tuple[tuple[int, ...], bytes]]
"""Maps the source's content of a target to height and width, and the bytes to store."""


def png_of_map(content: bytes, read_map: Callable[[bytes], np.ndarray]) -> tuple[Any, bytes]:
    """Return a `ReadTarget` of the label map that `read_map` reads as integers int64 `[h, w]`."""
    numbers = read_map(content)
    return numbers.shape, encode_png(to_pixels(numbers))


@dataclass(frozen=True)
class TargetEncoder(ShardEncoder):
    """Keep JPEG files, re-encode other images as JPEG, and store targets of the same size.

    `target` is the manifest's field; `read_target` is picklable and raises RefusedImageError.
    """

    quality: int
    target: dict[str, Any]
    read_target: ReadTarget
    suffix: str = SUFFIXES["pairs"]

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        return {"label_maps": [self.quality, self.target], "preparation": preparation()}

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return one payload per pair."""
        return encode_each(pictures, lambda pair: [[self._payload(*split(pair.content))]])

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a data set of images and targets."""
        return {
            "kind": "pairs",
            "image_size": None,
            "target": self.target,
            "preparation": preparation(),
        }

    def _payload(self, image_file: bytes, content: bytes) -> bytes:
        image = decode_image(image_file)
        size, target = self.read_target(content)
        if image.shape[:2] != size:
            raise RefusedImageError(SIZES_DIFFER)
        check_aspect(image)  # training resizes it
        return join(kept_jpeg(image_file, image, self.quality), target)
