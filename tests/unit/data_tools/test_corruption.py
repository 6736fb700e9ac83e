"""Corrupt image sets in every layout, through every verb.

All bad files are reported, and all good images are kept.
"""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import zlib

import numpy as np
import pytest
from image_files import bad_files, encoded, real_picture, sixteen_bit_rgb_png
from image_sources import (
    class_tar,
    small_jpeg,
    tar_bytes,
    training_files,
    web_members,
    write_folder,
    write_tar,
)
from PIL import Image
from small_codebook import SmallCodebook, write_run

from data_tools.__main__ import main
from data_tools.tars import CUT, DAMAGED, EMPTY
from megavis.data.format.files import sha256_of_file
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import open_shard, write_index
from megavis.data.loading.dataset import ShardDataset
from megavis.tokenizers import network_tokenizer
from megavis.tokenizers.palette import Palette
from megavis.tokenizers.shapes import VAEShape
from megavis.tokenizers.vae import VAE

pytestmark = pytest.mark.once

CLASS = "n02000000"
LATIN_1 = b"caf\xe9.JPEG".decode("utf-8", "surrogateescape")


def huge_jpeg():
    """A small JPEG whose header claims 65,500 x 65,500 pixels."""
    content = bytearray(small_jpeg(0))
    start = content.index(b"\xff\xc0")
    content[start + 5 : start + 9] = struct.pack(">HH", 65500, 65500)
    return bytes(content)


