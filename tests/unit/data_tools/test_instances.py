"""Shards of objects from made-up COCO folders, and how they are decoded."""

import io
import json
from importlib import util

import numpy as np
import pytest
from coco_folder import write_coco, write_coco_shards
from PIL import Image
from pycocotools import mask as coco
from pycocotools.coco import COCO
from scene_shards import write_scenes

from data_tools.__main__ import main
from data_tools.decode import RefusedImageError
from data_tools.instances import stored_objects
from data_tools.scenes import CATEGORIES
from megavis.data.codecs.instances import MAX_OBJECTS, InstancesCodec, masks_of, read_objects
from megavis.data.codecs.jpeg import join, split
from megavis.data.codecs.label_maps import to_numbers
from megavis.data.codecs.transforms import Transform
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import read_batch

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_coco_shards(tmp_path_factory.mktemp("instances"))


def payloads(folder):
    """Return image and annotation of each sample."""
    dataset = ShardDataset(folder, Transform(image_size=64, crop="fitted"))
    return [split(dataset.payload(place)) for place in range(len(dataset))]


def payload_of(pixels, target):
    """Return a payload, with the image as PNG."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return np.frombuffer(join(file.getvalue(), json.dumps(target).encode()), np.uint8)


def test_shards_hold_what_cocos_own_tools_read(folder):
    manifest = Manifest.read(folder / "train")
    assert manifest.num_samples == 8
    assert manifest.target is not None
    assert manifest.target.class_names == ("person", "car", "cup")
    listed = COCO(str(folder / "coco/annotations/instances_train2017.json"))
    numbers = {1: 1, 3: 2, 90: 3}
    expected = {}
    for key, image in listed.imgs.items():
        notes = listed.loadAnns(listed.getAnnIds(imgIds=[key]))
        expected[(folder / "coco/train2017" / image["file_name"]).read_bytes()] = notes
    crowds = 0
    for image, target in payloads(folder / "train"):
        notes, objects = expected.pop(image), read_objects(target)["objects"]
        assert [each["class"] for each in objects] == [numbers[n["category_id"]] for n in notes]
        for name, theirs in (("box", "bbox"), ("area", "area"), ("crowd", "iscrowd")):
            assert [each[name] for each in objects] == [note[theirs] for note in notes]
        crowds += sum(each["crowd"] for each in objects)
        if objects:
            masks = masks_of(read_objects(target)["size"], objects)
            assert (masks == np.stack([listed.annToMask(n) for n in notes], -1)).all()
            assert (masks.sum(-1) > 1).any()
    assert (expected, crowds) == ({}, 1)


def test_scenes_have_objects_that_cocos_own_tools_read(tmp_path):
    """Each is a segment of a ball, a box or a cone; shards have the same masks."""
    scenes = write_scenes(tmp_path, images=24)
    listed = COCO(str(path := scenes / "instances_train.json"))
    assert sorted(listed.anns) == list(range(1, 1 + len(listed.anns)))
    things = [(each["id"], each["name"]) for each in CATEGORIES if each["isthing"]]
    assert [(each["id"], each["name"]) for each in listed.cats.values()] == things
    segments = json.loads((scenes / "panoptic_train.json").read_text())["annotations"]
    expected, kinds = {}, set()
    for key, image in listed.imgs.items():
        assert (image["height"], image["width"]) == (32, 32)
        ids = to_numbers(np.array(Image.open(scenes / "panoptic/train" / image["file_name"])))
        own = [each for each in segments[key]["segments_info"] if each["category_id"] < 100]
        notes = listed.loadAnns(listed.getAnnIds(imgIds=[key]))
        assert len(notes) == len(own)
        masks = np.zeros((32, 32, len(own)), np.uint8)
        for place, (note, segment) in enumerate(zip(notes, own, strict=True)):
            for name in ("category_id", "bbox", "area", "iscrowd"):
                assert note[name] == segment[name]
            masks[..., place] = listed.annToMask(note)
            assert (masks[..., place] == (ids == segment["id"])).all()
            assert coco.toBbox(listed.annToRLE(note)).tolist() == note["bbox"]
            kinds.add(note["category_id"])
        expected[image["file_name"]] = masks
    assert kinds == {1, 2, 5}
    words = [str(scenes / "images/train"), str(path), "--out", str(tmp_path / "out")]
    assert main(["maps", "instances", *words]) == 0
    for shard in Manifest.read(tmp_path / "out").shards:
        reader = ShardReader(tmp_path / "out" / shard.name)
        for place, source in enumerate(reader.index.sources):
            target = read_objects(split(bytes(reader.read(place)))[1])
            masks = masks_of(target["size"], target["objects"])
            assert (masks == expected.pop(source)).all()
    assert not expected


def test_objects_move_with_their_image():
    """Pixels of an object have its color after any crop and flip, and boxes go around masks."""
    pixels = np.full((40, 60, 3), 30, np.uint8)
    pixels[8:24, 10:34] = 250
    mask = np.zeros((40, 60, 1), np.uint8, order="F")
    mask[8:24, 10:34] = 1
    lengths = coco.encode(mask)[0]["counts"].decode()
    crowd = {"class": 1, "crowd": 1, "mask": lengths}
    target = {"size": [40, 60], "objects": [crowd, {"class": 2, "crowd": 0, "mask": lengths}]}
    payload = payload_of(pixels, target)
    transform = Transform(64, "jittered", jitter=(0.3, 2.0), fits=True, flip=True, seed=3)
    positions = np.arange(40)
    samples, refused = InstancesCodec(transform).decode([payload] * 40, positions)
    assert refused == {}
    flips, shown = transform.flips(positions), 0
    assert 5 < flips.sum() < 35
    for sample in samples:
        masks = np.unpackbits(sample["masks"], axis=2)
        bright = sample["image"].min(-1) > 140
        assert (sample["classes"] != 0).sum() == (1 if bright.any() else 0)
        if bright.any():
            assert sample["classes"][0] == 2
            # Resizing blurs the edge by a pixel.
            assert (masks[0] != bright).mean() < 0.04
            shown += 1
    assert shown > 30
    again, _ = InstancesCodec(transform).decode([payload] * 2, positions[[7, 3]])
    assert (again == samples[[7, 3]]).all()


def test_held_out_images_fit_and_are_padded(folder):
    dataset = ShardDataset(folder / "validation", Transform(image_size=32, crop="fitted"))
    batch = read_batch(dataset, np.arange(4), np.arange(4))
    assert batch.inputs.shape == (4, 32, 32, 3)
    classes, masks = batch.objects
    assert (classes.shape, masks.shape) == ((4, MAX_OBJECTS), (4, MAX_OBJECTS, 32, 4))
    assert sorted((classes > 0).sum(1).tolist()) == [0, 2, 2, 2]
    padding = (batch.inputs == batch.inputs.new_tensor([124, 116, 104])).all(-1)
    # Of 48 by 64 pixels, 24 by 32 remain.
    assert sorted(int(each.sum()) for each in padding) == [0, 8 * 32, 8 * 32, 8 * 32]


def test_the_largest_objects_are_kept():
    masks = np.zeros((16, 16, 120), np.uint8, order="F")
    for place in range(120):
        masks[: 1 + place % 12, : 1 + place // 12, place] = 1
    lengths = [each["counts"].decode() for each in coco.encode(masks)]
    objects = [{"class": 1 + n, "crowd": 0, "mask": each} for n, each in enumerate(lengths)]
    target = {"size": [16, 16], "objects": objects}
    payload = payload_of(np.zeros((16, 16, 3), np.uint8), target)
    codec = InstancesCodec(Transform(16, "fitted", fits=True))
    classes = codec.decode([payload], np.zeros(1, np.int64))[0]["classes"][0].tolist()
    sizes = masks.sum((0, 1), dtype=np.int64)
    largest = sorted(sorted(range(120), key=lambda place: (-sizes[place], place))[:100])
    assert classes == [1 + place for place in largest]


def changed(folder, change):
    """Write the training annotations with a change; return the words that read them."""
    path = folder / "annotations/instances_train2017.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return ["maps", "instances", str(folder / "train2017"), str(path), "--out", str(folder / "out")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("categories"), "has no `categories`, which a file of instances"),
        (lambda c: c["annotations"][2].update(image_id=5), "annotation 502 is of image 5, which"),
        (lambda c: c["annotations"][1].update(category_id=2), "annotation 501 has category 2"),
        (lambda c: c["annotations"][1].pop("segmentation"), "501 has no `segmentation`"),
        (
            lambda c: c["images"][0].pop("height"),
            "is not a JSON file of instances: it lacks 'height'",
        ),
        (lambda c: c["annotations"][1].update(bbox=[]), "annotation 501 has no `bbox` of four"),
        (
            lambda c: c["annotations"][1].update(bbox=[1, 2, float("nan"), 3]),
            "annotation 501 has no `bbox` of four numbers",
        ),
        (
            lambda c: c["annotations"][1].update(area=float("inf")),
            "annotation 501 has an `area` of inf",
        ),
        (
            lambda c: c["images"].append({**c["images"][0], "file_name": "other.jpg"}),
            "`images` lists the id 1000 twice",
        ),
        (
            lambda c: c["categories"].append({**c["categories"][0], "name": "other"}),
            "`categories` lists the id 1 twice",
        ),
        (
            lambda c: c["annotations"][0].update(segments_info=[]),
            "has panoptic maps: use `data_tools maps panoptic`",
        ),
    ],
)
def test_bad_annotations_are_named(tmp_path, capsys, change, message):
    folder = write_coco(tmp_path / "coco", train=3, validation=1)
    assert main(changed(folder, change)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "mask",
    [
        [[1.0, 1.0, float("nan"), 1.0, 5.0, 5.0]],
        [[1.0, 1.0, 1e9, 1.0, 5.0, 5.0]],
        [[1.0, 1.0, -float("inf"), 1.0, 5.0, 5.0]],
        [[1.0, 1.0, "5", 1.0, 5.0, 5.0]],
        {"counts": [20, 20], "size": [48, 64]},
        {"counts": [48 * 64, 1], "size": [48, 64]},
        {"counts": [48 * 64 + 1, -1], "size": [48, 64]},
    ],
)
def test_impossible_masks_are_rejected(mask):
    """COCO's own tools fill the memory with some, and take others for masks."""
    content = json.dumps({"size": [48, 64], "objects": [{"mask": mask}]}).encode()
    with pytest.raises(RefusedImageError, match="neither polygons nor run lengths"):
        stored_objects(content)


