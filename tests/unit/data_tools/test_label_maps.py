"""Shards of label maps from synthetic scenes, COCO panoptic and NYU depth."""

import json

import h5py
import numpy as np
import pytest
from PIL import Image
from scene_shards import write_scene_shards, write_scenes
from scipy.io import savemat

from data_tools.__main__ import main
from data_tools.image_shards import encode_png
from data_tools.label_maps import read_panoptic
from data_tools.scenes import draw_scene
from megavis.data.codecs.jpeg import decode_png, join, split
from megavis.data.codecs.label_maps import to_numbers, to_pixels
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader

pytestmark = pytest.mark.once


def stored_maps(folder):
    """Return the stored maps by the name of their image."""
    found = {}
    for shard in Manifest.read(folder).shards:
        reader = ShardReader(folder / shard.name)
        for place, source in enumerate(reader.index.sources):
            _, png = split(bytes(reader.read(place)))
            found[source] = to_numbers(decode_png(png))
    return found


def test_scenes_are_exact_and_deterministic(tmp_path):
    scenes = write_scenes(tmp_path / "one", images=24)
    again = write_scenes(tmp_path / "two", images=24)
    paths = [*scenes.rglob("*.png"), *scenes.glob("*.json")]
    assert len(paths) == 3 * 36 + 5
    for path in paths:
        assert path.read_bytes() == (again / path.relative_to(scenes)).read_bytes()
    listed = json.loads((scenes / "panoptic_train.json").read_text())
    kinds = {each["id"]: each["name"] for each in listed["categories"]}
    hidden = 0
    for annotation in listed["annotations"]:
        name = annotation["file_name"]
        ids = to_numbers(np.array(Image.open(scenes / "panoptic" / "train" / name)))
        depth = np.array(Image.open(scenes / "depth" / "train" / name))
        segments = annotation["segments_info"]
        assert {each["id"] for each in segments} == set(np.unique(ids).tolist())
        for each in segments:
            rows, columns = np.nonzero(ids == each["id"])
            assert each["area"] == len(rows)
            left, top, width, height = each["bbox"]
            assert (left, top) == (columns.min(), rows.min())
            assert (left + width, top + height) == (columns.max() + 1, rows.max() + 1)
            metres = depth[ids == each["id"]]
            # All objects but the floor face the camera, so their depth is constant.
            assert (len(np.unique(metres)) == 1) == (kinds[each["category_id"]] != "floor")
            if kinds[each["category_id"]] == "box":
                hidden += each["area"] < width * height
    assert hidden, "no box is behind another object"


def test_scenes_with_class_colors_and_a_near_wall(tmp_path, capsys):
    means = {1: [], 2: [], 5: []}
    for number in range(20):
        random = np.random.default_rng(number)
        scene = draw_scene(random, size=64, most_objects=3, walls=(4.5, 6.0), class_colors=True)
        assert 4500 <= scene.depth.max() <= 6000
        for segment, category in enumerate(scene.categories):
            inside = scene.segments == segment
            if category in means and inside.any():
                means[category].append(scene.image[inside].mean(0))
    # Balls are red, boxes green and cones blue.
    for channel, category in enumerate((1, 2, 5)):
        assert len(means[category]) > 5
        assert {int(mean.argmax()) for mean in means[category]} == {channel}
    for wall in (("6", "4"), ("5", "inf"), ("5", "66")):
        assert main(["scenes", str(tmp_path / "s"), "--wall", *wall]) == 2
        assert "--wall must be two increasing distances above 2.2 m" in capsys.readouterr().err


def test_panoptic_maps_keep_class_and_segment(tmp_path):
    folder = write_scene_shards(tmp_path)
    manifest = Manifest.read(folder / "panoptic" / "train")
    assert manifest.target is not None
    assert manifest.target.class_names == ("ball", "box", "cone", "wall", "floor")
    assert manifest.target.things == (True, True, True, False, False)
    listed = json.loads((folder / "scenes" / "panoptic_train.json").read_text())
    places = {each["id"]: number for number, each in enumerate(listed["categories"], start=1)}
    stored = stored_maps(folder / "panoptic" / "train")
    assert len(stored) == 12
    for annotation in listed["annotations"]:
        name = annotation["file_name"]
        ids = to_numbers(np.array(Image.open(folder / "scenes/panoptic/train" / name)))
        expected = np.zeros_like(ids)
        for number, each in enumerate(annotation["segments_info"], start=1):
            expected[ids == each["id"]] = places[each["category_id"]] + 256 * number
        assert (stored[name] == expected).all()


