"""Writes crops of photographs as small jpeg shards, with the format's own writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from megavis.data.files import sha256_of_file
from megavis.data.manifest import Manifest, Preparation, ShardEntry, Source
from megavis.data.shards import index_path, open_shard, write_index


def write_image_shards(crops: Path, folder: Path) -> Path:
    """Write the images below `crops`, a class a folder, as one jpeg shard."""
    folder.mkdir(parents=True)
    files = sorted(crops.rglob("*.png"))
    names = sorted({file.parent.name for file in files})
    # Classes take turns, so that the first samples are of all of them.
    files.sort(key=lambda file: (file.stem, file.parent.name))
    path = folder / "shard-000000.tar"
    with open_shard(path, suffix="jpg", job="test") as writer:
        for number, file in enumerate(files):
            pixels = np.asarray(Image.open(file).convert("RGB"))
            content = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=95)
            label = names.index(file.parent.name)
            writer.add(f"{number:09d}", content, label=label, source=file.name)
    write_index(path, writer.index)
    index = writer.index
    Manifest(
        format_version=1,
        kind="jpeg",
        image_size=pixels.shape[0],
        preparation=Preparation(resize="bicubic", crop="random", decoders={}),
        class_names=tuple(names),
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
        source=Source(description="test", num_files=len(files), sha256="0" * 64),
        tool_version="0",
    ).write(folder)
    return folder
