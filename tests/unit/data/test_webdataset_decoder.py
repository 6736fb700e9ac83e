"""`wds.WebDataset(url).decode(decoder)` gives the samples that `ShardDataset` reads."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from image_files import encoded
from PIL import Image
from shard_folder import identity, write_folder
from written_shards import write_payloads

from megavis.config.errors import UserError
from megavis.data.codecs.augment import RandAugment
from megavis.data.codecs.codec import IdsCodec, LatentsCodec
from megavis.data.codecs.jpeg import join
from megavis.data.codecs.sound import RecordingsCodec
from megavis.data.codecs.transforms import Transform
from megavis.data.format.manifest import TargetMaps
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.webdataset_decoder import ShardDecoder
from megavis.tokenizers.palette import Palette

pytestmark = pytest.mark.once

PAGE = Path(__file__).parents[3] / "docs/data.md"
COUNT, LABELS = 13, [number % 4 - 1 for number in range(13)]
CENTER = Transform(image_size=16, crop="center")
PALETTE = Palette(np.random.default_rng(7).uniform(-1, 1, (64, 3)).astype(np.float32))


def image(number, height=16, width=16):
    # Smooth, so that JPEG keeps it, with a corner that tells which one it is.
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows * 8, columns * 8, np.full_like(rows, number * 19)], -1)
    return Image.fromarray(pixels.astype(np.uint8))


def write(folder, suffix, payloads, **fields):
    labels = {"labels": LABELS, "class_names": ("a", "b", "c")}
    write_payloads(folder, payloads, suffix=suffix, **labels, **fields)


def palette(folder):
    tokens = np.random.default_rng(0).integers(0, 512, (COUNT, 16)).astype(np.uint16)
    write_folder(folder, tokens=tokens, labels=LABELS, class_names=["a", "b", "c"])


def jpeg(folder):
    files = [encoded(image(number), "JPEG") for number in range(COUNT - 1)]
    write(folder, "jpg", [*files, encoded(image(12), "PNG")], kind="jpeg", image_size=16)


def originals(folder):
    files = [encoded(image(number, 20 + number, 25), "JPEG") for number in range(COUNT)]
    write(folder, "jpg", files, kind="jpeg", image_size=None)


def pairs(folder):
    both = [(image(n), image(n).rotate(90)) for n in range(COUNT)]
    payloads = [join(encoded(a, "JPEG"), encoded(b, "PNG")) for a, b in both]
    write(folder, "pair", payloads, kind="pairs", image_size=16)


def label_maps(folder):
    maps = [np.zeros((30, 40, 3), np.uint8) for _ in range(COUNT)]
    for number, one in enumerate(maps):
        one[number:, 5:] = (1, 1, 0)
    shown = [image(number, 30, 40) for number in range(COUNT)]
    payloads = [
        join(encoded(a, "JPEG"), encoded(Image.fromarray(b), "PNG"))
        for a, b in zip(shown, maps, strict=True)
    ]
    target = TargetMaps(kind="panoptic", class_names=("thing",), things=(True,))
    write(folder, "pair", payloads, kind="pairs", image_size=None, target=target)


def latents(folder, flipped=False):
    shape = (2 if flipped else 1, 2, 3, 2, 4)
    values = np.abs(np.random.default_rng(1).normal(size=(COUNT, *shape)))
    codec = LatentsCodec(shape[2:], flipped=flipped)
    fields = {"image_size": 16, "latent_shape": shape[2:], "tokenizer": identity("vae")}
    payloads = [codec.encode(one) for one in values]
    write(folder, "lat", payloads, kind="latents", flipped=flipped, **fields)


def ids(folder):
    values = np.random.default_rng(2).integers(0, 1000, (COUNT, 6))
    fields = {"image_size": 16, "num_tokens": 6, "tokenizer": identity("vqgan", num_tokens=1000)}
    write(folder, "ids", [IdsCodec(6).encode(one) for one in values], kind="ids", **fields)


def recordings(folder):
    values = np.random.default_rng(3).integers(-9999, 9999, (COUNT, 640)).astype(np.int16)
    payloads = [RecordingsCodec((4, 3)).encode(one) for one in values]
    write(folder, "pcm", payloads, kind="recordings", image_size=None, frame_shape=(4, 3))


KINDS = {
    "palette": (palette, "tok", {}),
    "palette, centre": (palette, "tok", {"transform": Transform(image_size=2, crop="middle")}),
    "jpeg": (jpeg, "jpg", {}),
    "jpeg of any size": (originals, "jpg", {"transform": CENTER}),
    "jpeg by a palette": (originals, "jpg", {"transform": CENTER, "palette": PALETTE}),
    "pairs": (pairs, "pair", {}),
    "label maps": (label_maps, "pair", {"transform": CENTER}),
    "latents": (latents, "lat", {}),
    "latents, flipped too": (lambda folder: latents(folder, flipped=True), "lat", {}),
    "ids": (ids, "ids", {}),
    "recordings": (recordings, "pcm", {}),
}


def url(folder):
    return f"{folder}/shard-{{000000..000001}}.tar"


@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_labels_of_each_kind(kind, tmp_path):
    make, suffix, options = KINDS[kind]
    make(tmp_path)
    decoder = pickle.loads(pickle.dumps(ShardDecoder(tmp_path, **options)))
    loop = wds.WebDataset(url(tmp_path), shardshuffle=False)
    found = [*loop.decode(decoder).map(decoder.with_label).to_tuple("__key__", suffix, "cls")]
    expected, labels = ShardDataset(tmp_path, **options).read(np.arange(COUNT))
    keys, samples, classes = zip(*found, strict=True)
    assert keys == tuple(f"{number:09d}" for number in range(COUNT))
    assert classes == tuple(labels) == tuple(LABELS)
    for sample, row in zip(samples, expected, strict=True):
        assert sample.dtype == row.dtype
        assert np.array_equal(sample, row)
    assert len({sample.tobytes() for sample in samples}) == COUNT


def test_the_printed_example(tmp_path):
    """The block in docs/data.md, with its folder replaced."""
    folder = tmp_path / "shards"
    palette(folder)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    [block] = [block for block in blocks if "ShardDecoder" in block]
    seen = []
    text = block.replace("shards/train", str(folder)).replace("{000000..000127}", "000000")
    exec(text, {"train_on": lambda *batch: seen.append(batch)})
    expected, labels = ShardDataset(folder).read(np.arange(10))
    tokens = np.concatenate([np.stack(batch[0]) for batch in seen])
    classes = np.concatenate([batch[1] for batch in seen])
    order = np.lexsort(tokens.T)
    wanted = np.lexsort(expected.T)
    assert np.array_equal(tokens[order], expected[wanted])
    assert np.array_equal(classes[order], labels[wanted])


def test_a_folder_at_a_url(tmp_path):
    ids(tmp_path)
    decoder = ShardDecoder(f"file://{tmp_path}")
    loop = wds.WebDataset(f"file:{url(tmp_path)}", shardshuffle=False).decode(decoder)
    assert [sample["cls"] for sample in loop.map(decoder.with_label)] == LABELS


def test_invalid_samples_go_to_the_handler(tmp_path):
    values = [np.full(6, number, "<u2").tobytes() for number in (1, 2000, 3)]
    fields = {"image_size": 16, "num_tokens": 6, "tokenizer": identity("vqgan", num_tokens=1000)}
    write_payloads(tmp_path, [*values, b"short"], suffix="ids", kind="ids", **fields)
    loop, decoder = f"{tmp_path}/shard-000000.tar", ShardDecoder(tmp_path)
    told = []
    handler = lambda error: told.append(error.__cause__) is None  # noqa: E731
    good = wds.WebDataset(loop, shardshuffle=False).decode(decoder, handler=handler)
    assert [sample["ids"][0] for sample in good] == [1, 3]
    assert [str(error) for error in told] == [
        "a .ids member cannot be decoded: token beyond the vocabulary",
        "a .ids member has 5 bytes, which is a wrong length",
    ]


def test_other_members_are_left_to_other_handlers(tmp_path):
    ids(tmp_path)
    decoder = ShardDecoder(tmp_path)
    assert decoder(".txt", b"words") is None
    assert decoder(".other.ids", b"words") is None


@pytest.mark.parametrize(
    "transform",
    [
        Transform(image_size=16, crop="random_resized"),
        Transform(image_size=16, flip=True),
        Transform(image_size=16, crop="center", augment=RandAugment(9, 0.5)),
    ],
)
def test_what_is_drawn_by_position_is_refused(transform, tmp_path):
    originals(tmp_path)
    with pytest.raises(UserError, match="no positions to draw crops"):
        ShardDecoder(tmp_path, transform)


def test_messages_of_a_wrong_folder_shard_or_index(tmp_path):
    with pytest.raises(UserError, match="manifest.json is missing"):
        ShardDecoder(tmp_path)
    originals(tmp_path)
    with pytest.raises(UserError, match=f"^{tmp_path} holds images of any size; set transform"):
        ShardDecoder(tmp_path)
    decoder = ShardDecoder(tmp_path, CENTER)
    with pytest.raises(UserError, match=f"^other.tar is not a shard of {tmp_path}"):
        decoder.with_label({"__url__": "s3://bucket/other.tar?version=1", "__key__": "0"})
    index = tmp_path / "shard-000000.index.json"
    index.write_bytes(index.read_bytes().replace(b'"labels": [-1', b'"labels": [2'))
    with pytest.raises(UserError, match="index.json does not have the SHA-256 of the manifest"):
        decoder.with_label({"__url__": "s3://bucket/shard-000000.tar?version=1", "__key__": "0"})