def test_pixels_of_no_segment_are_void():
    ids = np.array([[0, 7, 7], [0, 0, 300_000]])
    segments = [(300_000, 2, 1), (7, 1, 0)]  # id, class and crowd
    content = join(json.dumps(segments).encode(), encode_png(to_pixels(ids)))
    expected = [[0, 1 + 2 * 256, 1 + 2 * 256], [0, 0, 2 + 256 + 65536]]
    assert read_panoptic(content).tolist() == expected


def test_depth_maps_are_stored_in_tenths_of_a_millimetre(tmp_path):
    folder = write_scene_shards(tmp_path)
    for name, numbers in stored_maps(folder / "depth" / "train").items():
        millimetres = np.array(Image.open(folder / "scenes/depth/train" / name)).astype(np.int64)
        assert (numbers == 10 * millimetres).all()


def broken_annotations(scenes):
    """Damage eight of the maps, each in another way; return the expected report."""
    path = scenes / "panoptic_train.json"
    listed = json.loads(path.read_text())
    notes = listed["annotations"]
    maps = scenes / "panoptic" / "train"
    ids = to_numbers(np.array(Image.open(maps / notes[0]["file_name"])))
    ids[0, 0] = 4242
    Image.fromarray(to_pixels(ids)).save(maps / notes[0]["file_name"])
    notes[1]["segments_info"].append({"id": 77, "category_id": 1, "iscrowd": 0})
    large = Image.open(maps / notes[2]["file_name"]).resize((64, 64), Image.Resampling.NEAREST)
    large.save(maps / notes[2]["file_name"])
    (maps / notes[3]["file_name"]).write_bytes(b"no PNG")
    notes[4]["segments_info"].append(notes[4]["segments_info"][0])
    (maps / notes[5]["file_name"]).unlink()
    notes[6]["image_id"] = 999
    notes[7]["segments_info"][0]["iscrowd"] = 1
    path.write_text(json.dumps(listed))
    return {
        "label map: id that its annotation does not list": ["000000.png"],
        "label map: listed segment without a pixel": ["000001.png"],
        "image and label map differ in size": ["000002.png"],
        "label map: damaged, or no PNG": ["000003.png"],
        "label map: id listed twice": ["000004.png"],
        "unreadable file": ["000005.png"],
        "map without an image in the JSON file": ["000006.png"],
        "image without an annotation": ["000006.png"],
    }


def test_bad_maps_are_reported(tmp_path):
    scenes = write_scenes(tmp_path)
    expected = broken_annotations(scenes)
    # An annotation without an image has another file name.
    listed = json.loads((scenes / "panoptic_train.json").read_text())
    listed["annotations"][6]["file_name"] = "lost.png"
    expected["map without an image in the JSON file"] = ["lost.png"]
    (scenes / "panoptic_train.json").write_text(json.dumps(listed))
    words = [str(scenes / "images/train"), str(scenes / "panoptic/train")]
    words += [str(scenes / "panoptic_train.json"), "--out", str(tmp_path / "out")]
    assert main(["maps", "panoptic", *words]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["skipped"] == expected
    stored = stored_maps(tmp_path / "out")
    assert len(stored) == 12 - 7
    assert {int(number >> 16) for number in np.unique(stored["000007.png"])} == {0, 1}


def test_unknown_category_is_an_error(tmp_path, capsys):
    scenes = write_scenes(tmp_path)
    path = scenes / "panoptic_train.json"
    path.write_text(path.read_text().replace('"category_id": 101', '"category_id": 102'))
    words = [str(scenes / "images/train"), str(scenes / "panoptic/train"), str(path)]
    assert main(["maps", "panoptic", *words, "--out", str(tmp_path / "out")]) == 2
    assert (
        "not a JSON file of panoptic maps: it lacks an entry with the id 102"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("key", ["images", "categories"])
def test_ids_that_are_used_twice_are_an_error(key, tmp_path, capsys):
    """As in files joined from several, where maps would belong to the image listed last."""
    scenes = write_scenes(tmp_path)
    path = scenes / "panoptic_train.json"
    listed = json.loads(path.read_text())
    listed[key][1]["id"] = listed[key][0]["id"]
    path.write_text(json.dumps(listed))
    words = [str(scenes / "images/train"), str(scenes / "panoptic/train"), str(path)]
    assert main(["maps", "panoptic", *words, "--out", str(tmp_path / "out")]) == 2
    message = f"`{key}` lists the id {listed[key][0]['id']} twice: give each its own"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["nan", "inf", "0", "-1"])
def test_units_that_are_no_numbers(unit, tmp_path, capsys):
    """An infinite one made all depths unknown."""
    words = ["maps", "depth", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*words, "--units-per-metre", unit]) == 2
    assert "--units-per-metre must be a number above 0" in capsys.readouterr().err


