"""Write random latents as a small shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from written_shards import write_payloads

from megavis.data.codecs.codec import LatentsCodec
from megavis.data.format.manifest import SourceIdentity, TokenizerIdentity


def write_latent_shards(
    folder: Path,
    *,
    shape: tuple[int, int, int],
    num_classes: int,
    num_images: int,
    labels: Sequence[int] = (),
    identity: str = "1" * 64,
    scale: float = 0.1,
    seed: int = 0,
) -> Path:
    """Write latents as a shard, with a different mean per class; without labels for 0 classes.

    They cycle through `labels`, by default through all classes. Another seed gives other latents
    and another source.
    """
    random, codec = np.random.default_rng(seed), LatentsCodec(shape)
    cycle = labels or range(num_classes) or [-1]
    labels = [cycle[number % len(cycle)] for number in range(num_images)]
    means = [random.normal(size=shape) + label for label in labels]
    write_payloads(
        folder,
        [codec.encode(np.stack([mean, np.full(shape, scale)])) for mean in means],
        suffix="lat",
        labels=labels,
        class_names=[f"class-{label}" for label in range(num_classes)],
        samples_per_shard=num_images,
        kind="latents",
        image_size=4 * shape[1],
        latent_shape=shape,
        tokenizer=TokenizerIdentity(kind="vae", sha256=identity),
        source=SourceIdentity(description="test", num_files=num_images, sha256=f"{seed:064x}"),
    )
    return folder
