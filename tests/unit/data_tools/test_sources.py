"""Sources of images: every layout gives the same images, labels and bytes."""

from __future__ import annotations

import hashlib
import json
import tarfile

import numpy as np
import pytest
from image_sources import (
    SYNSETS,
    opened,
    pictures,
    small_jpeg,
    training_files,
    validation_files,
    web_members,
    write_folder,
    write_kaggle,
    write_kit,
    write_tar,
    write_train_tar,
)

from data_tools.__main__ import main
from data_tools.ground_truth import find_truth, read_truth
from data_tools.palette import sample_pixels
from data_tools.source_formats import find_layout
from data_tools.sources import FileSource
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest


def labels_by_name(source):
    return {picture.name: picture.label for picture in pictures(source)[0]}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """The same training and validation images in each layout."""
    root = tmp_path_factory.mktemp("layouts")
    training, validation = training_files(), validation_files()
    write_folder(root / "train", training)
    train = write_train_tar(root / "ILSVRC2012_img_train.tar", training)
    with tarfile.open(train) as tar:
        tar.extractall(root / "class_tars", filter="data")
    write_kaggle(root / "kaggle", training, validation)
    write_folder(root / "flat" / "val", validation)
    write_tar(root / "flat" / "ILSVRC2012_img_val.tar", list(validation.items()))
    kit = write_kit(root / "flat" / "ILSVRC2012_devkit_t12")
    with tarfile.open(root / "kit.tar.gz", "w:gz") as tar:
        tar.add(kit, arcname=kit.name)
    names = [SYNSETS[number % 3] for number in range(6)]
    (root / "names.txt").write_text("\n".join(names) + "\n")
    assert main(["jpeg", str(root / "train"), "--out", str(root / "shards")]) == 0
    for number in range(3):
        members = web_members(range(number * 10, number * 10 + 4), labels=True)
        write_tar(root / "web" / f"{number:05d}.tar", members)
        (root / "web" / f"{number:05d}_stats.json").write_text('{"successes": 4}')
    return root


def test_layouts_give_the_same_shards(layouts, tmp_path):
    trees, manifests = [], []
    for place in ("train", "ILSVRC2012_img_train.tar", "class_tars", "kaggle", "shards"):
        out = tmp_path / place
        words = ["jpeg", str(layouts / place), "--out", str(out), "--samples-per-shard", "5"]
        assert main([*words, "--size", "16"]) == 0
        trees.append({p.name: p.read_bytes() for p in out.iterdir() if p.name[0] == "s"})
        manifest = Manifest.read(out)
        source = manifest.source.model_copy(update={"description": ""})
        manifests.append(manifest.model_copy(update={"source": source}))
    assert len(trees[0]) == 7  # three shards, an index of each, and one of all samples
    assert all(tree == trees[0] for tree in trees)
    assert all(manifest == manifests[0] for manifest in manifests)
    assert manifests[0].class_names == tuple(sorted(SYNSETS))
    assert manifests[0].num_samples == 12


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("flat/val", ()),
        ("flat/ILSVRC2012_img_val.tar", ()),
        ("flat/val", ("kit.tar.gz",)),
        ("flat/val", ("kaggle/LOC_val_solution.csv",)),
        ("flat/val", ("names.txt",)),
        ("flat/val", ("flat/ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt",)),
        ("kaggle/ILSVRC/Data/CLS-LOC/val", ()),
    ],
)
def test_validation_labels(layouts, place, options):
    truth = ("--ground-truth", layouts / options[0]) if options else ()
    source = opened(layouts / place, *truth)
    training = labels_by_name(opened(layouts / "train"))
    expected = {name.split("/")[0]: label for name, label in training.items()}
    assert source.class_names == opened(layouts / "train").class_names
    found = labels_by_name(source)
    assert len(found) == 6
    for number, (name, label) in enumerate(sorted(found.items())):
        assert label == expected[SYNSETS[number % 3]], name


def test_ground_truth_of_folders_further_up_is_that_of_others(tmp_path):
    above = tmp_path / "data" / "ILSVRC2012_devkit_t12"
    write_kit(above)
    root = write_folder(tmp_path / "data" / "mine" / "val", validation_files())
    assert find_truth(root.parent) == above
    assert find_truth(root) is None
    with pytest.raises(UserError, match="whose labels are elsewhere: give --ground-truth"):
        opened(root)


