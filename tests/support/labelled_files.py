"""Small labelled data sets in the exact file formats of their authors.

Each writer returns, by split, the label and content of every image: pixels uint8 `[h, w, 3]`, or
the bytes of its file.
"""

from __future__ import annotations

import gzip
import struct

import numpy as np
from image_sources import small_jpeg, write_folder
from scipy.io import savemat

CIFAR10_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship"]
CIFAR10_NAMES.append("truck")
CIFAR100_NAMES = [f"thing_{number:02d}" for number in range(100)]


def images(count, side, *, seed=0):
    """Return random pixels uint8 `[count, side, side, 3]`."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def cifar_batches(python=False, hundred=False):
    """File name without suffix -> (split, pixels, labels)."""
    names = ["train"] if hundred else [f"data_batch_{number}" for number in range(1, 6)]
    top = 100 if hundred else 10
    batches = {}
    for seed, name in enumerate([*names, "test" if hundred else "test_batch"]):
        labels = [(seed * 7 + 3 * number) % top for number in range(4)]
        batches[name] = ("train" if name in names else "test", images(4, 32, seed=seed), labels)
    return batches


def expected(batches):
    found = {}
    for split, pixels, labels in batches.values():
        found.setdefault(split, []).extend(zip(labels, pixels, strict=True))
    return found


def planes(pixels):
    """Return CIFAR's rows, one per image: red, green and blue planes."""
    return pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)


def write_cifar10(root):
    batches = cifar_batches()
    for name, (_, pixels, labels) in batches.items():
        rows = zip(labels, planes(pixels), strict=True)
        (root / f"{name}.bin").write_bytes(b"".join(bytes([k]) + row.tobytes() for k, row in rows))
    (root / "batches.meta.txt").write_text("\n".join(CIFAR10_NAMES) + "\n\n")
    return expected(batches)


