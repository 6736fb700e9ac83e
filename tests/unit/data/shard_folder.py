"""Writes small shard folders with the format's own writer."""

from __future__ import annotations

import hashlib

import numpy as np

from megavis.data.files import sha256_of_file
from megavis.data.manifest import (
    Manifest,
    Preparation,
    ShardEntry,
    Source,
    TokenizerIdentity,
)
from megavis.data.shards import Sample, index_path, write_index, write_shard


def write_folder(folder, *, tokens, labels, samples_per_shard=10, vocabulary=512, class_names):
    """Write tokens `[N, n]` and labels `[N]` as shards; returns the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    centers = np.linspace(-1, 1, 3 * vocabulary, dtype=np.float32).reshape(-1, 3)
    np.save(folder / "palette.npy", centers)
    shards = []
    for number, start in enumerate(range(0, len(tokens), samples_per_shard)):
        samples = [
            Sample(key=f"{i:09d}", tokens=tokens[i], label=int(labels[i]), source=f"{i}.png")
            for i in range(start, min(start + samples_per_shard, len(tokens)))
        ]
        path = folder / f"shard-{number:06d}.tar"
        index = write_shard(path, samples, job="test")
        write_index(path, index)
        shards.append(
            ShardEntry(
                name=path.name,
                num_samples=len(index),
                num_bytes=index.num_bytes,
                sha256=index.sha256,
                index_sha256=sha256_of_file(index_path(path)),
            )
        )
    manifest = Manifest(
        format_version=1,
        kind="palette",
        image_size=int(tokens.shape[1] ** 0.5),
        num_tokens=tokens.shape[1],
        tokenizer=TokenizerIdentity(
            kind="palette",
            sha256=hashlib.sha256(centers.tobytes()).hexdigest(),
            num_tokens=vocabulary,
        ),
        preparation=Preparation(resize="bicubic", crop="centre", decoders={}),
        class_names=tuple(class_names),
        shards=tuple(shards),
        skipped={},
        seed=0,
        source=Source(description="test", num_files=len(tokens), sha256="0" * 64),
        tool_version="0",
    )
    manifest.write(folder)
    return manifest