def test_masks_beyond_the_image_are_cut():
    square = [[32.0, -100.0, 200.0, -100.0, 200.0, 200.0, 32.0, 200.0]]
    lengths = {"counts": [32 * 48, 32 * 48], "size": [48, 64]}
    objects = [{"mask": square}, {"mask": lengths}]
    _, stored = stored_objects(json.dumps({"size": [48, 64], "objects": objects}).encode())
    cut, right = (each["mask"] for each in json.loads(stored)["objects"])
    assert cut == right


def test_what_is_dropped_is_counted(tmp_path, capsys):
    folder = write_coco(tmp_path / "coco", train=5, validation=1)

    def change(content):
        notes = content["annotations"]
        notes[0]["bbox"][2], notes[1]["segmentation"] = 0.0, [[1.0, 1.0, 3.0, 3.0]]
        content["images"][3]["height"] = 47
        notes[-1]["segmentation"] = {"counts": [1, 2], "size": [9, 9]}

    assert main([*changed(folder, change), "--skip-empty"]) == 0
    manifest = Manifest.read(folder / "out")
    assert manifest.skipped == {
        "image and label map differ in size": 1,
        "image without an object": 2,
        "object: a mask that is neither polygons nor run lengths of the image's size": 1,
    }
    assert manifest.num_samples == 1
    assert "2 boxes without area dropped" in manifest.source.description
    assert "2 boxes without area dropped" in capsys.readouterr().out


def test_sheet_and_check_of_a_folder(folder, tmp_path):
    assert main(["verify", str(folder / "train")]) == 0
    sheet = tmp_path / "sheet.png"
    assert main(["inspect", str(folder / "train"), "--out", str(sheet), "--scale", "1"]) == 0
    assert len(np.unique(np.array(Image.open(sheet)).reshape(-1, 3), axis=0)) > 50


def test_a_missing_extra_is_named(folder, monkeypatch, capsys):
    found = util.find_spec
    monkeypatch.setattr(
        util, "find_spec", lambda name: None if name == "pycocotools" else found(name)
    )
    words = ["maps", "instances", str(folder), str(folder / "x.json"), "--out", str(folder / "no")]
    assert main(words) == 2
    assert "needs pycocotools: pip install 'megavis[dense]'" in capsys.readouterr().err
    assert main(["verify", str(folder / "train")]) == 1
    assert "needs pycocotools" in capsys.readouterr().out
