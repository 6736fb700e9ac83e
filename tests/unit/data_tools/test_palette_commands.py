"""`palette fit`, `palette shards`, `verify` and `inspect` on folders with good and bad images."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import webdataset
from image_files import bad_files, encoded, real_jpegs, real_picture, tree
from image_sources import small_jpeg, web_members, write_folder, write_tar
from PIL import Image

from data_tools import palette
from data_tools import shard_tasks as units
from data_tools.__main__ import main
from megavis.data.format.manifest import Manifest
from megavis.data.loading.dataset import ShardDataset
from megavis.tokenizers.palette import Palette

pytestmark = pytest.mark.once


def shards(images, palette, out, *options):
    return main(
        ["palette", "shards", str(images), "--palette", str(palette), "--out", str(out)]
        + ["--size", "16", "--samples-per-shard", "8", *options]
    )


@pytest.fixture(scope="module")
def palette_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("palette") / "palette.npy"
    centers = np.random.default_rng(0).uniform(-1, 1, (512, 3)).astype(np.float32)
    Palette(centers).save(path)
    return path


@pytest.fixture
def images(tmp_path):
    """Fourteen JPEGs in two classes, one nested, one unlabelled PNG, and all the bad files."""
    root = tmp_path / "images"
    (root / "cats" / "deep").mkdir(parents=True)
    (root / "dogs").mkdir()
    for number, path in enumerate(real_jpegs()[:14]):
        folder = ("cats", "cats/deep", "dogs")[number % 3]
        small = Image.open(path).convert("RGB").resize((60, 40 + number))
        (root / folder / f"a.b {number}.JPEG").write_bytes(encoded(small, "JPEG"))
    (root / "plain.png").write_bytes(encoded(real_picture(), "PNG"))
    (root / ".hidden").write_bytes(b"left out")
    for name, (content, _) in bad_files().items():
        (root / "dogs" / name).write_bytes(content)
    return root


def test_tokens_match_pillow(images, palette_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert shards(images, palette_file, out, "--resize", "pillow") == 0
    dataset = ShardDataset(out)
    palette = Palette.load(out / "palette.npy")
    assert len(dataset) == 15
    assert dataset.class_names == ("cats", "dogs")
    sources = {}
    for index in sorted(out.glob("*.index.json")):
        content = json.loads(index.read_text())
        sources.update(zip(content["keys"], content["sources"], strict=True))
    seen = {}
    for tar in sorted(out.glob("*.tar")):
        for sample in webdataset.WebDataset(str(tar), shardshuffle=False):
            seen[sample["__key__"]] = sample["tok"]
    assert sorted(seen) == sorted(sources)
    for number in range(15):
        key = dataset.name_of(number).split(":")[1]
        name = sources[key]
        picture = Image.open(images / name).convert("RGB")
        scale = 16 / min(picture.size)
        size = (round(picture.width * scale), round(picture.height * scale))
        resized = np.asarray(picture.resize(size, Image.Resampling.BICUBIC))
        top, left = (size[1] - 16) // 2, (size[0] - 16) // 2
        square = resized[top : top + 16, left : left + 16]
        unit = square.reshape(-1, 1, 3) / 127.5 - 1
        expected = ((unit - palette.centers.astype(np.float64)) ** 2).sum(-1).argmin(-1)
        assert dataset.read(np.array([number]))[0][0].tolist() == expected.tolist()
        label = {"cats": 0, "dogs": 1}.get(name.split("/")[0], -1)
        assert dataset.labels[number] == label
    out = capsys.readouterr().out
    assert "15 samples" in out
    assert "skipped, zero bytes: 1 (the first: dogs/zero.jpg)" in out


def test_workers_are_deterministic(images, palette_file, tmp_path):
    assert shards(images, palette_file, tmp_path / "one") == 0
    assert shards(images, palette_file, tmp_path / "two", "--workers", "2") == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert len(list((tmp_path / "one").glob("*.tar"))) == 4
    assert shards(images, palette_file, tmp_path / "three", "--seed", "1") == 0
    assert tree(tmp_path / "one") != tree(tmp_path / "three")


def test_rerun_makes_missing_shards_only(images, palette_file, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert shards(images, palette_file, out) == 0
    before = tree(out)
    tars = sorted(out.glob("*.tar"))
    tars[0].unlink()
    os.truncate(tars[1], 1000)
    tars[2].with_name("shard-000002.index.json").unlink()
    (out / "manifest.json").unlink()
    (out / ".shard-000001.tar.partial-123").write_bytes(b"killed")
    redone = []
    open_shard = units.open_shard
    monkeypatch.setattr(
        units,
        "open_shard",
        lambda path, **options: redone.append(path.name) or open_shard(path, **options),
    )
    assert shards(images, palette_file, out) == 0
    assert redone == [f"shard-00000{number}.tar" for number in range(3)]
    assert tree(out) == before


def test_interrupted_job_resumes(images, palette_file, tmp_path, monkeypatch):
    """An interrupted job finishes with the bytes of an uninterrupted one."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert shards(images, palette_file, whole) == 0
    decode_image = palette.decode_image
    calls = []

    def dies(content, **options):
        calls.append(content)
        if len(calls) == 13:
            raise KeyboardInterrupt
        return decode_image(content, **options)

    monkeypatch.setattr(palette, "decode_image", dies)
    assert shards(images, palette_file, broken) == 130
    assert not (broken / "manifest.json").exists()
    assert (broken / "shard-000000.tar").exists()
    monkeypatch.undo()
    assert shards(images, palette_file, broken) == 0
    assert tree(broken) == tree(whole)


