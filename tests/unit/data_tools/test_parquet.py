"""Parquet files of images: the same images and labels as in a folder, and what is refused."""

from __future__ import annotations

import json
import sys

import numpy as np
import pyarrow
import pytest
from image_sources import opened, pictures, small_jpeg, write_folder, write_tar
from pyarrow import parquet

from data_tools import parquet as reading
from data_tools.__main__ import main
from data_tools.source_formats import find_layout, open_unlabelled
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader

CLASSES = ("cat", "ant", "bee")


def hub_metadata(**features):
    return {"huggingface": json.dumps({"info": {"features": features}})}


def class_label(names):
    return {"names": list(names), "_type": "ClassLabel"}


def write(path, images, labels, *, names=CLASSES, paths=None, row_group_size=3, **others):
    """Write a file with the schema and metadata of `Dataset.to_parquet` of datasets 5.2.0."""
    paths = paths or [f"{path.stem}_{row}.jpg" for row in range(len(images))]
    structs = [
        None if each is None else {"bytes": each, "path": name}
        for each, name in zip(images, paths, strict=True)
    ]
    table = pyarrow.table(
        {
            "image": pyarrow.array(
                structs, pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
            ),
            "label": pyarrow.array(labels, pyarrow.int64()),
            **others,
        }
    )
    features = {"image": {"_type": "Image"}, "label": class_label(names)}
    path.parent.mkdir(parents=True, exist_ok=True)
    table = table.replace_schema_metadata(hub_metadata(**features) if names else None)
    parquet.write_table(table, path, row_group_size=row_group_size)
    return path


@pytest.fixture
def hub(tmp_path):
    """Training files of 7 and 5 images, and 2 test images without labels."""
    for number, rows in enumerate((range(7), range(7, 12))):
        write(
            tmp_path / f"data/train-0000{number}-of-00002.parquet",
            [small_jpeg(row) for row in rows],
            [row % 3 for row in rows],
            text=[f"caption {row}" for row in rows],
        )
    test = [small_jpeg(90), small_jpeg(91)]
    write(tmp_path / "data/test-00000-of-00001.parquet", test, [-1, -1])
    return tmp_path / "data"


def test_images_and_labels_of_a_hub_folder(hub, capsys):
    source = opened(hub)
    assert capsys.readouterr().out.splitlines() == [
        f"{hub}: 12 images in 2 Parquet files, 3 classes (cat, ant, bee), labels from column label",
        "1 file of test not read",
        "columns not read: text",
    ]
    found, refused = pictures(source)
    assert not refused
    assert [picture.content for picture in found] == [small_jpeg(row) for row in range(12)]
    assert [picture.label for picture in found] == [row % 3 for row in range(12)]
    assert found[8].name == "train-00001-of-00002.parquet/train-00001-of-00002_1.jpg"
    assert found[8].key == "000001-000001"
    assert [part.num_files for part in source.parts(files_per_part=5, seed=0)] == [7, 5]
    test = opened(hub, "--split", "test")
    assert [picture.label for picture in pictures(test)[0]] == [-1, -1]
    assert test.sha256 != source.sha256
    assert len(pictures(open_unlabelled(hub))[0]) == 2


def test_files_of_unlabelled_images_are_looked_at_once(hub, monkeypatch):
    looked, really = [], reading.size_and_fault
    monkeypatch.setattr(
        reading, "size_and_fault", lambda path: looked.append(path.name) or really(path)
    )
    open_unlabelled(hub)
    assert sorted(looked) == sorted(path.name for path in hub.iterdir())


