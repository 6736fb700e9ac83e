"""What a folder is taken for: hidden and empty folders, splits and tars."""

from __future__ import annotations

import io

import pytest
from image_files import encoded, real_picture
from image_sources import (
    opened,
    small_jpeg,
    tar_bytes,
    validation_files,
    web_members,
    write_folder,
    write_tar,
)

from data_tools.__main__ import main
from data_tools.labelled.lists import list_dtd
from data_tools.source_formats import find_layout
from megavis.data.format.manifest import Manifest
from megavis.evaluation.images.image_files import open_images

pytestmark = pytest.mark.once


def two_classes(root):
    return write_folder(root, {"bird/a.jpg": small_jpeg(0), "cat/b.jpg": small_jpeg(1)})


def jpeg(root, out, *options):
    return main(["jpeg", str(root), "--out", str(out), *map(str, options)])


def test_out_may_not_hold_the_source(tmp_path, capsys):
    """Its manifest would make the folder of everything a folder of shards."""
    root = two_classes(tmp_path / "data" / "raw")
    tar = write_tar(tmp_path / "data" / "web.tar", web_members(range(2)))
    for source in (root, tar):
        assert jpeg(source, tmp_path / "data") == 2
        error = capsys.readouterr().err
        assert f"--out {tmp_path / 'data'} holds the source {source}: choose a folder of" in error
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"raw", "web.tar"}
    assert jpeg(root, tmp_path / "data" / "shards") == 0


def test_hidden_files_are_no_images_to_evaluate(tmp_path):
    root = two_classes(tmp_path)
    write_folder(root, {"bird/._a.jpg": b"resource fork", ".cache/c.jpg": b"x"})
    assert len(open_images(root)) == 2


@pytest.mark.parametrize("name", [".cache", "_tmp", "@eaDir", "__MACOSX"])
def test_a_folder_of_no_images_beside_tars(name, tmp_path):
    root = tmp_path / "web"
    write_tar(root / "00000.tar", web_members(range(3)))
    (root / "._00000.tar").write_bytes(b"resource fork")
    (root / name).mkdir()
    if name != "_tmp":
        write_folder(root / name, {"a.jpg": small_jpeg(0), "._b.jpg": b"x"})
    else:
        write_folder(root / name, {"notes.txt": b"BMW and others"})
    assert find_layout(root) == "webdataset"
    assert len(opened(root).tars) == 1


@pytest.mark.parametrize("name", [".cache", "_tmp", "@eaDir"])
def test_a_folder_of_no_images_beside_validation_images(name, tmp_path):
    root = write_folder(tmp_path / "val", validation_files(3))
    (root / name).mkdir()
    assert find_layout(root) == "imagenet-validation"


def test_tars_and_folders_of_images(tmp_path, capsys):
    root = two_classes(tmp_path / "both")
    write_tar(root / "00000.tar", web_members(range(3)))
    assert jpeg(root, tmp_path / "folders") == 0
    said = capsys.readouterr().out
    assert f"{root} holds 1 tar besides the folders: the tar is not read" in said
    assert "--layout webdataset" in said
    assert Manifest.read(tmp_path / "folders").class_names == ("bird", "cat")
    assert jpeg(root, tmp_path / "tars", "--layout", "webdataset") == 0
    assert "besides" not in capsys.readouterr().out
    assert Manifest.read(tmp_path / "tars").num_samples == 3


def test_tars_and_images(tmp_path, capsys):
    root = write_folder(tmp_path / "both", {"a.jpg": small_jpeg(0), "b.jpg": small_jpeg(1)})
    write_tar(root / "00000.tar", web_members(range(3)))
    assert jpeg(root, tmp_path / "out") == 0
    assert "2 images besides the tar" in capsys.readouterr().out
    assert Manifest.read(tmp_path / "out").num_samples == 3