def test_existing_shards_of_other_jobs_are_kept(images, palette_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert shards(images, palette_file, out) == 0
    before = tree(out)
    assert shards(images, palette_file, out, "--seed", "5") == 2
    (images / "new.png").write_bytes(encoded(real_picture(), "PNG"))
    assert shards(images, palette_file, out) == 2
    other = tmp_path / "other.npy"
    Palette(np.zeros((4, 3), np.float32)).save(other)
    assert shards(images, other, out) == 2
    assert tree(out) == before
    errors = capsys.readouterr().err
    assert errors.count("error: ") == errors.count("\n") == 3


def test_rejected_jobs_write_no_new_shards(images, palette_file, tmp_path, capsys):
    """Nor are those written whose numbers do not exist yet, nor other files."""
    out = tmp_path / "out"
    assert shards(images, palette_file, out) == 0
    (out / "palette.npy").unlink()
    before = tree(out)
    for number in range(10):
        (images / f"new{number}.png").write_bytes(encoded(real_picture(), "PNG"))
    assert shards(images, palette_file, out, "--slice", "5/5") == 2
    assert "made from other images or settings" in capsys.readouterr().err
    assert tree(out) == before


def test_classes_from(images, palette_file, tmp_path, capsys):
    out, small = tmp_path / "out", tmp_path / "small"
    assert shards(images, palette_file, out) == 0
    shutil.copytree(images / "dogs", small / "dogs")
    second = tmp_path / "second"
    assert shards(small, palette_file, second, "--classes-from", str(out)) == 0
    assert ShardDataset(second).class_names == ("cats", "dogs")
    assert set(ShardDataset(second).labels.tolist()) == {1}
    (small / "dogs").rename(small / "wolves")
    assert shards(small, palette_file, tmp_path / "third", "--classes-from", str(out)) == 2
    assert "'wolves'" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["absent", "empty", "all bad", "inside", "no palette", "size"])
