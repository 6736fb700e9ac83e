"""Text files of users: byte order marks, headers, encodings, and labels by name or by position."""

from __future__ import annotations

import json

import pytest
from image_files import encoded, real_picture
from image_sources import SYNSETS, opened, small_jpeg, validation_files, write_folder, write_kit

from data_tools.__main__ import main
from data_tools.filter_decision import read_excluded
from data_tools.ground_truth import read_truth
from data_tools.labelled.lists import list_aircraft
from data_tools.source_formats import read_class_names
from data_tools.speech import sources as speech_sources
from data_tools.user_text import read_columns, read_lines, read_table, read_text
from megavis.config.errors import UserError

pytestmark = pytest.mark.once

BOM = b"\xef\xbb\xbf"
NAMES = [SYNSETS[number % 3] for number in range(6)]


def val(tmp_path, count=6):
    return write_folder(tmp_path / "images" / "val", validation_files(count))


def labels(tmp_path, text, *options, count=6):
    """Label the validation images by a ground truth; return labels by name, and the classes."""
    truth = tmp_path / "truth.txt"
    truth.write_bytes(text if isinstance(text, bytes) else text.encode())
    source = opened(val(tmp_path, count), "--ground-truth", truth, *options)
    found = {file.name: file.label for file in source.files if not file.refused}
    return found, source.class_names


def expected(count=6):
    classes = sorted(SYNSETS)
    names = sorted(validation_files(count))
    return {name: classes.index(NAMES[place]) for place, name in enumerate(names)}


