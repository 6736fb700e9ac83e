"""Write small palette shards."""

from __future__ import annotations

import hashlib
import json
import shutil

import numpy as np
from written_shards import write_payloads

from megavis.data.codecs.codec import PaletteCodec
from megavis.data.format.manifest import MANIFEST_NAME, TokenizerIdentity


def write_folder(folder, *, tokens, labels, samples_per_shard=10, vocabulary=512, class_names):
    """Write tokens `[N, n]` and labels `[N]` as palette shards; return the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    centers = np.linspace(-1, 1, 3 * vocabulary, dtype=np.float32).reshape(-1, 3)
    np.save(folder / "palette.npy", centers)
    codec = PaletteCodec(tokens.shape[1])
    return write_payloads(
        folder,
        [codec.encode(row) for row in tokens],
        suffix="tok",
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


def with_classes(folder, target, names):
    """Copy a shard folder and rename its classes, or those of its label maps."""
    shutil.copytree(folder, target)
    path = target / MANIFEST_NAME
    tree = json.loads(path.read_text())
    (tree["target"] if tree["target"] else tree)["class_names"] = list(names)
    path.write_text(json.dumps(tree))
    return target
