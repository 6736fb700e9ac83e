"""Codecs of JPEG, latents, recordings, pairs and ids: round trips, bad samples, bad settings."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import webdataset
from image_files import encoded
from loading import inputs_by_position
from PIL import Image
from shard_folder import identity, write_folder
from written_shards import write_payloads

from megavis.config.errors import UserError
from megavis.data.codecs.augment import RandAugment
from megavis.data.codecs.codec import IdsCodec, LatentsCodec, PaletteCodec
from megavis.data.codecs.jpeg import DamagedImageError, JpegCodec, PairsCodec, decode_rgb, join
from megavis.data.codecs.sound import RecordingsCodec, cepstra
from megavis.data.codecs.transforms import Transform
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import evaluation_batches
from megavis.evaluation.features import pixel_features
from megavis.tokenizers.palette import Palette

RANDOM = np.random.default_rng(0)
SHAPE = (3, 2, 4)


def write_jpegs(folder, payloads, image_size):
    return write_payloads(folder, payloads, suffix="jpg", kind="jpeg", image_size=image_size)


def write_latents(folder, payloads, **fields):
    return write_payloads(
        folder,
        payloads,
        suffix="lat",
        kind="latents",
        image_size=16,
        latent_shape=SHAPE,
        tokenizer=identity("vae"),
        **fields,
    )


def write_ids(folder, payloads):
    return write_payloads(
        folder,
        payloads,
        suffix="ids",
        kind="ids",
        image_size=16,
        num_tokens=6,
        tokenizer=identity("vqgan", num_tokens=1000),
    )


def batch_of(dataset, count):
    (batch,) = evaluation_batches(
        dataset, batch_size=count, data_parallel_rank=0, data_parallel_size=1
    )
    return batch


def test_ids_round_trip(tmp_path):
    ids = RANDOM.integers(0, 1000, (13, 6))
    codec = IdsCodec(6, vocabulary_size=1000)
    write_ids(tmp_path, [codec.encode(row) for row in ids])
    batch = batch_of(ShardDataset(tmp_path), 13)
    assert batch.inputs.dtype == torch.int64
    assert batch.inputs.tolist() == ids.tolist()
    (first, *_) = webdataset.WebDataset(str(tmp_path / "shard-000000.tar"), shardshuffle=False)
    assert np.frombuffer(first["ids"], "<u2").tolist() == ids[0].tolist()
    with pytest.raises(ValueError, match="1000"):
        codec.encode(np.full(6, 1000))


def test_ids_beyond_the_vocabulary_are_replaced(tmp_path):
    ids = np.arange(4)[:, None].repeat(6, 1)
    ids[2, 3] = 1001
    write_ids(tmp_path, [row.astype("<u2").tobytes() for row in ids])
    dataset = ShardDataset(tmp_path)
    assert dataset.read(np.arange(4))[0][:, 0].tolist() == [0, 1, 3, 3]
    assert dataset.skipped == {"token beyond the vocabulary": 1}


def test_latents_round_trip(tmp_path):
    latents = np.abs(RANDOM.normal(size=(5, 2, *SHAPE))).astype(np.float32)
    codec = LatentsCodec(SHAPE)
    write_latents(tmp_path, [codec.encode(one) for one in latents])
    batch = batch_of(ShardDataset(tmp_path), 5)
    assert batch.inputs.dtype == torch.float16
    assert (batch.inputs.numpy() == latents.astype(np.float16)).all()
    (first, *_) = webdataset.WebDataset(str(tmp_path / "shard-000000.tar"), shardshuffle=False)
    raw = np.frombuffer(first["lat"], "<f2").reshape(2, *SHAPE)
    assert (raw == latents[0].astype(np.float16)).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e6, -1.0])
def test_invalid_latents(wrong):
    latents = np.ones((2, *SHAPE), np.float32)
    latents[1, 0, 1, 2] = wrong
    with pytest.raises(ValueError, match="finite|negative"):
        LatentsCodec(SHAPE).encode(latents)


def test_non_finite_latents_are_replaced(tmp_path):
    latents = np.arange(3, dtype=np.float16).repeat(2 * 24).reshape(3, 2, *SHAPE)
    latents[0, 1, 2, 1, 3] = np.inf
    write_latents(tmp_path, [one.tobytes() for one in latents])
    dataset = ShardDataset(tmp_path)
    assert dataset.read(np.arange(3))[0][:, 0, 0, 0, 0].tolist() == [1, 1, 2]
    assert dataset.skipped_names == ["shard-000000.tar:000000000: not finite"]


def write_recordings(folder, recordings, **fields):
    kind = {"suffix": "pcm", "kind": "recordings", "image_size": None, "frame_shape": (4, 3)}
    payloads = [RecordingsCodec((4, 3)).encode(one) for one in recordings]
    return write_payloads(folder, payloads, **kind, **fields)


def recordings(count):
    return RANDOM.integers(-32768, 32768, (count, 640)).astype(np.int16)


def test_recordings_are_read_as_cepstra(tmp_path):
    stored = recordings(3)
    write_recordings(tmp_path, stored, labels=[0, 1, 0], class_names=("a", "b"))
    dataset = ShardDataset(tmp_path)
    expected = np.stack([cepstra(one / np.float32(32768), 3) for one in stored])
    assert np.array_equal(batch_of(dataset, 3).inputs.numpy(), expected)
    (first, *_) = webdataset.WebDataset(str(tmp_path / "shard-000000.tar"), shardshuffle=False)
    assert np.array_equal(np.frombuffer(first["pcm"], "<i2"), stored[0])
    features = pixel_features(dataset)
    assert features.layers.dtype == np.float32
    assert np.array_equal(features.layers[0], expected.reshape(3, -1))
    for wrong in (stored[0, 1:], stored[0].astype(np.float32)):
        with pytest.raises(ValueError, match=r"must be int16 \[640\]"):
            RecordingsCodec((4, 3)).encode(wrong)


def test_latents_are_flipped_by_position(tmp_path):
    latents = np.zeros((4, 2, 2, *SHAPE), np.float32)
    latents[:, 1] = 1
    codec = LatentsCodec(SHAPE, flipped=True)
    write_latents(tmp_path, [codec.encode(one) for one in latents], flipped=True)
    plain = ShardDataset(tmp_path)
    assert plain.read(np.arange(4))[0].max() == 0
    transform = Transform(image_size=16, flip=True, seed=3)
    positions = np.arange(1000)
    read, _ = ShardDataset(tmp_path, transform).read(positions % 4, positions=positions)
    mirrored = read.reshape(1000, -1).max(axis=1) == 1
    assert (mirrored == transform.flips(positions)).all()
    assert 430 < mirrored.sum() < 570


def test_jpegs_match_pillow(tmp_path):
    pictures = [encoded(RANDOM.integers(0, 256, (8, 8, 3)).astype(np.uint8)) for _ in range(11)]
    write_jpegs(tmp_path, pictures, 8)
    batch = batch_of(ShardDataset(tmp_path), 11)
    assert batch.inputs.dtype == torch.uint8
    assert tuple(batch.inputs.shape) == (11, 8, 8, 3)
    for row, content in zip(batch.inputs.numpy(), pictures, strict=True):
        reference = np.asarray(Image.open(io.BytesIO(content))).astype(int)
        # Builds of libjpeg differ by one in the rounding of the inverse transform.
        assert np.abs(row - reference).max() <= 1


def test_decode_rgb(tmp_path):
    picture = Image.fromarray(RANDOM.integers(0, 256, (9, 12, 3)).astype(np.uint8))
    grey, cmyk = picture.convert("L"), picture.convert("CMYK")
    assert decode_rgb(encoded(grey)).shape == (9, 12, 3)
    assert decode_rgb(encoded(cmyk)).shape == (9, 12, 3)
    assert (decode_rgb(encoded(picture, "PNG")) == np.asarray(picture)).all()
    large = encoded(picture.resize((200, 100)), quality=95)
    for content in (b"", b"no image", large[:1000], large[:100], encoded(picture, "GIF")):
        with pytest.raises(DamagedImageError):
            decode_rgb(content)
    with pytest.raises(DamagedImageError, match="neither a JPEG nor a PNG file"):
        decode_rgb(b"<html>")


def test_bad_jpegs_are_replaced(tmp_path):
    good = [encoded(np.full((8, 8, 3), value, np.uint8)) for value in (0, 100, 200)]
    other = encoded(np.zeros((9, 8, 3), np.uint8))
    write_jpegs(tmp_path, [good[0], good[1][:300], other, good[2], b""], 8)
    dataset = ShardDataset(tmp_path)
    read, _ = dataset.read(np.arange(5))
    assert np.abs(read[:, 4, 4, 1].astype(int) - [0, 200, 200, 200, 0]).max() <= 1
    assert dataset.skipped == {"damaged": 1, "not 8x8 pixels": 1, "wrong length": 1}
    assert "shard-000000.tar:000000001: damaged" in dataset.skipped_names


def write_pairs(folder, payloads):
    return write_payloads(folder, payloads, suffix="pair", kind="pairs", image_size=8)


def test_bad_pairs_are_replaced(tmp_path):
    image = RANDOM.integers(0, 256, (8, 8, 3)).astype(np.uint8)
    jpeg, png = encoded(image), encoded(image, "PNG")
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 1
    payloads = [
        join(jpeg, png),
        join(jpeg, bytes(flipped)),
        join(jpeg[:50], png),
        join(jpeg, png)[:3],
        join(jpeg, encoded(image[:7], "PNG")),
        join(encoded(255 - image), encoded(255 - image, "PNG")),
    ]
    write_pairs(tmp_path, payloads)
    dataset = ShardDataset(tmp_path)
    batch = batch_of(dataset, 6)
    assert batch.inputs.dtype == torch.uint8
    assert np.array_equal(batch.inputs[0, 1], image)
    assert all(np.array_equal(pair[1], 255 - image) for pair in batch.inputs[1:])
    assert dataset.skipped == {"damaged": 3, "not 8x8 pixels": 1}


def test_random_crops_do_not_depend_on_ranks_or_resume(tmp_path):
    pictures = [
        encoded(RANDOM.integers(0, 256, (20 + i, 30, 3)).astype(np.uint8)) for i in range(7)
    ]
    write_jpegs(tmp_path, pictures, None)
    transform = Transform(image_size=8, crop="random_resized", flip=True, seed=5)
    dataset = ShardDataset(tmp_path, transform)
    whole = inputs_by_position(dataset, micro=12, ranks=1, stop=4)
    parts = inputs_by_position(dataset, micro=2, ranks=3, stop=4)
    resumed = inputs_by_position(dataset, micro=3, ranks=2, start=2, stop=4)
    assert sorted(whole) == sorted(parts) == list(range(48))
    assert sorted(resumed) == list(range(24, 48))
    for position, pixels in whole.items():
        assert torch.equal(pixels, parts[position])
        assert torch.equal(pixels, resumed.get(position, pixels))


CROPPED = Transform(image_size=4, crop="window", flip=True)
FLIPPED = Transform(image_size=16, flip=True)
COLORS = Palette(np.array([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]))


@pytest.mark.parametrize(
    ("codec", "shape"),
    [
        (PaletteCodec(64), (64,)),
        (PaletteCodec(64, transform=CROPPED), (16,)),
        (IdsCodec(6), (6,)),
        (JpegCodec(CROPPED), (4, 4, 3)),
        (JpegCodec(CROPPED, palette=COLORS), (16,)),
        (PairsCodec(CROPPED), (2, 4, 4, 3)),
        (LatentsCodec(SHAPE), (2, *SHAPE)),
        (LatentsCodec(SHAPE, flipped=True, transform=FLIPPED), (2, *SHAPE)),
        (RecordingsCodec((4, 3)), (4, 3)),
    ],
)
def test_no_payloads_give_no_rows(codec, shape):
    # A micro-batch of a mixture may have no sample of one of its folders.
    samples, refused = codec.decode([], np.empty(0, np.int64))
    assert samples.shape == (0, *shape)
    assert not refused


@pytest.mark.parametrize(
    ("kind", "transform", "message"),
    [
        ("jpeg", None, "images of any size; set data.crop"),
        ("jpeg", Transform(image_size=8), "images of any size, not 8x8; .*, or .* --size"),
        ("ids", Transform(image_size=16, crop="center"), "ids shards, which cannot be cropped"),
        ("ids", Transform(image_size=16, flip=True), "without mirrored images"),
        ("latents", Transform(image_size=16, flip=True), "without mirrored images"),
        (
            "recordings",
            Transform(image_size=0, crop="center"),
            "recordings shards, which cannot be cropped",
        ),
        ("palette", Transform(image_size=2, crop="center"), "which cannot be resized"),
        ("pairs", Transform(image_size=2, crop="center"), "pairs shards, which cannot be resized"),
        ("pairs", Transform(image_size=4), "8x8 pixels, not 4x4; set data.crop to window"),
        ("pairs", Transform(image_size=9, crop="window"), "8x8 pixels: too small for .* 9"),
        (
            "pairs",
            Transform(image_size=8, augment=RandAugment(9.0, 0.5)),
            "remove data.rand_augment",
        ),
        ("palette", Transform(image_size=4, crop="window"), "3x3 pixels: too small for .* 4"),
    ],
)
def test_unsupported_transforms(tmp_path, kind, transform, message):
    if kind == "jpeg":
        write_jpegs(tmp_path, [encoded(np.zeros((8, 9, 3), np.uint8))], None)
    elif kind == "pairs":
        write_pairs(tmp_path, [b"nothing"])
    elif kind == "ids":
        write_ids(tmp_path, [bytes(12)])
    elif kind == "recordings":
        write_recordings(tmp_path, recordings(1))
    elif kind == "palette":
        write_folder(tmp_path, tokens=np.zeros((1, 9), int), labels=[0], class_names=["a"])
    else:
        write_latents(tmp_path, [LatentsCodec(SHAPE).encode(np.ones((2, *SHAPE)))])
    with pytest.raises(UserError, match=message):
        ShardDataset(tmp_path, transform)
