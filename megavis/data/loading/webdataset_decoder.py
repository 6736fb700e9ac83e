"""Decode the samples of a shard folder in any webdataset loop.

    decoder = ShardDecoder("shards/train")
    url = "shards/train/shard-{000000..000127}.tar"
    samples = wds.WebDataset(url, shardshuffle=100).decode(decoder).map(decoder.with_label)

A webdataset loop reads shards as streams, shuffled in a buffer. It has no positions, so random
crops are left to the loop, and samples that `ShardDataset` would replace are errors here.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from megavis.config.errors import Remedy, UserError
from megavis.data.codecs.codec import PaletteLike
from megavis.data.codecs.registry import codec_of
from megavis.data.codecs.transforms import Transform
from megavis.data.format.manifest import SUFFIXES, Manifest
from megavis.data.format.shards import ShardIndex, index_path
from megavis.data.loading.remote import is_remote, stored_manifest
from megavis.data.loading.stores import Store

_NO_POSITION = np.zeros(1, np.int64)


class ShardDecoder:
    """A handler for `webdataset.WebDataset(...).decode(...)`; picklable, for workers.

    Args:
        directory: the shard folder or its URL, whose manifest says how samples are decoded.
        transform: crop of images, such as `Transform(image_size=224, crop="center")`; needed for
            JPEG folders of any size; if None, samples are as stored.
        palette: maps the pixels of JPEG shards to ids, as `data.palette` does.

    Attributes:
        manifest: the folder's manifest.

    Raises:
        UserError: the folder has no manifest, the shards do not support transform or palette, or
            the transform draws at random, for which a webdataset loop has no positions.
        OSError: the manifest at a URL cannot be fetched.
    """

    def __init__(
        self,
        directory: Path | str,
        transform: Transform | None = None,
        *,
        palette: PaletteLike | None = None,
    ) -> None:
        self._folder: Path | Store
        if is_remote(directory):
            self._folder = Store(str(directory))
            self.manifest = stored_manifest(self._folder)[0]
        else:
            self._folder = Path(directory)
            self.manifest = Manifest.read(self._folder)
        if transform is not None and _draws(transform):
            raise UserError(
                f"{directory}: webdataset has no positions to draw crops, flips or noise for:"
                " choose crop center, middle, whole or none, and augment the arrays"
            )
        try:
            self._codec = codec_of(self.manifest, transform, palette=palette)
        except UserError as error:
            # There is no config here, and only crops that draw nothing.
            remedy = error.remedy and Remedy("transform", "one whose crop is center or whole")
            raise UserError(f"{directory} {error.fault}", remedy=remedy) from None
        self._key = f".{SUFFIXES[self.manifest.kind]}"
        self._shards = {shard.name: shard for shard in self.manifest.shards}
        self._labels: tuple[str, dict[str, int]] = ("", {})

    def __call__(self, key: str, data: bytes) -> np.ndarray | None:
        """Decode a member of a tar.

        Args:
            key: suffix of the member with a dot, such as `.tok`.
            data: content of the member.

        Returns:
            None if another handler should decode it; otherwise the sample, as a row of a batch from
            `ShardDataset`: ids uint16 `[n]`, pixels uint8 `[h, w, 3]`, pairs uint8 `[2, h, w, 3]`,
            latents float16 `[2, c, h, w]`, recordings float32 `[frames, coefficients]`.

        Raises:
            ValueError: the sample is invalid; webdataset gives its `handler` a DecodingError.
        """
        if key != self._key:
            return None
        if not self._codec.valid_lengths(np.array([len(data)]))[0]:
            raise ValueError(f"a {key} member has {len(data)} bytes, which is a wrong length")
        samples, refused = self._codec.decode([np.frombuffer(data, np.uint8)], _NO_POSITION)
        if refused:
            raise ValueError(f"a {key} member cannot be decoded: {refused[0]}")
        return samples[0]

    def with_label(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a sample with its label as `cls`, -1 for none, from its shard's JSON index.

        Only one shard's index is kept, so map this before shuffling samples of several shards.
        Raises OSError, and UserError if the shard is not in the folder or its index is damaged.
        """
        name = str(sample["__url__"]).partition("?")[0].rpartition("/")[2]
        if self._labels[0] != name:
            self._labels = name, self._read_labels(name)
        return {**sample, "cls": self._labels[1][sample["__key__"]]}

    def _read_labels(self, name: str) -> dict[str, int]:
        """Return the label of each key of a shard."""
        if name not in self._shards:
            raise UserError(f"{name} is not a shard of {self._place}")
        path, digest = index_path(Path(name)), self._shards[name].index_sha256
        if isinstance(self._folder, Store):
            buffer = io.BytesIO()
            self._folder.copy(path.name, buffer, sha256=digest)
            content = buffer.getvalue()
        else:
            path = self._folder / path
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != digest:
                raise UserError(f"{path} does not have the SHA-256 of the manifest")
        index = ShardIndex.from_json(content, path=path)
        return dict(zip(index.keys, index.labels, strict=True))

    @property
    def _place(self) -> str:
        return self._folder.url if isinstance(self._folder, Store) else str(self._folder)


def _draws(transform: Transform) -> bool:
    """Return whether samples depend on their positions."""
    drawn = transform.flip or transform.sound is not None
    return drawn or transform.draws(_NO_POSITION).shape[1] > 1
