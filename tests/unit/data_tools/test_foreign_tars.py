"""Tars of others: samples are those that webdataset itself finds, whatever their names are."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile

import pytest
import webdataset
from image_sources import opened, small_jpeg, tar_bytes, write_tar

from data_tools.__main__ import main
from megavis.data.format.manifest import Manifest

pytestmark = pytest.mark.once

SAMPLES = {
    "a dot in a folder": ["a.b/c.jpg", "a.b/c.txt", "a.b/d.jpg"],
    "a folder": ["./a.jpg", "./a.json", "b/c/a.jpg", "b/c/a.txt"],
    "several suffixes": ["a.seg.png", "a.jpg", "a.left.view.jpg", "b.1.jpg", "b.2.jpg"],
    "upper case": ["a.JPG", "a.Txt", "B.Jpeg", "b.jpeg"],
    "the same name twice": ["a.jpg", "a.txt", "a.jpg", "a.txt", "b.jpg"],
    "the same name in two cases": ["a.jpg", "a.JPG", "b.txt", "b.TXT", "b.jpg"],
    "apart": ["a.jpg", "b.jpg", "a.txt", "a.png"],
    "no suffix": ["a.jpg", "a", "b", "c.", "d/e", "d.f/e"],
    "metadata": ["__index__", "__meta__/a.jpg", "__a__.jpg", "b.jpg", "c/__d__/e.jpg"],
    "a suffix like webdataset's own keys": ["a.jpg", "a.__key__", "a.__url__", "b.__key__.jpg"],
    "hidden": ["._a.jpg", "a.jpg", ".DS_Store", "._b.txt", "b.jpg"],
    "no Latin": ["\u9f8d/\u864e.jpg", "\u9f8d/\u864e.txt", "\u9f8d \u864e.jpg"],
}


def zstd(content):
    """Return a frame of one block, stored as it is."""
    return b"\x28\xb5\x2f\xfd" + bytes(9) + content


def content_of(number, name):
    return small_jpeg(number) if name.lower().endswith(("jpg", "jpeg", "png")) else b"words"


def write(folder, names):
    members = [(name, content_of(number, name)) for number, name in enumerate(names)]
    return write_tar(folder / "0.tar", members)


def read(tar):
    """Return contents of images, and reasons of rejected files by name, as `data_tools` reads."""
    refused = {}
    [part] = opened(tar).parts(files_per_part=1, seed=0)
    return [picture.content for picture in part.pictures(refused.__setitem__)], refused


def images_of_webdataset(tar):
    """Return the first image of each sample that has one, as webdataset expands and groups."""
    found = []
    go_on = webdataset.ignore_and_continue
    for sample in webdataset.WebDataset(str(tar), shardshuffle=False, handler=go_on):
        images = [sample[key] for key in sample if key.endswith(("jpg", "jpeg", "png"))]
        found += images[:1]
    return found


@pytest.mark.parametrize("names", SAMPLES.values(), ids=SAMPLES)
def test_samples_are_those_of_webdataset(names, tmp_path):
    tar = write(tmp_path, names)
    found, _ = read(tar)
    assert found == images_of_webdataset(tar)
    assert found


@pytest.mark.parametrize("crops", [1, 3])
def test_images_of_one_name_are_counted_each(crops, tmp_path):
    tar = write(tmp_path, ["a.jpg", "b.jpg", "a.jpg", "a.txt", "a.png"])
    palette, out = tmp_path / "palette.npy", tmp_path / "out"
    assert main(["palette", "grey", "--num-colors", "2", "--out", str(palette)]) == 0
    words = ["palette", "shards", str(tar), "--palette", str(palette), "--out", str(out)]
    words += ["--size", "8", "--crop", "random", "--crops", str(crops)]
    for _ in range(2):  # then from the index
        assert main(words) == 0
        assert Manifest.read(out).num_samples == 3 * crops
        assert Manifest.read(out).source.num_files == 4
        (out / "manifest.json").unlink()


def test_second_files_are_named(tmp_path):
    _, refused = read(write(tmp_path, ["a.jpg", "a.png", "a.JPG", "a.txt", "a.txt"]))
    assert refused == {
        "0.tar/a.png": "another image of its sample",
        "0.tar/a.JPG": "another file of its sample with this suffix",
        "0.tar/a.txt": "another file of its sample with this suffix",
    }


def test_hidden_files_in_folders_are_no_samples(tmp_path):
    """webdataset would make a sample `b/` of the resource forks that macOS adds to a tar."""
    tar = write(tmp_path, ["b/._c.jpg", "b/c.jpg"])
    assert read(tar)[0] == [small_jpeg(1)]
    assert len(images_of_webdataset(tar)) == 2


def test_long_names_of_any_tar_format(tmp_path):
    """What TarWriter, GNU's tar and others write for names of more than 100 bytes."""
    key = "/".join(["a folder of a long name"] * 12)
    sample = {"__key__": key, "jpg": small_jpeg(0), "txt": b"words"}
    written = io.BytesIO()
    with webdataset.TarWriter(written, encoder=False) as tar:
        tar.write(sample)
    gnu = tar_bytes([(f"{key}.jpg", sample["jpg"]), (f"{key}.txt", b"words")])
    for name, content in {"pax": written.getvalue(), "gnu": gnu}.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(content)
        assert read(path) == ([small_jpeg(0)], {})
        assert images_of_webdataset(path) == [small_jpeg(0)]


def test_links_and_members_without_a_suffix_are_counted(tmp_path, capsys):
    buffer = io.BytesIO(tar_bytes([("a.jpg", small_jpeg(0)), ("README", b"words")]))
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        link = tarfile.TarInfo("b.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "a.jpg"
        tar.addfile(link)
    (tmp_path / "0.tar").write_bytes(buffer.getvalue())
    assert main(["jpeg", str(tmp_path / "0.tar"), "--out", str(tmp_path / "out")]) == 0
    assert "not read in the tars: 1 without a suffix" in capsys.readouterr().out
    assert Manifest.read(tmp_path / "out").skipped == {"link in a tar": 1}


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstd])
def test_compressed_tars_named_as_plain_ones(pack, tmp_path):
    """webdataset unpacks them; here the reason tells what to do, and the others are read."""
    plain = write(tmp_path / "web", ["BZh.jpg", "b.jpg"])
    (tmp_path / "web" / "1.tar").write_bytes(pack(plain.read_bytes()))
    (tmp_path / "web" / "2.tar").write_bytes(plain.read_bytes()[:2500])
    assert main(["jpeg", str(tmp_path / "web"), "--out", str(tmp_path / "out")]) == 0
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.num_samples == 3
    assert manifest.skipped["compressed tar: unpack it first"] == 1
    assert "tar cut off: what follows in it is lost" in manifest.skipped