def test_thin_images_are_rejected(tmp_path):
    images, depths = tmp_path / "images", tmp_path / "depths"
    images.mkdir()
    depths.mkdir()
    for name, size in (("thin.png", (650, 10)), ("wide.png", (640, 10))):
        Image.new("RGB", size).save(images / name)
        Image.new("I;16", size, 1000).save(depths / name)
    assert main(["maps", "depth", str(images), str(depths), "--out", str(tmp_path / "out")]) == 0
    assert Manifest.read(tmp_path / "out").skipped == {"aspect ratio above 64": 1}
    assert set(stored_maps(tmp_path / "out")) == {"wide.png"}


@pytest.fixture
def nyu(tmp_path):
    """Five images of 480 x 640 in MATLAB's order of dimensions."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (5, 3, 20, 15), dtype=np.uint8)
    images = coarse.repeat(32, axis=2).repeat(32, axis=3)
    depths = random.uniform(0.5, 9.5, (5, 640, 480)).astype(np.float32)
    depths[4, 0, 0] = np.nan
    path = tmp_path / "nyu" / "nyu_depth_v2_labeled.mat"
    path.parent.mkdir()
    with h5py.File(path, "w") as file:
        file["images"], file["depths"] = images, depths
    ends = {"trainNdxs": np.array([[1], [3], [5]]), "testNdxs": np.array([[2], [4]])}
    savemat(path.parent / "splits.mat", ends)
    return path, images, depths


def test_nyu_depth(tmp_path, nyu):
    path, images, depths = nyu
    words = [str(path), str(path.parent / "splits.mat")]
    out = tmp_path / "train"
    assert main(["maps", "nyu", *words, "--part", "train", "--out", str(out)]) == 0
    stored = stored_maps(out)
    assert set(stored) == {"train/0001", "train/0003"}
    assert Manifest.read(out).skipped == {"depth: negative or not a number": 1}
    for name, numbers in stored.items():
        metres = depths[int(name[-4:]) - 1].T
        assert numbers.shape == (480, 640)
        assert np.abs(numbers / 10_000 - metres).max() <= 0.5001e-4
    out = tmp_path / "test"
    assert (
        main(["maps", "nyu", *words, "--part", "test", "--evaluation-crop", "--out", str(out)]) == 0
    )
    for name, numbers in stored_maps(out).items():
        assert numbers.shape == (426, 560)
        corner = depths[int(name[-4:]) - 1].T[54, 41]
        assert abs(numbers[0, 0] / 10_000 - corner) <= 0.5001e-4
    reader = ShardReader(out / "shard-000000.tar")
    jpeg, _ = split(bytes(reader.read(0)))
    (tmp_path / "image.jpg").write_bytes(jpeg)
    picture = np.array(Image.open(tmp_path / "image.jpg")).astype(int)
    source = Manifest.read(out)
    assert source.num_samples == 2
    first = reader.index.sources[0]
    expected = images[int(first[-4:]) - 1].transpose(2, 1, 0)[54:480, 41:601].astype(int)
    # Compare the centres of the flat squares, since JPEG blurs their borders.
    assert np.abs(picture - expected)[15::32, 35::32].mean() < 12
