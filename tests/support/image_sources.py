"""Small image collections in common layouts, made of real photographs."""

from __future__ import annotations

import io
import tarfile

import numpy as np
from image_files import encoded, real_jpegs
from PIL import Image
from scipy.io import savemat

from data_tools.__main__ import build_parser
from data_tools.source_formats import open_source

# In the order of the development kit, which differs from that of sorted names.
SYNSETS = ("n03000000", "n01000000", "n02000000")


def small_jpeg(number):
    """Return the bytes of a photograph of about 40x30 pixels, different for each number."""
    path = real_jpegs()[number % len(real_jpegs())]
    picture = Image.open(path).convert("RGB").resize((40 + number, 30))
    return encoded(picture, "JPEG", quality=90)


def opened(source, *options):
    """Open a source as the verb `jpeg` does."""
    words = ["jpeg", str(source), "--out", "unused", *map(str, options)]
    return open_source(build_parser().parse_args(words))


def pictures(source):
    """Return the images of a source, and the reason of each file that it refuses, by name."""
    refused = {}
    found = [
        picture
        for part in source.parts(files_per_part=5, seed=0)
        for picture in part.pictures(lambda name, reason: refused.setdefault(name, reason))
    ]
    return found, refused


def looks(found):
    """Return label and pixels of each image in a comparable, sorted form."""
    return sorted((label, pixels.shape, pixels.tobytes()) for label, pixels in found)


def write_tar(path, members):
    """Write `(name, bytes)` pairs as an uncompressed tar; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members))
    return path


def tar_bytes(members):
    """Return `(name, bytes)` pairs as an uncompressed tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def training_files(each=4):
    """Name -> bytes of a training set with names such as `n0.../n0..._7.JPEG`."""
    return {
        f"{synset}/{synset}_{number}.JPEG": small_jpeg(number * len(SYNSETS) + label)
        for label, synset in enumerate(SYNSETS)
        for number in range(each)
    }


def write_folder(root, files):
    """Write name -> bytes as files; return the folder."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def write_train_tar(path, files):
    """Write a training set as a tar with one tar per class; return its path."""
    classes = sorted({name.split("/")[0] for name in files})
    return write_tar(path, [(f"{name}.tar", class_tar(name, files)) for name in classes])


def class_tar(name, files):
    """Return the tar of one class."""
    members = [(key.split("/")[1], files[key]) for key in files if key.startswith(f"{name}/")]
    return tar_bytes(members)


def validation_files(count=6):
    """Name -> bytes of the flat validation set; image i has the class SYNSETS[i % 3]."""
    return {
        f"ILSVRC2012_val_{number + 1:08d}.JPEG": small_jpeg(number + 20) for number in range(count)
    }


def write_kit(folder, count=6):
    """Write a development kit with the classes and an inner node; return the folder."""
    data = folder / "data"
    data.mkdir(parents=True)
    rows = [(number, name, 0) for number, name in enumerate(SYNSETS, 1)]
    rows.append((len(rows) + 1, "n00000001", 3))
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("num_children", "O")]
    savemat(data / "meta.mat", {"synsets": np.array(rows, dtype=kinds)})
    labels = [str(number % len(SYNSETS) + 1) for number in range(count)]
    text = "\n".join(labels) + "\n"
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text(text)
    return folder


def write_kaggle(root, training, validation):
    """Write Kaggle's folders and tables; return the root."""
    tree = root / "ILSVRC" / "Data" / "CLS-LOC"
    write_folder(tree / "train", training)
    write_folder(tree / "val", validation)
    rows = ["ImageId,PredictionString"]
    for number, name in enumerate(validation):
        rows.append(f"{name.split('.')[0]},{SYNSETS[number % len(SYNSETS)]} 1 2 3 4 ")
    (root / "LOC_val_solution.csv").write_text("\n".join(rows) + "\n")
    lines = [f"{name} words, of it" for name in sorted(SYNSETS)]
    (root / "LOC_synset_mapping.txt").write_text("\n".join(lines) + "\n")
    return root


def web_members(numbers, *, labels=False):
    """Return members of a tar in img2dataset's format: jpg, json and txt per key."""
    members = []
    for number in numbers:
        key = f"{number:09d}"
        members.append((f"{key}.jpg", small_jpeg(number)))
        if labels:
            members.append((f"{key}.cls", str(number % len(SYNSETS)).encode()))
        members.append((f"{key}.json", b'{"url": "", "status": "success"}'))
        members.append((f"{key}.txt", b"a caption"))
    return members
