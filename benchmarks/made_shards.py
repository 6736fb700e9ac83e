"""Folders of many synthetic palette shards: a few are written, and the others are links to them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from megavis.data.codecs.codec import PaletteCodec
from megavis.data.format.files import sha256_of_file
from megavis.data.format.manifest import (
    Manifest,
    Preparation,
    ShardEntry,
    SourceIdentity,
    TokenizerIdentity,
)
from megavis.data.format.sample_index import listed_records, write_sample_index
from megavis.data.format.shards import index_path, open_shard, write_index

COLORS = 512
_WRITTEN = 10


def make_folder(folder: Path, *, num_shards: int, in_shard: int, side: int, empty: bool) -> None:
    """Write a palette shard folder of `num_shards * in_shard` samples of side² tokens.

    Args:
        empty: leave the tars out: sparse files of the right size, whose tokens are all 0.
    """
    folder.mkdir(parents=True)
    centers = np.linspace(-1, 1, 3 * COLORS, dtype=np.float32).reshape(-1, 3)
    np.save(folder / "palette.npy", centers)
    written = [
        _write(folder / f"shard-{number:06d}.tar", number, in_shard, side)
        for number in range(min(_WRITTEN, num_shards))
    ]
    records = [listed_records(folder, shard) for shard in written]
    shards = list(written)
    for number in range(len(written), num_shards):
        entry = written[number % len(written)]
        name = f"shard-{number:06d}.tar"
        if not empty:
            os.link(folder / entry.name, folder / name)
        shards.append(entry.model_copy(update={"name": name}))
    for shard in shards if empty else ():
        (folder / shard.name).unlink(missing_ok=True)
        with (folder / shard.name).open("wb") as file:
            file.truncate(shard.num_bytes)
    blocks = (records[number % len(written)] for number in range(num_shards))
    Manifest(
        format_version=1,
        kind="palette",
        image_size=side,
        num_tokens=side**2,
        tokenizer=TokenizerIdentity(
            kind="palette", sha256=hashlib.sha256(centers.tobytes()).hexdigest(), num_tokens=COLORS
        ),
        preparation=Preparation(resize="none", crop="none", decoders={}),
        class_names=(),
        shards=tuple(shards),
        index_sha256=write_sample_index(folder, shards, blocks),
        skipped={},
        seed=0,
        source=SourceIdentity(
            description="made up", num_files=num_shards * in_shard, sha256="0" * 64
        ),
        tool_version="0",
    ).write(folder)


def _write(path: Path, number: int, in_shard: int, side: int) -> ShardEntry:
    tokens = np.random.default_rng(number).integers(0, COLORS, (in_shard, side**2), np.uint16)
    codec = PaletteCodec(side**2)
    with open_shard(path, job="benchmark", suffix="tok") as writer:
        for place, row in enumerate(tokens):
            key = f"{number * in_shard + place:09d}"
            writer.add(key, codec.encode(row), label=-1, source=f"{key}.png")
    write_index(path, writer.index)
    return ShardEntry(
        name=path.name,
        num_samples=in_shard,
        num_bytes=writer.index.num_bytes,
        sha256=writer.index.sha256,
        index_sha256=sha256_of_file(index_path(path)),
    )
