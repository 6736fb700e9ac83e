"""`filter`: reasons, use of the selection by other verbs, reruns."""

from __future__ import annotations

import json
import math

import imagehash
import numpy as np
import pytest
from image_files import encoded
from image_sources import tar_bytes, write_folder, write_tar
from PIL import Image
from web_images import (
    DROPPED,
    filter_words,
    jpeg,
    photograph,
    write_web,
)

import megavis
from data_tools import filter_decision, filter_images, measurements
from data_tools.__main__ import main
from data_tools.filter_decision import fit_likeness
from data_tools.measurements import MeasurementEncoder, RunFeatures, features, read_measurements
from data_tools.photographs import Photograph, load_photograph
from data_tools.source_formats import open_unlabelled
from data_tools.sources import SourceImage
from megavis.cli import main as train
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader
from megavis.parallel.context import close_context

BELOW = "filtered: shorter side below 32 pixels"
pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    return write_web(tmp_path_factory.mktemp("web"))


def dropped_lines(out):
    paths = sorted(out.glob("dropped-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_drop_reasons_and_selection(web, tmp_path, capsys):
    out, shards = tmp_path / "selection", tmp_path / "shards"
    assert main(filter_words(web, out)) == 0
    assert "14 of 22 pictures kept" in capsys.readouterr().out
    lines = dropped_lines(out)
    assert {line["name"].split("/")[1]: line["reason"] for line in lines} == DROPPED
    close = {line["name"].split("/")[1]: line.get("close_to") for line in lines}
    assert close["000000004.jpg"] == "00001.tar/100000001.jpg"
    assert close["100000000.jpg"] == "00000.tar/000000003.jpg"
    assert close["100000004.jpg"] == "a.png"
    report = json.loads((out / "report.json").read_text())
    assert report["num_files"] == 22
    assert sum(report["dropped"].values()) == len(DROPPED)
    words = ["jpeg", str(web / "tars"), "--out", str(shards), "--selection", str(out)]
    assert main(words) == 0
    manifest = Manifest.read(shards)
    assert manifest.num_samples == 14
    assert manifest.skipped["filtered: excluded"] == 1
    other = write_folder(tmp_path / "other", {"a.jpg": jpeg(photograph(0))})
    words = ["jpeg", str(other), "--out", str(tmp_path / "no"), "--selection", str(out)]
    assert main(words) == 2
    assert "was made from other images" in capsys.readouterr().err


def test_reruns_reuse_measurements(web, tmp_path, monkeypatch):
    out, again = tmp_path / "out", tmp_path / "again"
    for part in ("2/2", "1/2"):
        assert main([*filter_words(web, out), "--slice", part]) == 0
    assert main(filter_words(web, again)) == 0
    names = [path.name for path in (*out.glob("dropped-*"), out / "report.json")]
    assert len(names) == 3
    assert all((out / name).read_bytes() == (again / name).read_bytes() for name in names)
    monkeypatch.setattr(measurements, "measure", lambda *_: pytest.fail("measured again"))
    assert main([*filter_words(web, out), "--min-side", "1", "--keep-duplicates"]) == 0
    dropped = {line["name"].split("/")[1] for line in dropped_lines(out)}
    assert dropped == set(DROPPED) - {"000000004.jpg", "100000000.jpg", "100000002.jpg"}
    assert main(filter_words(web, out)) == 0
    assert all((out / name).read_bytes() == (again / name).read_bytes() for name in names)


def test_slices_that_overtake_each_other(web, tmp_path, monkeypatch):
    """The last slice decides, even if another one finished its first job."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    run_job = filter_images.run_job

    def overtaken(*job, **options):
        failed = run_job(*job, **options)
        monkeypatch.undo()  # after the first job
        assert main([*filter_words(web, out), "--slice", "2/2"]) == 0
        assert not (out / "report.json").exists()
        return failed

    monkeypatch.setattr(filter_images, "run_job", overtaken)
    assert main([*filter_words(web, out), "--slice", "1/2"]) == 0
    assert main(filter_words(web, whole)) == 0
    assert (out / "report.json").read_bytes() == (whole / "report.json").read_bytes()


def texture(number):
    """Return a crop of a texture, unlike the photographs of objects."""
    name = ("brick", "grass", "gravel")[number % 3]
    picture = load_photograph(Photograph(name, "skimage", f"data/{name}.png", "right"))
    left, top = np.random.default_rng(number).integers(0, 380, 2).tolist()
    return picture.crop((left, top, left + 120, top + 120))


def crops(numbers):
    return {f"{n}.jpg": jpeg(photograph(n % 12).crop((n, n, 90 + n, 70 + n))) for n in numbers}


def measure(content):
    """Return the measurement of a file."""
    (((payload,),),) = MeasurementEncoder().encode([SourceImage("key", "name", -1, content)])
    return np.frombuffer(payload, measurements.measurement())[0]


def test_likeness_generalizes():
    def numbers(pictures):
        return np.stack([measure(content)["features"] for content in pictures])

    textures = numbers(jpeg(texture(n)) for n in range(60))
    likeness = fit_likeness(numbers(crops(range(30)).values()), textures[:40])
    photographs = numbers(jpeg(photograph(n)) for n in range(12, 20))
    assert likeness.area > 0.95
    assert (likeness(photographs) > 0.5).sum() >= 7
    assert (likeness(textures[40:]) < 0.5).all()


def test_unlike_images_are_dropped(tmp_path, capsys):
    write_folder(tmp_path / "wanted", crops(range(20)))
    found = {f"texture{n}.jpg": jpeg(texture(n)) for n in range(30)}
    write_folder(tmp_path / "found", found | crops(range(20, 25)))
    out, shards = tmp_path / "out", tmp_path / "shards"
    words = ["filter", str(tmp_path / "found"), "--out", str(out), "--keep-duplicates"]
    assert main([*words, "--like", str(tmp_path / "wanted")]) == 0
    assert "with an area under ROC of" in capsys.readouterr().out
    dropped = [line["name"] for line in dropped_lines(out)]
    assert {line["reason"] for line in dropped_lines(out)} == {"unlike the pictures of --like"}
    assert sum(name in found for name in dropped) >= 28
    assert (
        main(["jpeg", str(tmp_path / "found"), "--out", str(shards), "--selection", str(out)]) == 0
    )
    assert Manifest.read(shards).num_samples == 35 - len(dropped)


def images_of_one_name(folder):
    """Return a tar of tars, and a tar with a picture twice and another, small one, of one name."""
    sides = {0: 90, 1: 80, 2: 9}
    first, other, small = (jpeg(photograph(n).crop((0, 0, s, s))) for n, s in sides.items())
    members = [("a.jpg", first), ("b.jpg", other), ("a.jpg", first), ("b.jpg", small)]
    train = folder / "train" / "ILSVRC2012_img_train.tar"
    return write_tar(train, [("n01440764.tar", tar_bytes(members))]), write_tar(
        folder / "web" / "0.tar", members
    )


def test_dropped_images_are_not_told_as_other_files(tmp_path, capsys):
    small = encoded(np.zeros((8, 8, 3), np.uint8), "PNG")
    files = {f"{number}.jpg": jpeg(photograph(number)) for number in range(3)}
    root = write_folder(tmp_path / "images", files | {"small.png": small, "a.txt": b"a"})
    assert main(["filter", str(root), "--out", str(tmp_path / "selection")]) == 0
    capsys.readouterr()
    words = ["--selection", str(tmp_path / "selection"), "--out", str(tmp_path / "out")]
    assert main(["jpeg", str(root), *words]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == f"{root}: 3 images, 2 files that `filter` dropped, no classes and no labels"


def test_images_of_one_name_are_dropped_one_by_one(tmp_path):
    """By name, an image would be dropped with its duplicate, and both would be lost."""
    train, web = images_of_one_name(tmp_path)
    for tar, skipped in (
        (train, {"duplicate name: the last one counts": 2, BELOW: 1}),
        (web, {"filtered: near-duplicate of another picture": 1, BELOW: 1}),
    ):
        out, shards = tmp_path / f"f{tar.name}", tmp_path / f"s{tar.name}"
        assert main(["filter", str(tar), "--out", str(out), "--min-side", "32"]) == 0
        assert main(["jpeg", str(tar), "--out", str(shards), "--selection", str(out)]) == 0
        report = json.loads((out / "report.json").read_text())
        assert Manifest.read(shards).num_samples == report["num_kept"]
        assert Manifest.read(shards).skipped == skipped
    measured, small = tmp_path / "measured", tmp_path / "small"
    words = ["jpeg", str(web), "--out", str(tmp_path / "all"), "--measure", str(measured)]
    assert main(words) == 0
    assert main(["filter", str(web), "--out", str(measured), "--min-side", "32"]) == 0
    words = ["reshard", str(tmp_path / "all"), "--out", str(small), "--selection", str(measured)]
    assert main(words) == 0
    assert Manifest.read(small).num_samples == 2


@pytest.mark.parametrize(("wanted", "found"), [(1, 12), (12, 9)])
def test_too_few_images_to_compare_with(wanted, found, tmp_path, capsys):
    """Of one image the classifier learned that all others are unlike it."""
    damaged = {f"damaged{number}.jpg": b"" for number in range(10)}
    write_folder(tmp_path / "wanted", crops(range(wanted)) | damaged)
    write_folder(tmp_path / "found", crops(range(12, 12 + found)))
    words = ["filter", str(tmp_path / "found"), "--out", str(tmp_path / "out")]
    assert main([*words, "--like", str(tmp_path / "wanted")]) == 2
    what = "--like has 1 image" if wanted == 1 else "the source has 9 images"
    error = capsys.readouterr().err
    assert f"{what} that can be read: give 10 or more to compare with --like" in error
    assert not (tmp_path / "out" / "report.json").exists()


def test_an_aspect_that_is_no_number(tmp_path, capsys):
    write_folder(tmp_path / "found", crops(range(2)))
    words = ["filter", str(tmp_path / "found"), "--out", str(tmp_path / "out")]
    assert main([*words, "--max-aspect", "nan"]) == 2
    assert "--max-aspect must be at least 1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def small_run(tiny_config, tmp_path_factory):
    """The folder of a short iGPT run."""
    folder = tmp_path_factory.mktemp("runs")
    options = [
        f"output={folder}",
        "name=few",
        "training.steps=2",
        "schedule.warmup_steps=0",
        "--device",
        "cpu",
    ]
    assert train(["train", str(tiny_config), *options]) == 0
    return folder / "few"


@pytest.fixture
def job_of_a_run():
    """Close the job that opening a run has started, and clear the cache of runs."""
    yield
    measurements._opened.cache_clear()
    close_context()


def test_features_of_a_run(tmp_path, small_run, capsys, job_of_a_run):
    """--features uses the features of `megavis.load` on resized images."""
    write_folder(tmp_path / "wanted", crops(range(10)))
    write_folder(tmp_path / "found", crops(range(10, 22)))
    out = tmp_path / "out"
    words = ["filter", str(tmp_path / "found"), "--out", str(out), "--min-likeness", "0"]
    words += ["--min-side", "1", "--features", str(small_run)]
    assert main(words) == 2
    assert "--features needs --like" in capsys.readouterr().err
    assert main([*words, "--like", str(tmp_path / "wanted")]) == 0
    index = ShardReader(out / "measurements" / "shard-000000.tar").index
    measured = read_measurements(out / "measurements" / "shard-000000.tar", index)
    run = megavis.load(str(small_run), device="cpu")
    side, half = run.config.data.image_size, run.config.model.num_layers // 2
    for name, vector in zip(index.sources, measured["features"], strict=True):
        image = Image.open(tmp_path / "found" / name).convert("RGB")
        pixels = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))
        expected = run.features(pixels[None], layer=half)[0].numpy()
        # simplejpeg and Pillow may round differently, which changes a few ids.
        assert np.corrcoef(vector.astype(float), expected)[0, 1] > 0.99
    assert RunFeatures.open(small_run).width == run.config.model.hidden_size
    assert main([*words, "--like", str(tmp_path / "wanted"), "--features", "nowhere"]) == 2
    assert "nowhere has no checkpoint" in capsys.readouterr().err


def test_the_classifier_sees_images_of_the_whole_source(
    tmp_path, small_run, monkeypatch, job_of_a_run
):
    """Of fewer than twice --like-count images too; a tar without any has no width of features."""
    pictures = list(crops(range(15)).items())
    tars = (pictures[:7], [("damaged.jpg", b"")], pictures[7:])
    for number, members in enumerate(tars):
        write_tar(tmp_path / "found" / f"{number}.tar", members)
    write_folder(tmp_path / "wanted", crops(range(15, 25)))
    fitted = []

    def fit(wanted, found):
        fitted.append(found)
        return fit_likeness(wanted, found)

    monkeypatch.setattr(filter_decision, "fit_likeness", fit)
    words = ["filter", str(tmp_path / "found"), "--out", str(tmp_path / "out")]
    words += ["--like", str(tmp_path / "wanted"), "--like-count", "10"]
    assert main([*words, "--features", str(small_run)]) == 0
    units = [tmp_path / "out" / "measurements" / f"shard-{n:06d}.tar" for n in (0, 2)]
    measured = [read_measurements(tar, ShardReader(tar).index)["features"] for tar in units]
    expected = np.concatenate(measured)[[number * 15 // 10 for number in range(10)]]
    np.testing.assert_array_equal(fitted[0], expected)


def test_small_tars_are_measured_until_there_are_enough(tmp_path):
    """A tar is a part, whatever its number of images, which img2dataset states beside it."""
    for number in range(4):
        members = [(f"{number}{place}.jpg", b"") for place in range(5)]
        write_tar(tmp_path / f"{number:05d}.tar", members)
        (tmp_path / f"{number:05d}_stats.json").write_text('{"successes": 5}')
    first = filter_images.FirstParts.of(open_unlabelled(tmp_path), 12)
    assert sum(part.num_files for part in first.parts(files_per_part=10_000, seed=0)) == 15


def test_measurement():
    image = photograph(2, (100, 80))
    measured = measure(encoded(image, "PNG"))
    assert (measured["width"], measured["height"]) == (100, 80)
    assert f"{int(measured['perceptual']):016x}" == str(imagehash.phash(image))
    flat = features(np.full((70, 90, 3), 200, np.uint8))
    assert np.count_nonzero(flat) == 2  # one colour, no gradient
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::4] = stripes[:, 1::4] = 255
    assert features(stripes)[64 : 64 + 8].argmax() == 0
    assert features(stripes.transpose(1, 0, 2))[64 : 64 + 8].argmax() == 4


def test_features_match_plain_loops():
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    # Steep, so that each row of a cell counts, and above the highest level.
    image[0], image[1] = 255 * (np.arange(64) // 2 % 2)[:, None], 0
    grey = image.astype(float).mean(-1)
    colors, levels, cells = np.zeros((4, 4, 4)), np.zeros(8), np.zeros((5, 8))
    for row, column in np.ndindex(64, 64):
        colors[tuple(image[row, column] // 64)] += 1
        low, high = max(row - 1, 0), min(row + 1, 63)
        down = (grey[high, column] - grey[low, column]) / (high - low)
        low, high = max(column - 1, 0), min(column + 1, 63)
        right = (grey[row, high] - grey[row, low]) / (high - low)
        length = math.hypot(down, right)
        levels[min(int(math.log2(1 + length)), 7)] += 1
        place = int(math.atan2(down, right) % math.pi / math.pi * 8) % 8
        for cell in (2 * (row // 32) + column // 32, 4):
            cells[cell, place] += length
    parts = [colors.ravel(), *cells, levels]
    expected = np.concatenate([np.sqrt(part / part.sum()) for part in parts])
    # Gradients between two directions may be counted to either.
    np.testing.assert_allclose(features(image), expected, atol=3e-3)


def test_evaluation_set_in_any_layout(tmp_path):
    files = {"ILSVRC2012_val_00000001.JPEG": jpeg(photograph(1))}
    tar = write_tar(tmp_path / "val.tar", list(files.items()))
    folder = write_folder(tmp_path / "val", files)
    assert open_unlabelled(tar).sha256 == open_unlabelled(folder).sha256


@pytest.mark.parametrize("report", ["{}", "[]", "{", "", '{"source": 7}'])
def test_a_folder_that_is_no_selection(report, web, tmp_path, capsys):
    """Every folder of shards has a report, of another form."""
    folder = tmp_path / "selection"
    folder.mkdir()
    (folder / "report.json").write_text(report)
    words = ["jpeg", str(web / "tars"), "--out", str(tmp_path / "out"), "--selection", str(folder)]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{folder}/report.json is not the report of `filter`" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--near", "11"], "--near: '11' is not a whole number from 0 to 10"),
        (["--min-side", "0"], "--min-side: '0' is not a whole number of 1 or more"),
        (["--exclude", "EXCLUDE"], "line 2: 'abc' is neither a SHA-256"),
        (["--exclude", "nowhere"], "nowhere cannot be read"),
    ],
)
def test_errors_are_one_line(web, tmp_path, capsys, words, message):
    (tmp_path / "exclude.txt").write_text("\nabc\n")
    words = [str(tmp_path / "exclude.txt") if word == "EXCLUDE" else word for word in words]
    assert main(["filter", str(web / "tars"), "--out", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