def test_shards_are_those_of_webdataset_tars(hub, tmp_path):
    """Each file becomes a shard, with the payloads of a tar of the same images."""
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    for number, rows in enumerate((range(7), range(7, 12))):
        members = []
        for row in rows:
            members += [(f"{row:09d}.jpg", small_jpeg(row)), (f"{row:09d}.cls", b"%d" % (row % 3))]
        write_tar(tmp_path / f"web/0000{number}.tar", members)
    words = ["--size", "16"]
    assert main(["jpeg", str(hub), "--out", str(tmp_path / "a"), *words]) == 0
    words += ["--classes-from", str(tmp_path / "classes.txt")]
    assert main(["jpeg", str(tmp_path / "web"), "--out", str(tmp_path / "b"), *words]) == 0
    manifests = [Manifest.read(tmp_path / name) for name in "ab"]
    assert manifests[0].class_names == CLASSES
    for shards in zip(*(manifest.shards for manifest in manifests), strict=True):
        ours, theirs = (
            ShardReader(tmp_path / name / shard.name)
            for name, shard in zip("ab", shards, strict=True)
        )
        assert np.array_equal(ours.index.labels, theirs.index.labels)
        for place in range(len(ours.index.keys)):
            assert np.array_equal(ours.read(place), theirs.read(place))


@pytest.mark.parametrize(
    ("names", "split", "read"),
    [
        (["train-1", "validation-1", "test-1"], "train", "train-1"),
        (["train-1", "val-1"], "validation", "val-1"),
        (["training.one", "eval_1"], "all", "training.one"),
        (["test-1"], "all", "test-1"),
        (["one", "two"], "all", "one two"),
        (["train-1", "metadata"], "all", "train-1"),
        (["train-1", "validation-1"], "all", "files of train and validation: choose with --split"),
        (["train-1", "test-1"], "extra", "--split extra: .* has files of train and test only"),
        (["test-1"], "train", "--split train: .* has files of test only"),
        (["trainer-1"], "test", "does not name its files so"),
    ],
)
def test_splits_by_the_names_of_files(names, split, read, tmp_path):
    for name in names:
        write(tmp_path / f"{name}.parquet", [small_jpeg(1)], [0])
    if " --" in read or "--split" in read or "does not" in read:
        with pytest.raises(UserError, match=read):
            opened(tmp_path, "--split", split)
    else:
        files = opened(tmp_path, "--split", split).files
        assert " ".join(path.stem for path, *_ in files) == read


def test_a_split_by_hash_where_no_file_is_named_validation(hub, capsys):
    words = ["--validation-share", "0.3"]
    parts = [pictures(opened(hub, "--split", name, *words))[0] for name in ("train", "validation")]
    names = [{picture.name for picture in part} for part in parts]
    assert len(names[0]) + len(names[1]) == 12
    assert not names[0] & names[1]
    assert 0 < len(names[1]) < 12
    assert "hold out 30%: no file is named validation" in capsys.readouterr().out


def test_chosen_classes_and_another_numbering(hub, tmp_path, capsys):
    listed = tmp_path / "only.txt"
    listed.write_text("bee\nant\n")
    source = opened(hub, "--only-classes", listed)
    assert "2 of 3 classes are kept" in capsys.readouterr().out
    assert source.class_names == ("ant", "bee")
    labels = [picture.label for picture in pictures(source)[0]]
    assert labels == [(row % 3) - 1 for row in range(12) if row % 3]
    listed.write_text("bee\nwasp\n")
    with pytest.raises(UserError, match="has no class 'wasp'; it has 3 classes, such as cat, ant"):
        opened(hub, "--only-classes", listed)
    listed.write_text("ant\nbee\ncat\ndog\n")
    source = opened(hub, "--classes-from", listed)
    assert [picture.label for picture in pictures(source)[0]][:3] == [2, 0, 1]
    listed.write_text("ant\nbee\n")
    with pytest.raises(UserError, match="class 'cat' is not among the 2 known ones"):
        opened(hub, "--classes-from", listed)


def test_rows_that_are_refused(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        [small_jpeg(0), None, b"", small_jpeg(3), small_jpeg(4)],
        [0, 1, 1, 3, None],
        paths=["a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg"],
    )
    found, refused = pictures(opened(path))
    assert [(picture.name, picture.label) for picture in found] == [
        ("a.parquet/a.jpg", 0),
        ("a.parquet/e.jpg", -1),
    ]
    assert refused == {
        "a.parquet/1": reading.NO_IMAGE,
        "a.parquet/c.jpg": reading.NO_IMAGE,
        "a.parquet/d.jpg": "label outside the list of classes",
    }


