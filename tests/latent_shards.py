"""Writes small shards of random latents, with the format's own writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megavis.data.files import sha256_of_file
from megavis.data.latents import LatentsCodec
from megavis.data.manifest import Manifest, Preparation, ShardEntry, Source, TokenizerIdentity
from megavis.data.shards import index_path, open_shard, write_index


def write_latent_shards(
    folder: Path,
    *,
    shape: tuple[int, int, int],
    num_classes: int,
    num_images: int,
    identity: str = "1" * 64,
    scale: float = 0.1,
    seed: int = 0,
) -> Path:
    """Write latents of classes that differ in their means, as one shard; 0: without labels.

    Another seed gives other images, from other files.
    """
    folder.mkdir(parents=True)
    random, codec = np.random.default_rng(seed), LatentsCodec(shape)
    path = folder / "shard-000000.tar"
    with open_shard(path, suffix=codec.suffix, job="test") as writer:
        for number in range(num_images):
            label = number % num_classes if num_classes else -1
            mean = random.normal(size=shape) + label
            payload = codec.encode(np.stack([mean, np.full(shape, scale)]))
            writer.add(f"{number:09d}", payload, label=label, source=f"{number}.png")
    write_index(path, writer.index)
    index = writer.index
    Manifest(
        format_version=1,
        kind="latents",
        image_size=4 * shape[1],
        latent_shape=shape,
        tokenizer=TokenizerIdentity(kind="vae", sha256=identity),
        preparation=Preparation(resize="bicubic", crop="center", decoders={}),
        class_names=tuple(f"class-{label}" for label in range(num_classes)),
        shards=(
            ShardEntry(
                name=path.name,
                num_samples=len(index),
                num_bytes=index.num_bytes,
                sha256=index.sha256,
                index_sha256=sha256_of_file(index_path(path)),
            ),
        ),
        skipped={},
        seed=0,
        source=Source(description="test", num_files=num_images, sha256=f"{seed:064x}"),
        tool_version="0",
    ).write(folder)
    return folder
