"""Data sets of VTAB in the file formats of their authors."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import vtab_files
import yaml
from image_sources import looks, opened

from data_tools.decode import decode_image
from data_tools.labelled.vtab import prepare_eye
from data_tools.source_formats import find_layout
from megavis.config.errors import UserError

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[3]
# Writer, task, whether the layout is detected without --layout, number of classes.
LAYOUTS = {
    "clevr-count": ("clevr", "count", False, 8),
    "clevr-distance": ("clevr", "distance", False, 6),
    "kitti-distance": ("kitti", None, True, 4),
    "dsprites-location": ("dsprites", "location", False, 16),
    "dsprites-orientation": ("dsprites", "orientation", False, 16),
    "smallnorb-azimuth": ("norb", "azimuth", False, 18),
    "smallnorb-elevation": ("norb", "elevation", False, 9),
    "camelyon": ("camelyon", None, True, 2),
    "dmlab": ("dmlab", None, True, 6),
    "sun397": ("sun", None, True, 3),
    "resisc45": ("resisc", None, True, 2),
}
WHOLE = {"sun397": 397, "resisc45": 45}
"""Published number of classes where the test files have fewer."""


def written(layout, root):
    name, task, _, _ = LAYOUTS[layout]
    if name == "camelyon":
        pytest.importorskip("h5py", reason="PatchCamelyon is HDF5, and h5py is an extra")
    found = getattr(vtab_files, f"write_{name}")(root)
    return found[task] if task else found


def shown(source):
    """Return label and pixels of each image; pickle parts, as for a worker process."""
    parts = pickle.loads(pickle.dumps(source.parts(files_per_part=2, seed=0)))
    pictures = [picture for part in parts for picture in part.pictures(pytest.fail)]
    return [(picture.label, decode_image(picture.content)) for picture in pictures]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits(layout, tmp_path):
    expected = written(layout, tmp_path)
    _, _, is_found, num_classes = LAYOUTS[layout]
    if is_found:
        assert find_layout(tmp_path) == layout
    else:
        with pytest.raises(UserError, match=f"{layout.split('-')[0]}-.* choose one with --layout"):
            find_layout(tmp_path)
    cut_by_hash = "validation" not in expected
    for split, pictures in expected.items():
        split = "all" if cut_by_hash and split == "train" else split
        source = opened(tmp_path, "--layout", layout, "--split", split)
        assert looks(shown(source)) == looks(pictures), split
        assert len(source.class_names) == num_classes
    trained = sum(len(expected[split]) for split in ("train", "validation") if split in expected)
    assert len(opened(tmp_path, "--layout", layout).files) == trained


def test_caltech_102_has_a_background_class(tmp_path):
    for name in ("BACKGROUND_Google", "accordion", "yin_yang"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "image_0001.jpg").write_bytes(b"not read")
    assert find_layout(tmp_path) == "caltech-101"
    assert opened(tmp_path, "--layout", "caltech-101").class_names == ("accordion", "yin_yang")
    assert len(opened(tmp_path, "--layout", "caltech-102").class_names) == 3


def test_retinopathy(tmp_path):
    expected = vtab_files.write_retinopathy(tmp_path)
    assert find_layout(tmp_path) == "retinopathy"
    for split, labels in expected.items():
        found = shown(opened(tmp_path, "--layout", "retinopathy", "--split", split))
        assert sorted(label for label, _ in found) == sorted(labels)
        for _, pixels in found:
            # A disc of radius 300 is cropped to 270; its inside is uniform.
            assert pixels.shape == (540, 540, 3)
            assert abs(pixels[170:370, 170:370].astype(int) - 128).max() <= 8


def test_prepare_eye_matches_loops():
    """At the given radius: 4 (x − local mean) + 128 inside a disc of 90 %."""
    rng, radius = np.random.default_rng(0), 30
    pixels = np.zeros((70, 70, 3), np.uint8)
    pixels[:, 5:65] = rng.integers(60, 200, (70, 60, 3))
    found = prepare_eye(pixels, radius=radius)
    assert found.shape == (54, 54, 3)
    weights = np.exp(-(np.arange(-4, 5) ** 2) / 2.0)  # deviation radius / 30
    weights /= weights.sum()
    for row, column in ((27, 27), (10, 20), (40, 33)):
        y, x = row + 35 - 27, column + 35 - 27
        window = pixels[y - 4 : y + 5, x - 4 : x + 5].astype(float)
        mean = sum(weights[i] * weights[j] * window[i, j] for i in range(9) for j in range(9))
        wanted = np.clip(4 * (pixels[y, x] - mean) + 128, 0, 255).round()
        np.testing.assert_allclose(found[row, column], wanted, atol=1)
    assert (found[0, 0] == 128).all()


def test_vtab_preset_has_the_number_of_classes():
    text = (ROOT / "yaml_configs/darl/vit_l16_diff_vtab.yaml").read_text()
    named = re.findall(
        r"data.train=shards/(\w+)/train .*?num_classes=(\d+)", text.replace("\n", " ")
    )
    asked = {folder: int(count) for folder, count in named}
    sizes = {name: WHOLE.get(name, count) for name, (*_, count) in LAYOUTS.items()}
    ours = {name.replace("-", "_"): count for name, count in sizes.items()}
    assert ours.items() <= asked.items()
    others = {"caltech101": 102, "dtd": 47, "flowers": 102, "pets": 37, "svhn": 10, "eurosat": 10}
    assert {**ours, **others, "retinopathy": 5} == asked
    assert yaml.safe_load(text)["finetune"]["num_classes"] == 100


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


SCENE = {"image_filename": "CLEVR_train_000000.png", "objects": [{}] * 11}
ELEVEN = json.dumps({"scenes": [SCENE]})
ERRORS = {
    "no scenes": (
        "clevr-count",
        lambda r: (r / "scenes/CLEVR_train_scenes.json").write_text("{}"),
        "has no scenes of CLEVR",
    ),
    "eleven objects": (
        "clevr-count",
        lambda r: (r / "scenes/CLEVR_train_scenes.json").write_text(ELEVEN),
        "is number 8, counted from 0, and there are 8 classes",
    ),
    "another mapping": (
        "kitti-distance",
        lambda r: (r / "mapping/train_rand.txt").write_text("1,21"),
        "does not number the 20 lines",
    ),
    "half a label": (
        "kitti-distance",
        lambda r: (r / "training/label_2/000000.txt").write_text("Car 0 0\n"),
        "has 3 words, not 15",
    ),
    "still zipped": (
        "dsprites-location",
        lambda r: (r / "imgs.npy").unlink(),
        "unzip the .npz file",
    ),
    "a cut array": (
        "smallnorb-azimuth",
        lambda r: cut(r / "smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat"),
        "missing, truncated, or not an unpacked smallNORB",
    ),
    "a cut record": ("dmlab", lambda r: cut(r / "dmlab-train.tfrecord"), "is truncated or has no"),
    "no list": (
        "sun397",
        lambda r: (r / "sun397_tfds_va.txt").unlink(),
        "copy the three lists of VTAB",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_damaged_files_are_errors(case, tmp_path):
    layout, spoil, message = ERRORS[case]
    written(layout, tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        opened(tmp_path, "--layout", layout)
    assert str(tmp_path) in str(caught.value)