def test_tars_that_are_not_read_are_told(tmp_path, capsys):
    root = tmp_path / "web"
    for name in ("00000.tar", "more/00001.tar", "more/00002.tar"):
        write_tar(root / name, web_members(range(2)))
    write_folder(root, {"00003.tar.gz": b"\x1f\x8b\x08", "00004.tgz": b"\x1f\x8b\x08"})
    assert jpeg(root, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert f"{root} holds 2 compressed tars, such as 00003.tar.gz, not read: unpack" in said
    assert f"{root / 'more'} holds 2 tars, not read: only tars directly in {root} are" in said
    assert Manifest.read(tmp_path / "out").num_samples == 2
    images = two_classes(tmp_path / "images")
    write_folder(images, {"c.tar.xz": b"\xfd7zXZ"})
    assert jpeg(images, tmp_path / "folders") == 0
    assert "holds 1 compressed tar, such as c.tar.xz, not read" in capsys.readouterr().out


def test_folders_without_images_are_no_classes(tmp_path, capsys):
    root = two_classes(tmp_path / "images")
    write_folder(
        root,
        {
            "@eaDir/a.jpg/SYNOFILE_THUMB_M.jpg": small_jpeg(2),
            "bird/@eaDir/a.jpg/SYNOFILE_THUMB_M.jpg": small_jpeg(2),
            "annotations/a.json": b"{}",
            "zebra/stripes": small_jpeg(3),
            "loose.jpg": small_jpeg(4),
        },
    )
    (root / "empty").mkdir()
    assert jpeg(root, tmp_path / "out") == 0
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.class_names == ("bird", "cat", "zebra")
    assert manifest.num_samples == 4
    assert manifest.skipped == {"not an image": 1}
    said = capsys.readouterr().out
    assert f"{root}: 3 images and 2 other files, 3 classes (bird, cat, zebra)" in said
    assert "labels from the names of folders" in said
    assert "1 image without a label" in said


@pytest.mark.parametrize(
    "names", [("train", "val"), ("training", "validation", "test"), ("Train",)]
)
def test_splits_are_no_classes(names, tmp_path, capsys):
    for name in names:
        two_classes(tmp_path / "set" / name)
    write_folder(tmp_path / "set", {"annotations/labels.json": b"{}"})
    assert jpeg(tmp_path / "set", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"give one of them, such as {tmp_path / 'set' / names[0]}" in error
    assert "--layout folder" in error
    assert jpeg(tmp_path / "set", tmp_path / "out", "--layout", "folder") == 0
    assert Manifest.read(tmp_path / "out").class_names == tuple(sorted(names))


def test_a_class_may_have_the_name_of_a_split(tmp_path):
    root = write_folder(tmp_path, {"train/a.jpg": small_jpeg(0), "ship/b.jpg": small_jpeg(1)})
    assert opened(root).class_names == ("ship", "train")


def test_kaggles_cifar_is_no_retinopathy(tmp_path, capsys):
    root = tmp_path / "cifar-10"
    png = encoded(real_picture().resize((32, 32)), "PNG")
    write_folder(root, {"train/1.png": png, "train/2.png": png, "test/1.png": png})
    (root / "trainLabels.csv").write_text("id,label\n1,frog\n2,truck\n")
    assert find_layout(root) == "folder"
    assert jpeg(root, tmp_path / "out") == 2
    assert f"such as {root / 'train'}" in capsys.readouterr().err
    (root / "trainLabels.csv").write_bytes(b"\xef\xbb\xbfimage,level\r\n10_left,0\r\n")
    assert find_layout(root) == "retinopathy"


def test_the_summary_names_the_first_classes(tmp_path, capsys):
    root = write_folder(
        tmp_path / "images", {f"{name}/a.jpg": small_jpeg(0) for name in ("d", "b", "a", "c")}
    )
    assert jpeg(root, tmp_path / "out") == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == f"{root}: 4 images, 4 classes (a, b, c, ...), labels from the names of folders"
    assert jpeg(root / "a", tmp_path / "flat") == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == f"{root / 'a'}: 1 image, no classes and no labels"


def test_the_summary_of_validation_images(tmp_path, capsys):
    root = write_folder(tmp_path / "val", validation_files(3))
    truth = tmp_path / "truth.txt"
    truth.write_text("n01\nn02\nn01\n")
    assert jpeg(root, tmp_path / "out", "--ground-truth", truth) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == f"{root}: 3 images, 2 classes (n01, n02), labels from {truth}"


def test_unread_labels_of_tars(tmp_path, capsys):
    for number in range(2):
        members = web_members(range(4 * number, 4 * number + 4), labels=True)
        write_tar(tmp_path / "web" / f"{number:05d}.tar", members)
    assert jpeg(tmp_path / "web", tmp_path / "out", "--workers", "2") == 0
    said = capsys.readouterr().out
    assert "8 labels (.cls) not read: give --classes-from" in said
    assert "not read in the tars: 8 .json, 8 .txt" in said
    assert jpeg(tmp_path / "web", tmp_path / "out") == 0  # they are remembered
    assert "8 labels (.cls) not read" in capsys.readouterr().out
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    options = ("--classes-from", tmp_path / "classes.txt")
    assert jpeg(tmp_path / "web", tmp_path / "labelled", *options) == 0
    said = capsys.readouterr().out
    assert "labels (.cls) not read" not in said
    assert "2 tars, 3 classes (a, b, c), labels from .cls members" in said


def test_samples_without_a_label_are_counted(tmp_path, capsys):
    """Tars whose labels are elsewhere, as in .json members, are not labelled by .cls members."""
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    options = ("--classes-from", tmp_path / "classes.txt")
    for number in range(2):
        members = web_members(range(4 * number, 4 * number + 4), labels=number == 1)
        write_tar(tmp_path / "web" / f"{number:05d}.tar", members)
    for _ in range(2):  # those that were finished before are counted too
        assert jpeg(tmp_path / "web", tmp_path / "some", *options) == 0
        assert "\n  4 samples without a label\n" in capsys.readouterr().out
    for path, said in ((tmp_path / "web/00000.tar", True), (tmp_path / "web/00001.tar", False)):
        assert jpeg(path, tmp_path / path.stem, *options) == 0
        assert ("without a label" in capsys.readouterr().out) == said
    assert jpeg(tmp_path / "web/00000.tar", tmp_path / "no_classes") == 0
    assert "without a label" not in capsys.readouterr().out


def test_members_are_known_by_content(tmp_path, capsys):
    picture = real_picture()
    members = [
        ("a.jfif", small_jpeg(0)),
        ("b.binary", small_jpeg(1)),
        ("c.image", encoded(picture, "PNG")),
        ("d.data", encoded(picture, "WEBP")),
        ("e.txt", b"BM and P6 are the first letters of other formats"),
        ("f.npy", b"\x93NUMPY"),
        ("g.caption", b"BMW, as it stands in a caption"),
    ]
    write_tar(tmp_path / "web" / "0.tar", members)
    assert jpeg(tmp_path / "web", tmp_path / "out") == 0
    assert Manifest.read(tmp_path / "out").num_samples == 4
    assert "not read in the tars: 1 .caption, 1 .npy, 1 .txt" in capsys.readouterr().out


def test_a_tar_without_images_says_what_it_holds(tmp_path, capsys):
    write_tar(tmp_path / "web" / "0.tar", [("a.npy", b"\x93NUMPY"), ("b.npy", b"\x93NUMPY")])
    assert jpeg(tmp_path / "web", tmp_path / "out") == 2
    captured = capsys.readouterr()
    assert "not read in the tars: 2 .npy" in captured.out
    assert "is a valid image" in captured.err


def test_folders_in_a_tar_are_no_classes(tmp_path, capsys):
    write_tar(tmp_path / "images.tar", [("cat/a.jpg", small_jpeg(0)), ("dog/b.jpg", small_jpeg(1))])
    assert jpeg(tmp_path / "images.tar", tmp_path / "out") == 0
    assert "folders in a tar, such as cat, are not read as classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is empty"),
        ({"a/0.tar": tar_bytes(web_members(range(1)))}, "has no images; its folder a has 1 tar"),
        ({"web.tar.gz": b"\x1f\x8b\x08"}, "web.tar.gz is a compressed tar: unpack it first"),
        ({"notes.txt": b"words", "more/b.csv": b"1,2"}, "has no images, only 2 other files"),
    ],
)
def test_folders_without_images(files, message, tmp_path, capsys):
    (tmp_path / "images").mkdir()
    write_folder(tmp_path / "images", files)
    assert jpeg(tmp_path / "images", tmp_path / "out", "--layout", "folder") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_hidden_folders_are_no_classes_of_a_labelled_set(tmp_path):
    write_folder(tmp_path, {"images/wavy/a.jpg": b"x", "images/.cache/b.jpg": b"x"})
    write_folder(tmp_path, {"images/@eaDir/c.jpg": b"x", "labels/train1.txt": b"wavy/a.jpg\n"})
    listing = list_dtd(tmp_path, "train")
    assert listing.class_names == ["wavy"]
    assert [file.label for file in listing.files] == [0]


def test_the_summary_on_an_output_of_ascii(tmp_path, monkeypatch):
    raw = b"caf\xe9".decode("utf-8", "surrogateescape")
    root = write_folder(tmp_path / raw, {"grün/a.jpg": small_jpeg(0), "rot/b.jpg": small_jpeg(1)})
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert jpeg(root, tmp_path / "out") == 0
    said = written.getvalue().decode("ascii").splitlines()[0]
    assert said.endswith(r"2 images, 2 classes (gr?n, rot), labels from the names of folders")