FORMS = {
    "one word a line": "\n".join(NAMES) + "\n",
    "byte order mark": BOM + "\n".join(NAMES).encode(),
    "CRLF and blank lines": "\r\n\r\n".join(NAMES) + "\r\n\r\n",
    "name and label": "\n".join(
        f"{name} {label}" for name, label in zip(sorted(validation_files()), NAMES, strict=True)
    ),
    "name without suffix, in another order, tabs": "\n".join(
        f"{name.split('.')[0]}\t{label}"
        for name, label in reversed(list(zip(sorted(validation_files()), NAMES, strict=True)))
    ),
    "a folder before the name, commas": "\n".join(
        f"val/{name}, {label}"
        for name, label in zip(sorted(validation_files()), NAMES, strict=True)
    ),
    "Kaggle's table with a byte order mark": BOM
    + "\r\n".join(
        ["ImageId,PredictionString"]
        + [
            f"{name.split('.')[0]},{label} 1 2 3 4"
            for name, label in zip(sorted(validation_files()), NAMES, strict=True)
        ]
    ).encode(),
    "Kaggle's table with quotes": "\n".join(
        ['"ImageId","PredictionString"']
        + [
            f'"{name.split(".")[0]}","{label} 1 2 3 4"'
            for name, label in zip(sorted(validation_files()), NAMES, strict=True)
        ]
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_ground_truth_gives_the_same_labels(form, tmp_path):
    found, classes = labels(tmp_path, FORMS[form])
    assert classes == tuple(sorted(SYNSETS))
    assert found == expected()


def test_numbers_by_name_need_the_classes_that_they_number(tmp_path):
    text = "ILSVRC2012_val_00000001.JPEG 1"
    with pytest.raises(UserError, match=r"truth.txt line 1: '1' is a number.*--classes-from"):
        labels(tmp_path, text, count=1)
    classes = tmp_path / "classes.txt"
    classes.write_text("\n".join(sorted(SYNSETS)))
    found, names = labels(tmp_path, text, "--classes-from", classes, count=1)
    assert found == {"ILSVRC2012_val_00000001.JPEG": 1}
    assert names == tuple(sorted(SYNSETS))
    with pytest.raises(UserError, match="line 1: '65' is not the number of a class, 0 to 2"):
        labels(tmp_path, "ILSVRC2012_val_00000001.JPEG 65", "--classes-from", classes, count=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("synset\n" + "\n".join(NAMES), "has 7 labels, and .*val 6 images.*line 1, 'synset'"),
        ("\n".join([*NAMES, "n09999999"]), "has 7 labels, and .*val 6 images"),
        ("\n".join(NAMES[:5]), "5 labels, but there is an image .*_00000006.JPEG"),
        (f"{NAMES[0]}\nn1 n2 n3\n", r"line 2 has 3 words.*line 1 has 1"),
        (f"{NAMES[0]}\nILSVRC2012_val_00000002.JPEG n2\n", "line 2 has 2 words.*line 1 has 1"),
        (f"ILSVRC2012_val_00000001 {NAMES[0]}\nn2\n", "line 2 has 1 word.*line 1 has 2"),
        (
            f"filename label\nILSVRC2012_val_00000001 {NAMES[0]}",
            "line 1: 'filename' is not an image",
        ),
        (
            f"column1,column2\nILSVRC2012_val_00000001,{NAMES[0]}",
            "line 1: 'column1' is not an image",
        ),
        (f"image.name label\nILSVRC2012_val_00000001 {NAMES[0]}", "line 1: 'image.name' is no"),
        (
            f"ILSVRC2012_val_00000001 {NAMES[0]}\n\nILSVRC2012_val_00000001.JPEG {NAMES[1]}",
            "line 3: .*00000001.JPEG' was on line 1 already",
        ),
        (b"caf\xe9\n", "truth.txt line 1 is not UTF-8"),
        ("\n".join(NAMES).encode("utf-16"), "truth.txt is UTF-16.*UTF-8"),
        (b"PK\3\4\0\0binary", "truth.txt is not a text file"),
        ("\n \r\n", "truth.txt is empty"),
        ("ImageId,Label\nILSVRC2012_val_00000001,n1", "line 1.*no column 'PredictionString'"),
        (
            "ImageId,PredictionString\nILSVRC2012_val_00000001,n1\nILSVRC2012_val_00000002\n",
            "line 3 has 1 value.*2 columns",
        ),
        ("ImageId,PredictionString\nILSVRC2012_val_00000001, \n", "line 2 has no class"),
        ("ImageId,PredictionString\n", "has a header and no other line"),
    ],
)
def test_what_a_ground_truth_cannot_be(text, message, tmp_path):
    with pytest.raises(UserError, match=message):
        labels(tmp_path, text)


def test_a_list_of_the_whole_set_labels_a_part_of_its_images(tmp_path):
    """Images have numbers: some of ImageNet's 50,000 are labelled by the list of all."""
    text = "\n".join(NAMES[number % 6] for number in range(50_000))
    assert labels(tmp_path, text)[0] == expected()


def test_the_kit_has_as_many_lines_as_images(tmp_path):
    kit = write_kit(tmp_path / "kit", count=7)
    with pytest.raises(UserError, match="has 7 labels, and .*val 6 images"):
        opened(val(tmp_path), "--ground-truth", kit)
    path = kit / "data" / "ILSVRC2012_validation_ground_truth.txt"
    path.write_bytes(BOM + path.read_bytes()[:-2].replace(b"\n", b"\r\n"))
    assert len(read_truth(kit).by_number) == 6


@pytest.mark.parametrize(
    "content",
    [
        BOM + b"cat\ndog\n",
        b"cat\r\ndog\r\n",
        b"\n cat \n\n dog",
        b"cat\rdog\r",
        BOM * 2 + b"cat\ndog",
    ],
)
def test_class_lists(content, tmp_path):
    path = tmp_path / "classes.txt"
    path.write_bytes(content)
    assert read_class_names(path) == ("cat", "dog")


def test_class_lists_keep_odd_characters(tmp_path):
    """`str.splitlines` would cut a name at a form feed or a line separator of Unicode."""
    path = tmp_path / "classes.txt"
    path.write_text("crane\u2028bird\ncaf\u00e9 au lait\n", encoding="utf-8")
    assert read_class_names(path) == ("crane\u2028bird", "caf\u00e9 au lait")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cat\n\ndog\ncat\n", "line 4: 'cat' was on line 1 already"),
        (b"", "is empty"),
        ("cat\n".encode("utf-16"), "UTF-16"),
        (b"cat\nca\xefon\n", "line 2 is not UTF-8"),
    ],
)
def test_class_lists_that_cannot_be(content, message, tmp_path):
    path = tmp_path / "classes.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_class_names(path)


