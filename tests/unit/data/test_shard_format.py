"""Shard format: nine bits per token, webdataset tars, determinism, errors."""

from __future__ import annotations

import gc
import hashlib
import json
import tarfile

import numpy as np
import pytest
import webdataset

from megavis.config.errors import UserError
from megavis.data.codecs.codec import PaletteCodec
from megavis.data.format.files import atomic_writer
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import (
    ShardReader,
    index_path,
    open_shard,
    pack_tokens,
    payload_bytes,
    unpack_tokens,
    write_index,
)


def unpack_slowly(payload, num_tokens):
    """Unpack token by token, as the format is specified."""
    tokens = []
    for i in range(num_tokens):
        high = payload[num_tokens + i // 8] >> (7 - i % 8) & 1
        tokens.append(payload[i] + 256 * high)
    return tokens


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 1024, 2305])
def test_nine_bits_per_token(num_tokens):
    tokens = np.random.default_rng(1).integers(0, 512, (5, num_tokens)).astype(np.uint16)
    tokens[0] = 511
    packed = pack_tokens(tokens)
    assert packed.shape == (5, payload_bytes(num_tokens))
    assert (unpack_tokens(packed, num_tokens=num_tokens) == tokens).all()
    assert unpack_slowly([int(b) for b in packed[3]], num_tokens) == tokens[3].tolist()
    if num_tokens % 8 == 0:
        assert packed.shape[1] * 8 == 9 * num_tokens


def test_token_packing_errors():
    with pytest.raises(ValueError, match="512"):
        pack_tokens(np.full((1, 8), 512))
    with pytest.raises(ValueError, match="9 bytes"):
        unpack_tokens(np.zeros((1, 8), np.uint8), num_tokens=8)


def test_webdataset_reads_the_same_samples(folder):
    path, tokens, _ = folder
    seen = {}
    for tar in sorted(path.glob("*.tar")):
        for sample in webdataset.WebDataset(str(tar), shardshuffle=False):
            payload = np.frombuffer(sample["tok"], np.uint8)
            seen[sample["__key__"]] = unpack_slowly(payload.tolist(), tokens.shape[1])
    assert [seen[key] for key in sorted(seen)] == tokens.tolist()


def test_shards_match_tarfile_and_are_deterministic(folder, tmp_path):
    path, tokens, labels = folder
    reader = ShardReader(path / "shard-000001.tar")
    with tarfile.open(reader.path) as tar:
        members = tar.getmembers()
    assert [m.offset_data for m in members] == reader.index.offsets
    assert [m.size for m in members] == reader.index.lengths
    assert all(m.mtime == m.uid == m.gid == 0 and m.uname == "" for m in members)
    assert reader.index.labels == labels[10:20].tolist()
    codec = PaletteCodec(16)
    assert reader.read(3).tobytes() == codec.encode(tokens[13])
    again = tmp_path / "again.tar"
    with open_shard(again, suffix="tok", job="test") as writer:
        for i in range(10, 20):
            payload = codec.encode(tokens[i])
            writer.add(f"{i:09d}", payload, label=int(labels[i]), source=f"{i}.png")
    assert again.read_bytes() == reader.path.read_bytes()


def test_bytes_stay_as_they_are(tmp_path):
    """Hashes of tars are in manifests, so no version may write others."""
    tar = tmp_path / "a.tar"
    with open_shard(tar, suffix="tok", job="x") as writer:
        for length in (0, 1, 511, 512, 513, 30_000):
            writer.add(f"{length:09d}", b"m" * length, label=-1, source="a")
    digest = "381610b03bc56b468a45662f29d487879dd72235de3b8c62b59aa9f3a10e898d"
    assert hashlib.sha256(tar.read_bytes()).hexdigest() == writer.index.sha256 == digest
    assert writer.index.num_bytes == tar.stat().st_size


def test_offsets_after_headers_of_any_length(tmp_path):
    keys = ["short", "x" * 200, "\u9f8d", "y" * 99]
    with open_shard(tmp_path / "a.tar", suffix="tok", job="x") as writer:
        for key in keys:
            writer.add(key, key.encode(), label=-1, source="a")
    content, index = (tmp_path / "a.tar").read_bytes(), writer.index
    places = zip(index.offsets, index.lengths, strict=True)
    assert [content[start : start + size].decode() for start, size in places] == keys
    read = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    assert [sample["__key__"] for sample in read] == keys


@pytest.mark.filterwarnings("error")  # a collected stream that writes into a closed file
def test_failed_shard_leaves_no_file(tmp_path):
    def write(key, error):
        with open_shard(tmp_path / "a.tar", suffix="tok", job="x") as writer:
            writer.add(key, b"payload", label=0, source="0.png")
            raise error

    with pytest.raises(RuntimeError, match="fire"):
        write("0", RuntimeError("disk on fire"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="dots"):
        write("a.b", AssertionError)
    assert list(tmp_path.iterdir()) == []
    gc.collect()


def test_atomic_writer_keeps_the_old_file(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def interrupted():
        with atomic_writer(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"index_version": 1}', b"\xff"])
def test_damaged_index(folder, content):
    path, _, _ = folder
    index_path(path / "shard-000000.tar").write_bytes(content)
    with pytest.raises(UserError, match=r"shard-000000\.index\.json"):
        ShardReader(path / "shard-000000.tar")


def test_index_round_trip(folder):
    path, _, _ = folder
    tar = path / "shard-000002.tar"
    before = index_path(tar).read_bytes()
    write_index(tar, ShardReader(tar).index)
    assert index_path(tar).read_bytes() == before


def change(path, **values):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.update(values)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_manifest_round_trip(folder):
    path, _, _ = folder
    manifest = Manifest.read(path)
    before = (path / "manifest.json").read_bytes()
    manifest.write(path)
    assert (path / "manifest.json").read_bytes() == before
    assert manifest.num_samples == 37


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format_version": 2}, "format version 2"),
        ({"image_size": "32"}, "image_size"),
        ({"colour": 1}, "colour"),
        ({"shards": [{"name": "../x.tar"}]}, "shards.0.name"),
        ({"seed": -1}, "seed"),
        ({"kind": "video"}, "kind"),
        ({"kind": "jpeg"}, "manifest: jpeg shards take no tokenizer"),
        ({"kind": "latents"}, "latents shards take no tokenizer.num_tokens"),
        ({"tokenizer": None}, "palette shards need tokenizer"),
        ({"num_tokens": None}, "palette shards need num_tokens"),
        ({"latent_shape": [4, 2, 2]}, "palette shards take no latent_shape"),
        ({"image_size": None}, "palette shards need image_size"),
    ],
)
def test_invalid_manifest(folder, values, message):
    path, _, _ = folder
    change(path, **values)
    with pytest.raises(UserError, match=message):
        Manifest.read(path)


def test_missing_or_truncated_manifest(folder, tmp_path):
    path, _, _ = folder
    with pytest.raises(UserError, match="holds the shard folders shards: give one of them"):
        Manifest.read(tmp_path)
    content = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="not valid JSON"):
        Manifest.read(path)
