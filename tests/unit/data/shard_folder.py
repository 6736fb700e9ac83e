"""Writes small shard folders with the format's own writer."""

from __future__ import annotations

import hashlib

import numpy as np

from megavis.data.codec import PaletteCodec
from megavis.data.files import sha256_of_file
from megavis.data.manifest import (
    Manifest,
    Preparation,
    ShardEntry,
    Source,
    TokenizerIdentity,
)
from megavis.data.shards import index_path, open_shard, write_index


def write_folder(folder, *, tokens, labels, samples_per_shard=10, vocabulary=512, class_names):
    """Write tokens `[N, n]` and labels `[N]` as palette shards; returns the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    centers = np.linspace(-1, 1, 3 * vocabulary, dtype=np.float32).reshape(-1, 3)
    np.save(folder / "palette.npy", centers)
    codec = PaletteCodec(tokens.shape[1])
    return write_payloads(
        folder,
        [codec.encode(row) for row in tokens],
        suffix=codec.suffix,
        labels=labels,
        class_names=class_names,
        samples_per_shard=samples_per_shard,
        kind="palette",
        image_size=int(tokens.shape[1] ** 0.5),
        num_tokens=tokens.shape[1],
        tokenizer=identity("palette", hashlib.sha256(centers.tobytes()).hexdigest(), vocabulary),
    )


def identity(kind, sha256="1" * 64, num_tokens=None):
    return TokenizerIdentity(kind=kind, sha256=sha256, num_tokens=num_tokens)


def write_payloads(
    folder, payloads, *, suffix, labels=None, class_names=(), samples_per_shard=10, **fields
):
    """Write payloads as shards of any kind; `fields` are those of the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = [-1] * len(payloads) if labels is None else labels
    shards = []
    for number, start in enumerate(range(0, len(payloads), samples_per_shard)):
        path = folder / f"shard-{number:06d}.tar"
        with open_shard(path, suffix=suffix, job="test") as writer:
            for i in range(start, min(start + samples_per_shard, len(payloads))):
                writer.add(f"{i:09d}", payloads[i], label=int(labels[i]), source=f"{i}.png")
        index = writer.index
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
        preparation=Preparation(resize="bicubic", crop="centre", decoders={}),
        class_names=tuple(class_names),
        shards=tuple(shards),
        skipped={},
        seed=0,
        source=Source(description="test", num_files=len(payloads), sha256="0" * 64),
        tool_version="0",
        **fields,
    )
    manifest.write(folder)
    return manifest