def test_damaged_files(tmp_path):
    images = [np.random.default_rng(row).bytes(20_000) for row in range(9)]
    path = write(tmp_path / "a.parquet", images, [0] * 9)
    content = path.read_bytes()
    damaged = bytearray(content)
    start = content.index(images[3][:32])
    damaged[start - 12 : start - 4] = b"\xff" * 8  # the header of a page
    path.write_bytes(damaged)
    found, refused = pictures(opened(path))
    assert [picture.content for picture in found] == images[:3] + images[6:]
    assert [picture.key for picture in found][3] == "000000-000006"
    assert refused == {"a.parquet/3-5": reading.DAMAGED}
    path.write_bytes(content[:-100])
    with pytest.raises(UserError, match=r"a\.parquet is not a whole Parquet file: its end.*again"):
        opened(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="is not a whole Parquet file"):
        opened(path)


def test_choice_of_columns(tmp_path):
    mask = pyarrow.array([small_jpeg(2)])
    coarse = pyarrow.array([1])
    path = write(tmp_path / "a.parquet", [small_jpeg(1)], [2], mask=mask, coarse=coarse)
    with pytest.raises(UserError, match="bytes in image and mask: choose .* --image-column image"):
        opened(path)
    assert pictures(opened(path, "--image-column", "mask"))[0][0].content == small_jpeg(2)
    with pytest.raises(UserError, match="--image-column text: .* it has image, mask"):
        opened(path, "--image-column", "text")
    words = ["--image-column", "image", "--label-column", "coarse"]
    with pytest.raises(UserError, match="does not name its classes: give --classes-from"):
        opened(path, *words)
    listed = tmp_path / "coarse.txt"
    listed.write_text("animal\nplant\n")
    source = opened(path, *words, "--classes-from", listed)
    assert pictures(source)[0][0].label == 1
    features = {"label": class_label("abc"), "coarse": class_label("ab")}
    table = parquet.read_table(path).drop_columns(["mask"])
    parquet.write_table(table.replace_schema_metadata(hub_metadata(**features)), path)
    with pytest.raises(UserError, match="classes in label and coarse: choose .*label-column label"):
        opened(path)
    with pytest.raises(UserError, match="--label-column x: .* whole numbers; it has label, coarse"):
        opened(path, "--label-column", "x")
    assert opened(path, "--label-column", "coarse").class_names == ("a", "b")


@pytest.mark.parametrize("labels", [["cat", "ant"], [1.0, None], [True, False]])
def test_labels_that_are_no_whole_numbers_are_not_dropped_in_silence(labels, tmp_path, capsys):
    path = write(tmp_path / "a.parquet", [small_jpeg(1), small_jpeg(2)], [0, 1], names=())
    table = parquet.read_table(path)
    parquet.write_table(table.set_column(1, "label", pyarrow.array(labels)), path)
    listed = tmp_path / "classes.txt"
    listed.write_text("ant\ncat\n")
    kind = pyarrow.array(labels).type
    with pytest.raises(
        UserError, match=f"--classes-from: .* column label .* are {kind}, not whole"
    ):
        opened(path, "--classes-from", listed)
    assert opened(path).class_names == ()
    assert "columns not read: label" in capsys.readouterr().out
    parquet.write_table(table.drop_columns(["label"]), path)  # as of a test set
    assert opened(path, "--classes-from", listed).class_names == ()


def test_plain_bytes_as_img2dataset_writes_them(tmp_path):
    table = pyarrow.table({"key": ["7", "8"], "jpg": [small_jpeg(7), small_jpeg(8)]})
    parquet.write_table(table, tmp_path / "00000.parquet")
    (tmp_path / "00000_stats.json").write_text("{}")
    found, _ = pictures(opened(tmp_path))
    assert [(picture.name, picture.content, picture.label) for picture in found] == [
        ("00000.parquet/0", small_jpeg(7), -1),
        ("00000.parquet/1", small_jpeg(8), -1),
    ]


