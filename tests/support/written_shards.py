"""Write small shards of any kind with the format's writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megavis.data.format.files import sha256_of_file
from megavis.data.format.manifest import Manifest, Preparation, ShardEntry, SourceIdentity
from megavis.data.format.sample_index import finish_folder
from megavis.data.format.shards import index_path, open_shard, write_index


def write_payloads(
    folder: Path,
    payloads: Sequence[bytes],
    *,
    suffix: str,
    labels: Sequence[int] | None = None,
    sources: Sequence[str] | None = None,
    class_names: Sequence[str] = (),
    samples_per_shard: int = 10,
    **fields: Any,
) -> Manifest:
    """Write payloads as shards, unlabelled by default; return the manifest.

    `fields` override fields of the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = sources or [f"{number}.png" for number in range(len(payloads))]
    labels = [-1] * len(payloads) if labels is None else labels
    shards = []
    for number, start in enumerate(range(0, len(payloads), samples_per_shard)):
        path = folder / f"shard-{number:06d}.tar"
        with open_shard(path, suffix=suffix, job="test") as writer:
            for i in range(start, min(start + samples_per_shard, len(payloads))):
                writer.add(f"{i:09d}", payloads[i], label=int(labels[i]), source=names[i])
        write_index(path, writer.index)
        shards.append(
            ShardEntry(
                name=path.name,
                num_samples=len(writer.index),
                num_bytes=writer.index.num_bytes,
                sha256=writer.index.sha256,
                index_sha256=sha256_of_file(index_path(path)),
            )
        )
    standard = {
        "format_version": 1,
        "preparation": Preparation(resize="bicubic", crop="centre", decoders={}),
        "skipped": {},
        "seed": 0,
        "source": SourceIdentity(description="test", num_files=len(payloads), sha256="0" * 64),
        "tool_version": "0",
    }
    manifest = Manifest(
        class_names=tuple(class_names), shards=tuple(shards), **{**standard, **fields}
    )
    return finish_folder(folder, manifest)
