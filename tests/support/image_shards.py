"""Write crops of photographs as a small jpeg shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image
from written_shards import write_payloads

from megavis.data.format.manifest import Preparation


def write_image_shards(crops: Path, folder: Path) -> Path:
    """Write the images below `crops`, one folder per class, as a jpeg shard."""
    files = sorted(crops.rglob("*.png"))
    names = sorted({file.parent.name for file in files})
    # Interleave classes, so that the first samples cover all of them.
    files.sort(key=lambda file: (file.stem, file.parent.name))
    images = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    write_payloads(
        folder,
        [simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=95) for image in images],
        suffix="jpg",
        labels=[names.index(file.parent.name) for file in files],
        sources=[file.name for file in files],
        class_names=names,
        samples_per_shard=len(files),
        kind="jpeg",
        image_size=images[0].shape[0],
        preparation=Preparation(resize="bicubic", crop="random", decoders={}),
    )
    return folder