def test_classes_from_a_list_with_a_byte_order_mark(tmp_path):
    write_folder(tmp_path / "images", {"bird/a.jpg": small_jpeg(0), "cat/b.jpg": small_jpeg(1)})
    (tmp_path / "classes.txt").write_bytes(BOM + b"bird\r\ncat\r\n")
    words = ["jpeg", str(tmp_path / "images"), "--out", str(tmp_path / "out")]
    assert main([*words, "--classes-from", str(tmp_path / "classes.txt")]) == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["class_names"] == ["bird", "cat"]


def test_exclusions(tmp_path):
    path = tmp_path / "exclude.txt"
    path.write_bytes(BOM + b"a" * 64 + b"  file.jpg\r\n\r\n# a comment\r\n" + b"F" * 16 + b"\r\n")
    excluded = read_excluded(path)
    assert excluded.sha256 == {"a" * 64}
    assert excluded.perceptual == (0xFFFFFFFFFFFFFFFF,)
    path.write_bytes(b"sha256\n" + b"a" * 64)
    with pytest.raises(UserError, match="line 1: 'sha256' is neither a SHA-256"):
        read_excluded(path)


def test_lists_of_held_out_recordings(tmp_path):
    """A name that a byte order mark hides would put a held-out recording into training."""
    names = [f"{word}/{number}_nohash_0.wav" for word in ("no", "yes") for number in range(3)]
    write_folder(tmp_path, dict.fromkeys(names, b"RIFF"))
    (tmp_path / "validation_list.txt").write_bytes(BOM + b"no/0_nohash_0.wav\r\nyes/0_nohash_0.wav")
    (tmp_path / "testing_list.txt").write_bytes(b"no/1_nohash_0.wav\nyes/1_nohash_0.wav\n")
    found = {part: len(source.files) for part, source in speech_sources(tmp_path).items()}
    assert found == {"train": 2, "validation": 2, "test": 2}
    (tmp_path / "testing_list.txt").write_bytes(b"./no/1_nohash_0.wav\n")
    with pytest.raises(UserError, match="testing_list.txt line 1: './no/1_nohash_0.wav' is not"):
        speech_sources(tmp_path)
    (tmp_path / "testing_list.txt").write_bytes(b"\xe9")
    with pytest.raises(UserError, match="testing_list.txt line 1 is not UTF-8"):
        speech_sources(tmp_path)


def test_lists_of_labelled_sets(tmp_path):
    write_folder(tmp_path, {"data/images/1.jpg": encoded(real_picture())})
    (tmp_path / "data" / "variants.txt").write_bytes(BOM + b"707-320\r\n")
    listed = tmp_path / "data" / "images_variant_train.txt"
    listed.write_bytes(BOM + b"1 707-320\r\n")
    assert [file.label for file in list_aircraft(tmp_path, "train").files] == [0]
    listed.write_text("1 707-320\n\n2\n")
    with pytest.raises(UserError, match="images_variant_train.txt line 3 has 1 word, not 2"):
        list_aircraft(tmp_path, "train")


def test_tables(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(BOM + b'image , level\r\n"a, b",3\r\n\r\nc,4\r\n')
    rows = read_table(path, ("image", "level"))
    assert rows == [(2, {"image": "a, b", "level": "3"}), (4, {"image": "c", "level": "4"})]
    path.write_text('image,level\n"a,3\n')
    with pytest.raises(UserError, match="table.csv line 2"):
        read_table(path, ("image", "level"))


def test_lines_and_columns(tmp_path):
    path = tmp_path / "list.txt"
    path.write_bytes(BOM + b"a 1 2\r\n\r\nb  3 4 \r\n")
    assert read_text(path) == "a 1 2\n\nb  3 4 \n"
    assert read_lines(path) == ["a 1 2", "b  3 4"]
    assert read_columns(path, 2) == [["a", "1 2"], ["b", "3 4"]]
    with pytest.raises(UserError, match="nowhere.txt cannot be read: No such file"):
        read_text(tmp_path / "nowhere.txt")