def test_files_that_differ(tmp_path):
    write(tmp_path / "a.parquet", [small_jpeg(1)], [0])
    other = write(tmp_path / "b.parquet", [small_jpeg(1)], [0], names=("ant", "bee", "cat"))
    with pytest.raises(UserError, match=r"b\.parquet and a\.parquet differ in the names of"):
        opened(tmp_path)
    parquet.write_table(pyarrow.table({"jpg": [b"x"]}), other)
    with pytest.raises(UserError, match=r"differ: only the second has a column 'image'"):
        opened(tmp_path)


def test_filtered_images_are_skipped(hub, tmp_path):
    out = tmp_path / "filter"
    assert main(["filter", str(hub), "--out", str(out), "--min-side", "16"]) == 0
    dropped = sorted(out.glob("dropped-*.jsonl"))
    assert len(dropped) == 2
    assert not any(path.read_text() for path in dropped)
    name = "train-00001-of-00002.parquet/train-00001-of-00002_1.jpg"
    dropped[1].write_text(json.dumps({"name": name, "reason": "too dark"}) + "\n")
    found, refused = pictures(opened(hub, "--selection", out))
    assert len(found) == 11
    assert refused == {name: "filtered: too dark"}


def test_a_selection_holds_for_any_classes(hub, tmp_path):
    """Labels are no part of what `filter` has seen; which column they are of is one of a job."""
    out, listed = tmp_path / "filter", tmp_path / "classes.txt"
    assert main(["filter", str(hub), "--out", str(out), "--min-side", "16"]) == 0
    for option, names, count in (
        ("--only-classes", ("bee", "ant"), 8),
        ("--classes-from", ("ant", "bee", "cat", "dog"), 12),
    ):
        listed.write_text("\n".join(names))
        source = opened(hub, "--selection", out, option, listed)
        assert len(pictures(source)[0]) == count
    other = write(tmp_path / "other/a.parquet", [small_jpeg(1)], [0])
    with pytest.raises(UserError, match="was made from other images than these"):
        opened(other, "--selection", out)


def test_shards_are_not_mixed_of_two_columns_of_labels(tmp_path, capsys):
    numbers = pyarrow.array([2, 1], pyarrow.int64())
    path = write(
        tmp_path / "a.parquet", [small_jpeg(1), small_jpeg(2)], [0, 1], names=(), kind=numbers
    )
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    write_shards = ["jpeg", str(path), "--out", str(tmp_path / "out"), "--classes-from"]
    write_shards += [str(tmp_path / "classes.txt"), "--label-column"]
    assert main([*write_shards, "label"]) == main([*write_shards, "label"]) == 0
    assert main([*write_shards, "kind"]) == 2
    assert "made from other images or settings" in capsys.readouterr().err


def test_what_is_said_of_absent_files_and_packages(hub, tmp_path, capsys, monkeypatch):
    (hub / "train-00000-of-00002.parquet").unlink()
    opened(hub)
    assert "1 of the 2 files train-…-of-00002.parquet are there" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"its folder data has 2 Parquet files: give {hub}"):
        opened(hub.parent)
    with pytest.raises(UserError, match=r"train-2\.parquet cannot be read: it does not exist"):
        opened(hub / "train-{2..3}.parquet")
    assert len(opened(hub / "train-{00001..00001}-of-00002.parquet").files) == 1
    write_folder(tmp_path / "folder/cat", {"a.jpg": small_jpeg(1)})
    with pytest.raises(UserError, match="--label-column: .* was read as folder, which has no col"):
        opened(tmp_path / "folder", "--label-column", "label")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs pyarrow: pip install 'megavis\[parquet\]'"):
        opened(hub)


def test_url_lists_are_refused(tmp_path):
    parquet.write_table(pyarrow.table({"url": ["http://a/b.jpg"]}), tmp_path / "urls.parquet")
    for place in (tmp_path / "urls.parquet", tmp_path):
        assert find_layout(place) == "parquet"
        with pytest.raises(UserError, match="only url; .*--input_format parquet --url_col url"):
            opened(place)


def test_arrow_files_are_refused(tmp_path):
    for name in ("data-00000-of-00001.arrow", "dataset_info.json", "state.json"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"holds Arrow files, .*load_from_disk.*\.to_parquet\('tr"):
        opened(tmp_path)