def write_cifar100(root):
    batches = cifar_batches(hundred=True)
    for name, (_, pixels, labels) in batches.items():
        rows = zip(labels, planes(pixels), strict=True)
        content = b"".join(bytes([k // 5, k]) + row.tobytes() for k, row in rows)
        (root / f"{name}.bin").write_bytes(content)
    (root / "fine_label_names.txt").write_text("\n".join(CIFAR100_NAMES) + "\n")
    return expected(batches)


def write_cifar10_python(root):
    batches = cifar_batches()
    for name, (_, pixels, labels) in batches.items():
        fields = {"batch_label": "batch", "labels": labels, "data": planes(pixels)}
        (root / name).write_bytes(python2_pickle(fields))
    (root / "batches.meta").write_bytes(
        python2_pickle({"num_cases_per_batch": 4, "label_names": CIFAR10_NAMES})
    )
    return expected(batches)


def write_cifar100_python(root):
    batches = cifar_batches(hundred=True)
    for name, (_, pixels, labels) in batches.items():
        coarse = [label // 5 for label in labels]
        fields = {"fine_labels": labels, "data": planes(pixels), "coarse_labels": coarse}
        (root / name).write_bytes(python2_pickle(fields))
    (root / "meta").write_bytes(python2_pickle({"fine_label_names": CIFAR100_NAMES}))
    (root / "file.txt~").write_bytes(b"")
    return expected(batches)


def python2_pickle(value):
    """Return the bytes that Python 2's cPickle writes at protocol 2, with strings as bytes."""
    return b"\x80\x02" + _opcodes(value) + b"."


def _opcodes(value):
    if isinstance(value, dict):
        items = b"".join(_opcodes(key) + _opcodes(item) for key, item in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_opcodes, value)) + b"e"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, str | bytes):
        raw = value.encode() if isinstance(value, str) else value
        return b"T" + struct.pack("<i", len(raw)) + raw
    # numpy: _reconstruct(ndarray, (0,), 'b'), then its state; uint8 in C order
    kind = b"cnumpy\ndtype\n" + _opcodes("u1") + b"K\0K\1\x87R"
    kind += b"(K\3" + _opcodes("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    shape = b"".join(_opcodes(side) for side in value.shape) + b"\x86"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + _opcodes("b")
    return made + b"\x87R(K\1" + shape + kind + b"\x89" + _opcodes(value.tobytes()) + b"tb"


def write_stl10(root):
    found = {}
    for seed, split in enumerate(("train", "test", "unlabeled")):
        pixels, labels = images(3, 96, seed=seed), [9, 0, seed]
        # An image is three planes in column-major order.
        (root / f"{split}_X.bin").write_bytes(pixels.transpose(0, 3, 2, 1).tobytes())
        if split != "unlabeled":
            (root / f"{split}_y.bin").write_bytes(bytes(label + 1 for label in labels))
        shown = [-1] * 3 if split == "unlabeled" else labels
        found[split] = list(zip(shown, pixels, strict=True))
    (root / "class_names.txt").write_text("\n".join(CIFAR10_NAMES) + "\n")
    return found


def idx(array):
    """Return a uint8 array as an idx file: two zeros, the type, the dimensions, the values."""
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.tobytes()


def write_mnist(root, *, prefix="", packed=True):
    """Write MNIST's four files, gzip-compressed or not; its images have one channel."""
    found = {}
    for seed, (split, name) in enumerate((("train", "train"), ("test", "t10k"))):
        labels = [9, 0, 4, seed, 5]
        pixels = np.random.default_rng(seed).integers(0, 256, (5, 28, 28), np.uint8)
        for kind, array in (
            ("images-idx3", pixels),
            ("labels-idx1", np.array(labels, np.uint8)),
        ):
            path = root / f"{prefix}{name}-{kind}-ubyte{'.gz' * packed}"
            path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
        found[split] = [
            (label, np.repeat(grey[..., None], 3, axis=-1))
            for label, grey in zip(labels, pixels, strict=True)
        ]
    return found


def write_svhn(root):
    found = {}
    for seed, split in enumerate(("train", "test", "extra")):
        pixels, digits = images(4, 32, seed=seed), [5, 0, 9, seed]
        labels = np.array([[digit or 10] for digit in digits], np.uint8)
        content = {"X": pixels.transpose(1, 2, 3, 0), "y": labels}
        savemat(root / f"{split}_32x32.mat", content, do_compression=True)
        found[split] = list(zip(digits, pixels, strict=True))
    return found


def write_flowers(root):
    files = {f"jpg/image_{number:05d}.jpg": small_jpeg(number) for number in range(1, 7)}
    write_folder(root, files)
    contents, labels = list(files.values()), [77, 1, 102, 1, 5, 77]
    savemat(root / "imagelabels.mat", {"labels": np.array([labels], np.uint8)})
    ids = {"trnid": [6, 2], "valid": [1, 4], "tstid": [3, 5]}
    savemat(
        root / "setid.mat", {key: np.array([numbers], np.uint16) for key, numbers in ids.items()}
    )
    return {
        split: [(labels[number - 1] - 1, contents[number - 1]) for number in numbers]
        for split, numbers in zip(("train", "validation", "test"), ids.values(), strict=True)
    }


def write_cars(root):
    kinds = [(f"bbox_{side}", "O") for side in ("x1", "y1", "x2", "y2")]
    kinds += [("class", "O"), ("fname", "O")]
    found = {}
    for split, name in (("train", "train"), ("test", "test_withlabels")):
        labels = [3, 1, 2] if split == "train" else [2, 3]
        names = [f"{number:05d}.jpg" for number in range(1, len(labels) + 1)]
        contents = [small_jpeg(len(split) + number) for number in range(len(labels))]
        write_folder(root / f"cars_{split}", dict(zip(names, contents, strict=True)))
        rows = [(1, 2, 30, 20, *row) for row in zip(labels, names, strict=True)]
        place = root / "devkit" if split == "train" else root
        place.mkdir(exist_ok=True)
        path = (
            place / f"cars_{name.replace('test_', 'test_annos_').replace('train', 'train_annos')}"
        )
        savemat(path.with_suffix(".mat"), {"annotations": np.array([rows], dtype=kinds)})
        found[split] = [(label - 1, c) for label, c in zip(labels, contents, strict=True)]
    names = np.array([["AM General Hummer", "Acura RL", "Acura TL"]], dtype=object)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": names})
    return found


def write_pets(root):
    names = ["Abyssinian_100", "american_bulldog_1", "Abyssinian_2", "american_bulldog_33"]
    files = {f"images/{name}.jpg": small_jpeg(place) for place, name in enumerate(names)}
    write_folder(root, files)
    (root / "annotations").mkdir()
    (root / "annotations/trainval.txt").write_text(f"{names[0]} 1 1 1\n{names[1]} 2 2 1\n")
    (root / "annotations/test.txt").write_text(f"{names[3]} 2 2 1\n{names[2]} 1 1 1\n")
    contents = list(files.values())
    return {
        "train": [(0, contents[0]), (1, contents[1])],
        "test": [(0, contents[2]), (1, contents[3])],
    }


def write_dtd(root):
    (root / "labels").mkdir()
    found = {}
    for place, (split, short) in enumerate(
        (("train", "train"), ("validation", "val"), ("test", "test"))
    ):
        names = [f"{kind}/{kind}_{place:04d}.jpg" for kind in ("banded", "zigzagged")]
        contents = [small_jpeg(2 * place + number) for number in range(2)]
        write_folder(root / "images", dict(zip(names, contents, strict=True)))
        (root / f"labels/{short}1.txt").write_text("\n".join(names) + "\n")
        found[split] = list(enumerate(contents))
    return found


def write_food(root):
    (root / "meta").mkdir()
    (root / "meta/classes.txt").write_text("apple_pie\nwaffles\n")
    found = {}
    for place, split in enumerate(("train", "test")):
        names = [f"waffles/{place}77", f"apple_pie/{place}5"]
        contents = [small_jpeg(2 * place), small_jpeg(2 * place + 1)]
        files = {f"{name}.jpg": content for name, content in zip(names, contents, strict=True)}
        write_folder(root / "images", files)
        (root / f"meta/{split}.txt").write_text("\n".join(names) + "\n")
        found[split] = [(1, contents[0]), (0, contents[1])]
    return found


def write_aircraft(root):
    write_folder(root / "data", {"variants.txt": b"707-320\nA310\nDHC-8-100 (old)\n"})
    found = {}
    for place, (split, short) in enumerate(
        (("train", "train"), ("validation", "val"), ("test", "test"))
    ):
        content, label = small_jpeg(place), 2 - place
        variant = ("707-320", "A310", "DHC-8-100 (old)")[label]
        write_folder(root / "data/images", {f"{place:07d}.jpg": content})
        (root / f"data/images_variant_{short}.txt").write_text(f"{place:07d} {variant}\n")
        found[split] = [(label, content)]
    return found


def write_caltech(root):
    counts = {"BACKGROUND_Google": 3, "accordion": 32, "yin_yang": 31}
    for name, count in counts.items():
        files = {f"{name}/image_{number:04d}.jpg": b"not read" for number in range(count)}
        write_folder(root, files)


def write_eurosat(root):
    for name in ("AnnualCrop", "SeaLake"):
        files = {f"{name}/{name}_{number}.jpg": b"not read" for number in range(1, 11)}
        write_folder(root, files)