def test_ground_truth_among_the_images(tmp_path):
    """The tar was unpacked where it was downloaded to, beside the kit."""
    root = write_folder(tmp_path / "imagenet", validation_files())
    write_tar(root / "ILSVRC2012_img_val.tar", list(validation_files().items()))
    write_kit(root / "ILSVRC2012_devkit_t12")
    found, refused = pictures(opened(root))
    expected = labels_by_name(opened(root / "ILSVRC2012_img_val.tar"))
    assert {picture.name: picture.label for picture in found} == expected
    assert set(refused.values()) == {"not in the ground truth"}


def test_validation_layouts_are_equal(layouts):
    folder, tar = opened(layouts / "flat/val"), opened(layouts / "flat/ILSVRC2012_img_val.tar")
    kaggle = opened(layouts / "kaggle", "--layout", "kaggle-validation")
    assert folder.sha256 == tar.sha256 == kaggle.sha256
    assert pictures(folder) == pictures(tar) == pictures(kaggle)


def test_a_folder_of_class_tars_with_a_broken_one(tmp_path):
    for name in ("n01000000", "n02000000"):
        members = [(f"{name}_{number}.JPEG", small_jpeg(number)) for number in range(2)]
        tar = write_tar(tmp_path / f"{name}.tar", members)
    end = 512 + -(-len(small_jpeg(0)) // 512) * 512  # of the first image
    tar.write_bytes(tar.read_bytes()[: end + 100])
    found, refused = pictures(opened(tmp_path))
    assert {picture.name: picture.label for picture in found} == {
        "n01000000/n01000000_0.JPEG": 0,
        "n01000000/n01000000_1.JPEG": 0,
        "n02000000/n02000000_0.JPEG": 1,
    }
    assert refused == {"n02000000/n02000000.tar": "tar cut off: what follows in it is lost"}


def test_split_is_the_same_in_every_layout(layouts):
    names = {}
    for split in ("all", "train", "validation"):
        options = ("--split", split, "--validation-share", "0.4")
        found = [
            sorted(labels_by_name(opened(layouts / place, *options)))
            for place in ("train", "ILSVRC2012_img_train.tar", "kaggle", "shards")
        ]
        assert all(other == found[0] for other in found)
        names[split] = found[0]
    assert sorted(names["train"] + names["validation"]) == names["all"]
    assert 0 < len(names["validation"]) < 12
    web = [opened(layouts / "web", "--split", split) for split in ("train", "validation")]
    assert sum(len(pictures(source)[0]) for source in web) == 12
    assert len({source.sha256 for source in web}) == 2


def test_default_validation_share(tmp_path):
    name_of = "a/{:05d}.jpg".format
    root = write_folder(tmp_path, {name_of(number): b"x" for number in range(1000)})
    held = opened(root, "--split", "validation")
    assert isinstance(held, FileSource)
    assert 21 <= len(held.files) <= 59  # 40 expected, standard deviation 6
    # A split that changed with the version would train on images held out before.
    hashed = {name: hashlib.sha256(name.encode()).hexdigest() for name in map(name_of, range(1000))}
    lowest = {name for name, digest in hashed.items() if int(digest[:16], 16) < 0.04 * 2**64}
    assert {file.name for file in held.files} == lowest


def test_web_tars(layouts, tmp_path):
    source = opened(layouts / "web")
    found, refused = pictures(source)
    assert not refused
    assert [picture.name for picture in found][:2] == [
        "00000.tar/000000000.jpg",
        "00000.tar/000000001.jpg",
    ]
    assert [picture.content for picture in found[4:6]] == [small_jpeg(10), small_jpeg(11)]
    assert {picture.label for picture in found} == {-1}
    assert sum(part.num_files for part in source.parts(files_per_part=1, seed=0)) == 12
    classes = tmp_path / "classes.txt"
    classes.write_text("zero\none\n")
    pattern = layouts / "web" / "{00000..00001}.tar"
    found, refused = pictures(opened(pattern, "--classes-from", classes))
    assert [picture.label for picture in found[:2]] == [0, 1]
    assert refused["00000.tar/000000002.jpg"] == "label outside the list of classes"
    out = tmp_path / "out"
    assert main(["jpeg", str(layouts / "web"), "--out", str(out), "--workers", "2"]) == 0
    assert [shard.num_samples for shard in Manifest.read(out).shards] == [4, 4, 4]


def test_palette_of_web_tars(layouts, tmp_path, capsys):
    words = ["palette", "fit", str(layouts / "web"), "--num-colors", "16", "--pixels", "700"]
    assert main([*words, "--out", str(tmp_path / "p.npy")]) == 0
    assert "16 colours from 700 pixels" in capsys.readouterr().out


def test_palette_samples_are_the_same_in_every_layout(layouts):
    """Samples depend on names, contents and seed, not on location or order of the files."""
    places = ("train", "ILSVRC2012_img_train.tar", "kaggle")
    options = {"num_pixels": 700, "size": 16, "library": "torch"}
    first, *others = (sample_pixels(opened(layouts / p), **options, seed=5) for p in places)
    assert len(first) == 700
    assert all(np.array_equal(first, other) for other in others)
    another = sample_pixels(opened(layouts / "train"), **options, seed=6)
    assert not np.array_equal(first, another)


def test_find_layout(layouts):
    expected = {
        "train": "folder",
        "ILSVRC2012_img_train.tar": "imagenet-train-tar",
        "class_tars": "imagenet-train-tar",
        "kaggle": "kaggle-train",
        "kaggle/ILSVRC/Data/CLS-LOC/train": "folder",
        "flat/val": "imagenet-validation",
        "flat/ILSVRC2012_img_val.tar": "imagenet-validation",
        "web": "webdataset",
        "web/00001.tar": "webdataset",
        "shards": "jpeg-shards",
    }
    assert {place: find_layout(layouts / place) for place in expected} == expected


def test_only_some_classes_are_kept_in_every_layout(layouts, tmp_path, capsys):
    """As ImageNet-100: labels follow the order of the names, in training and validation."""
    listed = tmp_path / "two.txt"
    listed.write_text(f"{SYNSETS[2]}\n{SYNSETS[0]}\n")
    places = [
        (layouts / "train", []),
        (layouts / "ILSVRC2012_img_train.tar", []),
        (layouts / "kaggle", []),
        (layouts / "flat" / "val", []),
        (layouts / "shards", []),
    ]
    for place, words in places:
        whole, source = opened(place, *words), opened(place, *words, "--only-classes", listed)
        names = sorted((SYNSETS[0], SYNSETS[2]))
        expected = {
            name: names.index(whole.class_names[label])
            for name, label in labels_by_name(whole).items()
            if whole.class_names[label] in names
        }
        assert source.class_names == tuple(names)
        assert labels_by_name(source) == expected
        assert source.sha256 != whole.sha256
        kept, all_files = len(source.files), len(whole.files)
        assert f"2 of 3 classes, {kept} of {all_files} files are kept" in capsys.readouterr().out


def test_unsuitable_class_lists(layouts, tmp_path):
    listed = tmp_path / "list.txt"
    listed.write_text(f"{SYNSETS[0]}\nn00000000\n")
    with pytest.raises(UserError, match=r"--only-classes: .* has no class 'n00000000'"):
        opened(layouts / "train", "--only-classes", listed)
    listed.write_text(f"{SYNSETS[0]}\n{SYNSETS[0]}\n")
    with pytest.raises(UserError, match=f"line 2: '{SYNSETS[0]}' was on line 1 already"):
        opened(layouts / "train", "--only-classes", listed)
    with pytest.raises(UserError, match="absent.txt cannot be read: No such file"):
        opened(layouts / "train", "--only-classes", tmp_path / "absent.txt")
    listed.write_text(f"{SYNSETS[0]}\n")
    both = ["--only-classes", listed, "--classes-from", layouts / "shards"]
    with pytest.raises(UserError, match="in order of their names: remove --classes-from"):
        opened(layouts / "train", *both)


def test_url_lists_are_refused(tmp_path):
    for place in (tmp_path / "urls.csv", tmp_path):
        (tmp_path / "urls.csv").write_text("url\n")
        with pytest.raises(UserError, match="--input_format csv --url_col url"):
            find_layout(place)


def test_folders_of_a_download_are_not_taken_for_classes(tmp_path):
    """As img2dataset writes them with `--output_format files`, its default."""
    for part in ("00000", "00001"):
        write_folder(
            tmp_path, {f"{part}/{part}0001.jpg": small_jpeg(1), f"{part}_stats.json": b"{}"}
        )
    with pytest.raises(UserError, match="00000 is a part of a download, not a class, as 00000_st"):
        find_layout(tmp_path)


def test_ground_truth_errors(layouts, tmp_path):
    kit = write_kit(tmp_path / "kit", count=5)
    truth = kit / "data" / "ILSVRC2012_validation_ground_truth.txt"
    with pytest.raises(UserError, match="5 labels, but there is an image .*_00000006.JPEG"):
        opened(layouts / "flat/val", "--ground-truth", kit)
    truth.write_text("1\n2\n4\n1\n1\n1\n")  # 4 is an inner node
    with pytest.raises(UserError, match="label '4' of line 3 is not among the 3 classes"):
        read_truth(kit)
    (kit / "data" / "meta.mat").write_bytes(b"no matlab file")
    with pytest.raises(UserError, match="meta.mat of .* cannot be read"):
        read_truth(kit)
    (kit / "data" / "meta.mat").unlink()
    with pytest.raises(UserError, match="an order of its own"):
        read_truth(truth)
    alone = write_folder(tmp_path / "alone" / "val", validation_files(2))
    with pytest.raises(UserError, match="give --ground-truth"):
        opened(alone)
    assert set(labels_by_name(opened(alone, "--layout", "folder")).values()) == {-1}
    tar = write_tar(tmp_path / "tar" / "val.tar", list(validation_files(2).items()))
    with pytest.raises(UserError, match="or --layout webdataset for no labels"):
        opened(tar)
    assert set(labels_by_name(opened(tar, "--layout", "webdataset")).values()) == {-1}
    table = (layouts / "kaggle" / "LOC_val_solution.csv").read_text()
    table = table.replace(SYNSETS[0], "n09999999")
    (tmp_path / "LOC_val_solution.csv").write_text(table)
    with pytest.raises(UserError, match="'n09999999' is not among the 3 known ones"):
        opened(layouts / "flat/val", "--ground-truth", tmp_path / "LOC_val_solution.csv",
               "--classes-from", layouts / "shards")  # fmt: skip


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nowhere", "does not exist"),
        ("text", "is not an uncompressed tar"),
        ("no class tars", "has no class tars"),
        ("palette shards", "which are not images"),
        ("share", "--validation-share must lie between 0 and 1"),
        ("selection", "finish `python -m data_tools filter` first"),
    ],
)
def test_errors_are_one_line(case, message, tmp_path, capsys, request):
    place, options = tmp_path / "place", []
    if case == "text":
        place.write_text("no tar" * 200)
    elif case == "no class tars":
        write_tar(place, [("a.jpg", small_jpeg(0))])
        options = ["--layout", "imagenet-train-tar"]
    elif case == "palette shards":
        place = request.getfixturevalue("shards") / "train"
    elif case == "share":
        options = ["--validation-share", "1"]
    elif case == "selection":
        options = ["--selection", str(tmp_path)]
    # Making the shards, which whoever comes first does, may report its progress.
    capsys.readouterr()
    assert main(["jpeg", str(place), "--out", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_non_utf8_names(tmp_path):
    root = tmp_path / "images"
    (root / "a").mkdir(parents=True)
    raw = b"caf\xe9.jpg".decode("utf-8", "surrogateescape")
    (root / "a" / raw).write_bytes(small_jpeg(1))
    out = tmp_path / "out"
    assert main(["jpeg", str(root), "--out", str(out)]) == 0
    index = json.loads((out / "shard-000000.index.json").read_text())
    assert index["sources"] == ["a/caf\\xe9.jpg"]