def huge_png():
    """A small PNG whose header claims 60,000 x 60,000 pixels: a decompression bomb."""
    content = bytearray(encoded(real_picture(), "PNG"))
    content[16:24] = struct.pack(">II", 60000, 60000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


def rotated_jpeg():
    """A JPEG with the EXIF orientation of a camera held upright."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(real_picture(), "JPEG", exif=exif)


def odd_files():
    """Name -> (bytes, reported reason; None for a good image)."""
    picture, jpeg = real_picture(), encoded(real_picture(), "JPEG")
    grey16 = Image.fromarray(np.linspace(0, 65535, 64 * 48).astype(np.uint16).reshape(48, 64))
    frames = [picture.rotate(angle) for angle in (0, 90)]
    alpha = picture.copy()
    alpha.putalpha(100)
    rgb16 = sixteen_bit_rgb_png(np.full((40, 40, 3), 30000, np.uint16))
    gif = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    return {
        "half.JPEG": (jpeg[: len(jpeg) // 2], "truncated"),
        "zero.JPEG": (b"", "zero bytes"),
        "hole.JPEG": bad_files()["hole.jpg"],
        "text.jpg": (b"text in spite of its name", "not an image"),
        "page.jpg": (b"<html><body>404</body></html>", "not an image"),
        "huge.JPEG": (huge_jpeg(), "too large"),
        "bomb.png": (huge_png(), "too large"),
        "grey.JPEG": (encoded(picture.convert("L"), "JPEG"), None),
        "cmyk.JPEG": (encoded(picture.convert("CMYK"), "JPEG"), None),
        "alpha.png": (encoded(alpha, "PNG"), None),
        "grey16.png": (encoded(grey16, "PNG"), None),
        "rgb16.png": (rgb16, None),
        "animated.gif": (gif, None),
        "really_a_png.JPEG": (encoded(picture, "PNG"), None),
        "rotated.JPEG": (rotated_jpeg(), None),
        LATIN_1: (small_jpeg(40), None),
        "two.dots.JPEG": (small_jpeg(41), None),
    }


def folder_layout(root):
    """A training folder of `odd_files` with a folder, a dangling link and a pipe."""
    odd = {f"{CLASS}/{name}": content for name, (content, _) in odd_files().items()}
    write_folder(root / "set", training_files(2) | odd)
    place = root / "set" / CLASS
    (place / "folder.jpg").mkdir()
    (place / "gone.JPEG").symlink_to(root / "nowhere")
    os.mkfifo(place / "pipe.JPEG")
    return root / "set", {
        f"{CLASS}/gone.JPEG": "unreadable file",
        f"{CLASS}/pipe.JPEG": "not a regular file",
    }


def tar_layout(root):
    """A tar of tars of `odd_files` with a folder, a link and a duplicate name."""
    odd = {f"{CLASS}/{name}": content for name, (content, _) in odd_files().items()}
    files = training_files(2) | odd
    tars = [(f"{name}.tar", class_tar(name, files)) for name in ("n01000000", "n03000000")]
    buffer = io.BytesIO(class_tar(CLASS, files))
    with tarfile.open(fileobj=buffer, mode="a", encoding="utf-8") as tar:
        for name, kind in (("folder.jpg", tarfile.DIRTYPE), ("link.JPEG", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "elsewhere.JPEG"
            tar.addfile(info)
        info = tarfile.TarInfo("zero.JPEG")  # a second time
        tar.addfile(info)
    tars += [(f"{CLASS}.tar", buffer.getvalue()), ("README", b"not a class")]
    return write_tar(root / "train.tar", tars), {
        f"{CLASS}/link.JPEG": "link in a tar",
        f"{CLASS}/zero.JPEG": "duplicate name: the last one counts",
        "README": "not the tar of a class",
    }


def web_layout(root):
    """A webdataset tar of `odd_files`, each with a caption."""
    members = []
    for name, (content, _) in odd_files().items():
        members += [(f"{CLASS}/{name}", content), (f"{CLASS}/{name.split('.')[0]}.txt", b"words")]
    good = list(training_files(2).items())
    both = [("both.JPEG", small_jpeg(1)), ("both.png", encoded(real_picture(), "PNG"))]
    write_tar(root / "web" / "00000.tar", members + both + good[1:])
    return root / "web", {"00000.tar/both.png": "another image of its sample"}


LAYOUTS = {"folder": folder_layout, "tar of tars": tar_layout, "webdataset": web_layout}
PREFIXES = {"folder": "", "tar of tars": "", "webdataset": "00000.tar/"}


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def odd_set(request, tmp_path_factory):
    """`(place, [(name, reason)] of refused files, number of good images)` of each layout."""
    place, more = LAYOUTS[request.param](tmp_path_factory.mktemp("odd"))
    prefix, odd = PREFIXES[request.param], odd_files()
    refused = {f"{prefix}{CLASS}/{name}": why for name, (_, why) in odd.items() if why}
    return place, [*refused.items(), *more.items()], 6 + sum(not why for _, why in odd.values())


@pytest.fixture(scope="module")
def palette_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("palette") / "palette.npy"
    Palette(np.random.default_rng(0).uniform(-1, 1, (16, 3)).astype(np.float32)).save(path)
    return path


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Run folders of untrained tokenizers by verb: latents and ids."""
    folder = tmp_path_factory.mktemp("tokenizers")
    vae = VAE(
        VAEShape(latent_channels=2, filters=8, multipliers=(1, 1), blocks_per_level=1, groups=4)
    )
    section = {"name": "vae", **vae.settings, "norm_groups": vae.settings["groups"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            network_tokenizer.TOKENIZERS, "small_codebook", "small_codebook:SmallCodebook"
        )
        runs = {
            "latents": write_run(folder / "latents", vae, section),
            "ids": SmallCodebook(30).save_run(folder / "ids"),
        }
        yield runs


@pytest.fixture(scope="module")
def verb_words(palette_file, tokenizers):
    """Return a function that builds the command line of a verb."""
    network = ["--size", "16", "--batch-size", "4", "--tokenizer"]
    options = {
        "palette shards": ["--palette", str(palette_file), "--size", "16"],
        "jpeg": [],
        "jpeg --size": ["--size", "16"],
        "latents": [*network, str(tokenizers["latents"])],
        "ids": [*network, str(tokenizers["ids"])],
        "filter": ["--min-side", "1", "--keep-duplicates"],
    }

    def words(verb, place, out):
        return [*verb.split(" --")[0].split(), str(place), "--out", str(out), *options[verb]]

    return words


def reported(out):
    """Return the sorted `(name, reason)` pairs of the report."""
    skipped = json.loads((out / "report.json").read_text())["skipped"]
    return sorted((name, reason) for reason, names in skipped.items() for name in names)


@pytest.mark.parametrize("verb", ["palette shards", "jpeg", "jpeg --size", "latents", "ids"])
def test_bad_images_are_reported_and_good_ones_kept(
    verb, odd_set, verb_words, tokenizers, tmp_path
):
    place, refused, num_good = odd_set
    out, copy, both = tmp_path / "out", tmp_path / "copy", tmp_path / "both"
    assert main(verb_words(verb, place, out)) == 0
    assert reported(out) == sorted(refused)
    manifest = Manifest.read(out)
    assert manifest.num_samples == num_good
    assert sum(manifest.skipped.values()) == len(reported(out))
    assert manifest.source.num_files == num_good + len(reported(out))
    assert main(["verify", str(out)]) == 0
    show = ["--tokenizer", str(tokenizers[verb])] if verb in tokenizers else []
    assert main(["inspect", str(out), "--out", str(tmp_path / "sheet.png"), *show]) == 0
    assert main(["reshard", str(out), "--out", str(copy), "--samples-per-shard", "5"]) == 0
    assert main(["merge", str(out), str(copy), "--out", str(both)]) == 0
    assert Manifest.read(both).num_samples == 2 * num_good


def test_filter_and_palette_fit(odd_set, verb_words, tmp_path):
    place, refused, num_good = odd_set
    out = tmp_path / "out"
    assert main(verb_words("filter", place, out)) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["num_kept"] == num_good
    lines = (out / "dropped-000000.jsonl").read_text().splitlines()
    dropped = {(line["name"], line["reason"]) for line in map(json.loads, lines)}
    assert dropped >= set(refused)
    fit = ["palette", "fit", str(place), "--out", str(tmp_path / "palette.npy")]
    assert main([*fit, "--num-colors", "16", "--pixels", "4000"]) == 0


def test_exif_orientation_is_ignored(tmp_path):
    write_folder(tmp_path / "set", {"a.JPEG": rotated_jpeg()})
    words = ["jpeg", str(tmp_path / "set"), "--out", str(tmp_path / "out"), "--size", "32"]
    assert main([*words, "--quality", "100"]) == 0
    stored = ShardDataset(tmp_path / "out").read(np.array([0]))[0][0].astype(int)
    upright = np.asarray(real_picture().resize((48, 32), Image.Resampling.BICUBIC))[:, 8:40]
    assert np.abs(stored - upright).mean() < 6  # of 255: two JPEGs


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read every file")
def test_unreadable_file_is_reported(tmp_path):
    root = write_folder(tmp_path / "set", {"a.JPEG": small_jpeg(0), "b.JPEG": small_jpeg(1)})
    (root / "a.JPEG").chmod(0)
    assert main(["jpeg", str(root), "--out", str(tmp_path / "out")]) == 0
    assert reported(tmp_path / "out") == [("a.JPEG", "unreadable file")]


def whole_tar(size=None):
    """Return a tar of three images and the offset of its second member.

    `size` overrides the size in the second member's header.
    """
    buffer = io.BytesIO()
    places = []
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(3):
            content = small_jpeg(number)
            info = tarfile.TarInfo(f"{CLASS}_{number}.JPEG")
            info.size = size if size and number == 1 else len(content)
            places.append(tar.offset)
            buffer.write(info.tobuf(tarfile.GNU_FORMAT))
            buffer.write(content + bytes(-len(content) % 512))
            tar.offset = buffer.tell()
    return buffer.getvalue(), places[1]


def broken_tars():
    """Case -> (bytes of a broken tar, reported reason, number of readable images of three)."""
    whole, second = whole_tar()
    return {
        "cut": (whole[: second + 900], CUT, 1),
        "cut at a header": (whole[: second + 100], CUT, 1),
        "cut at a member": (whole[:second], CUT, 1),
        "checksum": (whole[: second + 100] + b"9999" + whole[second + 104 :], DAMAGED, 1),
        "hole": (whole[:second] + bytes(512) + whole[second + 512 :], DAMAGED, 1),
        "lying size": (whole_tar(1 << 40)[0], CUT, 1),
        "no bytes": (b"", EMPTY, 0),
        "noise": (bytes(range(256)) * 20, DAMAGED, 0),
    }


@pytest.mark.parametrize("case", sorted(broken_tars()))
@pytest.mark.parametrize("layout", ["tar of tars", "webdataset"])
def test_broken_tars_are_read_up_to_the_damage(layout, case, verb_words, tmp_path):
    broken, why, left = broken_tars()[case]
    good = training_files(2)
    if layout == "tar of tars":
        names = ("n01000000", "n03000000")
        tars = [(f"{name}.tar", class_tar(name, good)) for name in names]
        place = write_tar(tmp_path / "train.tar", [*tars[:1], (f"{CLASS}.tar", broken), tars[1]])
        named = f"{CLASS}/{CLASS}.tar"
    else:
        place = tmp_path / "web"
        for number in (0, 2):
            write_tar(place / f"{number:05d}.tar", web_members(range(number, number + 2)))
        (place / "00001.tar").write_bytes(broken)
        named = "00001.tar"
    for verb in ("palette shards", "jpeg", "latents", "ids", "filter"):
        out = tmp_path / verb
        assert main(verb_words(verb, place, out)) == 0
        if verb == "filter":
            lines = "".join(path.read_text() for path in sorted(out.glob("dropped-*")))
            assert json.loads((out / "report.json").read_text())["num_kept"] == 4 + left
            assert f'"name": "{named}", "reason": "{why}"' in lines
        else:
            assert Manifest.read(out).num_samples == 4 + left
            assert (named, why) in reported(out)
            assert main(["verify", str(out)]) == 0


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_truncated_train_tar(share, tmp_path):
    files = training_files(2)
    tars = [(f"{name}.tar", class_tar(name, files)) for name in ("n01000000", CLASS, "n03000000")]
    content = tar_bytes(tars)
    place = tmp_path / "train.tar"
    place.write_bytes(content[: int(len(content) * share)])
    assert main(["jpeg", str(place), "--out", str(tmp_path / "out")]) == 0
    assert ("train.tar", CUT) in reported(tmp_path / "out")
    assert 1 <= Manifest.read(tmp_path / "out").num_samples < 6


@pytest.mark.parametrize("case", ["no member", "no bytes", "all broken"])
def test_no_valid_image_is_an_error(case, tmp_path, capsys):
    contents = {
        "no member": tar_bytes([]),
        "no bytes": b"",
        "all broken": tar_bytes([("a.jpg", b"")]),
    }
    (tmp_path / "a.tar").write_bytes(contents[case])
    assert main(["jpeg", str(tmp_path / "a.tar"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "is a valid image" in error
    if case != "no member":
        assert len(reported(tmp_path / "out")) == 1


@pytest.mark.parametrize("case", ["label", "stray", "key"])
def test_verify_checks_more_than_hashes(case, tmp_path, capsys):
    place = write_folder(tmp_path / "set", training_files(1))
    out = tmp_path / "out"
    assert main(["jpeg", str(place), "--out", str(out)]) == 0
    if case == "stray":
        (out / "old.tar").write_bytes(tar_bytes([]))
    else:
        rewrite_index(out, label=7 if case == "label" else None)
    capsys.readouterr()
    assert main(["verify", str(out)]) == 1
    assert {
        "label": "has the label 7, but there are 3 classes",
        "stray": "old.tar is not in the manifest",
        "key": "has two samples with the same key",
    }[case] in capsys.readouterr().out


def rewrite_index(out, label):
    """Change the first label, or give all samples one key if None; update all hashes."""
    tar, index_file = out / "shard-000000.tar", out / "shard-000000.index.json"
    index = json.loads(index_file.read_text())
    if label is not None:
        index["labels"][0] = label
    else:
        index["keys"] = [index["keys"][0]] * len(index["keys"])
        with open_shard(tar, job=index["job"], suffix="jpg") as writer:
            for key in index["keys"]:
                writer.add(key, small_jpeg(0), label=0, source="a")
        write_index(tar, writer.index)
        index = json.loads(index_file.read_text())
    index_file.write_text(json.dumps(index))
    manifest = json.loads((out / "manifest.json").read_text())
    shard = manifest["shards"][0]
    shard["num_bytes"] = tar.stat().st_size
    shard["sha256"], shard["index_sha256"] = sha256_of_file(tar), sha256_of_file(index_file)
    (out / "manifest.json").write_text(json.dumps(manifest))