def test_errors_are_one_line(case, images, palette_file, tmp_path, capsys):
    root, out, options = images, tmp_path / "out", ()
    if case == "absent":
        root = tmp_path / "nowhere"
    elif case == "empty":
        root = tmp_path / "nothing"
        (root / "class").mkdir(parents=True)
    elif case == "all bad":
        root = tmp_path / "bad"
        root.mkdir()
        (root / "a.jpg").write_bytes(b"")
    elif case == "inside":
        out = images / "out"
    elif case == "no palette":
        palette_file = tmp_path / "none.npy"
    else:
        options = ("--size", "0")
    assert shards(root, palette_file, out, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (out / "manifest.json").exists()


def test_fit_tells_what_it_cannot_read(tmp_path, capsys):
    good = small_jpeg(0)
    root = write_folder(tmp_path / "set", {"a.jpg": good, "b.jpg": b"", "c.jpg": good[:500]})
    words = ["palette", "fit", str(root), "--out", str(tmp_path / "palette.npy"), "--num-colors"]
    assert main([*words, "4"]) == 0
    said = capsys.readouterr().out
    assert "  skipped, zero bytes: 1 (the first: b.jpg)\n" in said
    assert "  skipped, truncated: 1 (the first: c.jpg)\n" in said
    for number in range(2):
        write_tar(tmp_path / "web" / f"{number}.tar", web_members(range(2)))
    broken = tmp_path / "web" / "0.tar"
    broken.write_bytes(broken.read_bytes()[:3_000])
    words[2] = str(tmp_path / "web")
    assert main([*words, "4"]) == 0
    assert "  skipped, tar cut off: what follows in it is lost: 1 (the first: 0.tar)" in (
        capsys.readouterr().out
    )


def test_symlink_cycles(images, palette_file, tmp_path):
    (images / "cats" / "again").symlink_to(images)
    (images / "dogs" / "broken").symlink_to(tmp_path / "gone")
    out = tmp_path / "out"
    assert shards(images, palette_file, out) == 0
    assert Manifest.read(out).skipped["unreadable file"] == 1
    assert Manifest.read(out).num_samples == 15


def test_fit_takes_as_many_pixels_from_tars_as_from_a_folder(images, tmp_path, capsys):
    """Tars do not say how many images they hold; 64 pixels of each would be few of a small set."""
    for number in range(3):
        write_tar(
            tmp_path / "web" / f"{number}.tar", web_members(range(4 * number, 4 * number + 4))
        )
    palette = tmp_path / "palette.npy"
    fit = ["palette", "fit", str(tmp_path / "web"), "--out", str(palette), "--size", "16"]
    assert main([*fit, "--num-colors", "4"]) == 0
    assert f"4 colours from {12 * 16**2} pixels" in capsys.readouterr().out


def test_fit_then_shards_then_inspect(images, tmp_path, capsys):
    palette = tmp_path / "made" / "palette.npy"
    fit = ["palette", "fit", str(images), "--out", str(palette), "--pixels", "5000"]
    assert main([*fit, "--num-colors", "64"]) == 0
    assert "palette.npy: 64 colours from" in capsys.readouterr().out
    first = palette.read_bytes()
    assert main([*fit, "--num-colors", "64"]) == 0
    assert palette.read_bytes() == first
    assert len(Palette.load(palette)) == 64
    out = tmp_path / "out"
    assert shards(images, palette, out) == 0
    assert main(["verify", str(out)]) == 0
    sheet = tmp_path / "sheet.png"
    assert main(["inspect", str(out), "--out", str(sheet), "--count", "9", "--scale", "1"]) == 0
    dataset = ShardDataset(out)
    index = np.linspace(0, 14, 9).round().astype(int)[4]
    tokens = dataset.read(np.array([index]))[0][0]
    expected = Palette.load(palette).decode(tokens).reshape(16, 16, 3)
    pixels = np.asarray(Image.open(sheet))
    assert (pixels[20:36, 20:36] == expected).all()


def test_palette_curve(images, tmp_path, capsys):
    out = tmp_path / "palette.npy"
    fit = ["palette", "fit", str(images), "--out", str(out), "--pixels", "4000"]
    assert main([*fit, "--num-colors", "16", "--curve", "64,4,16"]) == 0
    rows = [line.split(",") for line in (tmp_path / "palette_curve.csv").read_text().splitlines()]
    assert rows[0] == ["num_colors", "mean_squared_error"]
    assert [int(count) for count, _ in rows[1:]] == [4, 16, 64]
    errors = [float(error) for _, error in rows[1:]]
    assert errors == sorted(errors, reverse=True)
    output = capsys.readouterr().out
    assert "palette.npy: 16 colours from" in output
    assert f"mean squared error {errors[1]:.1f} (summed over" in output
    assert Image.open(tmp_path / "palette_curve.png").width > 300
    assert len(Palette.load(out)) == 16
    for wrong in ("a,b", "0,4", "600"):
        assert main([*fit, "--curve", wrong]) == 2
    assert "'600' is not a whole number from 1 to 512" in capsys.readouterr().err


def test_released_palette_format(images, tmp_path):
    """`kmeans_centers.npy`, float32 `[512, 3]` in [-1, 1], is copied unchanged."""
    released = tmp_path / "kmeans_centers.npy"
    centers = np.random.default_rng(5).uniform(-1, 1, (512, 3)).astype(np.float32)
    np.save(released, centers)
    out = tmp_path / "out"
    assert shards(images, released, out) == 0
    kept = np.load(out / "palette.npy")
    assert kept.dtype == np.float32
    assert np.array_equal(kept, centers)
    assert (out / "palette.npy").read_bytes() == released.read_bytes()


def test_fit_with_too_few_colours(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    Image.new("RGB", (40, 40), (1, 2, 3)).save(tmp_path / "a" / "flat.png")
    assert main(["palette", "fit", str(tmp_path / "a"), "--out", str(tmp_path / "p.npy")]) == 2
    assert "1 distinct colours" in capsys.readouterr().err


def damage(out, case):
    tar = out / "shard-000001.tar"
    if case == "flipped bit":
        content = bytearray(tar.read_bytes())
        content[600] ^= 4
        tar.write_bytes(content)
    elif case == "cut":
        os.truncate(tar, tar.stat().st_size // 2)
    elif case == "missing":
        tar.unlink()
    elif case == "index":
        (out / "shard-000001.index.json").write_bytes(b"{}")
    elif case == "palette":
        Palette(np.zeros((512, 3), np.float32)).save(out / "palette.npy")


@pytest.mark.parametrize("case", ["flipped bit", "cut", "missing", "index", "palette"])
def test_verify_reports_damage(case, images, palette_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert shards(images, palette_file, out) == 0
    damage(out, case)
    capsys.readouterr()
    assert main(["verify", str(out)]) == 1
    output = capsys.readouterr().out
    assert output.startswith("wrong: ")
    assert ("palette.npy" if case == "palette" else "shard-000001") in output


def test_verify_without_manifest(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    assert "manifest.json is missing" in capsys.readouterr().err


def test_module_entry_point(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "data_tools", "verify", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
