"""Small data sets of VTAB in the exact file formats of their authors.

Each writer returns, by split, the label and the pixels uint8 `[h, w, 3]` of every image.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter

import numpy as np
from image_sources import small_jpeg, write_folder
from PIL import Image

from data_tools.decode import decode_image


def pixels_of(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def grey(pixels):
    return np.stack([pixels] * 3, axis=-1)


def save_png(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


# Number of objects and nearest distance of each image; a distance on a limit is in the class below.
CLEVR = {
    "train": [(3, 7.99), (10, 8.0), (4, 8.001), (5, 9.3)],
    "val": [(6, 9.7), (3, 42.0), (7, 8.6)],
}


def write_clevr(root):
    found = {"count": {}, "distance": {}}
    for seed, (folder, pictures) in enumerate(CLEVR.items()):
        split, scenes, pixels = {"train": "train", "val": "test"}[folder], [], []
        for number, (count, nearest) in enumerate(pictures):
            name = f"CLEVR_{folder}_{number:06d}.png"
            pixels.append(pixels_of(10 * seed + number, 8, 12, 3))
            save_png(root / f"images/{folder}/{name}", pixels[-1])
            places = [[1, 2, nearest + other] for other in reversed(range(count))]
            objects = [{"shape": "cube", "pixel_coords": place} for place in places]
            scenes.append({"image_filename": name, "objects": objects})
        path = root / f"scenes/CLEVR_{folder}_scenes.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"info": {}, "scenes": scenes}))
        found["count"][split] = [(c - 3, p) for (c, _), p in zip(pictures, pixels, strict=True)]
        classes = {7.99: 0, 8.0: 0, 8.001: 1, 9.3: 3, 9.7: 4, 42.0: 5, 8.6: 2}
        found["distance"][split] = [
            (classes[d], p) for (_, d), p in zip(pictures, pixels, strict=True)
        ]
    return found


def kitti_line(kind, depth):
    return f"{kind} 0.00 0 -1.57 599.41 156.40 629.75 189.25 2.85 2.63 12.34 0.47 1.49 {depth} -1.5"


def write_kitti(root):
    """Write twenty videos of one image each, of which two are for test and two for validation."""
    cases = [
        (["Car 7.5", "Tram 1.0"], 0),
        (["Van 8.0", "Truck 30"], 0),
        (["Truck 8.01"], 1),
        (["Pedestrian 3"], 3),
        (["DontCare -1000", "Car 20.5"], 2),
    ]
    videos = [f"2011_09_26_drive_{number:04d}_sync" for number in range(20)]
    (root / "mapping").mkdir()
    lines = [f"2011_09_26 {name} 0000000{number:03d}\n" for number, name in enumerate(videos)]
    (root / "mapping/train_mapping.txt").write_text("".join(lines))
    order = np.random.default_rng(0).permutation(20)
    (root / "mapping/train_rand.txt").write_text(",".join(str(line + 1) for line in order))
    # The split of KITTI 3.1.0 in TensorFlow Datasets.
    state = np.random.get_state()
    np.random.seed(123)
    tests = set(np.random.choice(sorted(videos), 2, replace=False))
    held = set(np.random.choice(sorted(set(videos) - tests), 2, replace=False))
    np.random.set_state(state)
    found = {"train": [], "validation": [], "test": []}
    for number, line in enumerate(order):
        objects, label = cases[number % len(cases)]
        text = "\n".join(kitti_line(*each.split()) for each in objects)
        write_folder(root, {f"training/label_2/{number:06d}.txt": f"{text}\n".encode()})
        pixels = pixels_of(number, 6, 10, 3)
        save_png(root / f"training/image_2/{number:06d}.png", pixels)
        name = videos[line]
        split = "test" if name in tests else "validation" if name in held else "train"
        found[split].append((label, pixels))
    return found


def write_dsprites(root):
    """Write ten sprites; the eight with the lowest hashes are for training."""
    latents = np.zeros((10, 6), np.int64)
    latents[:, 3] = [0, 2, 3, 39, 20, 7, 8, 37, 38, 5]
    latents[:, 4] = [0, 1, 2, 31, 16, 30, 3, 4, 5, 6]
    pictures = pixels_of(1, 10, 64, 64) // 128
    np.save(root / "latents_classes.npy", latents)
    np.save(root / "imgs.npy", pictures)
    labels = {
        "orientation": [0, 0, 1, 15, 8, 2, 3, 14, 15, 2],
        "location": [0, 0, 1, 15, 8, 15, 1, 2, 2, 3],
    }
    order = sorted(range(10), key=lambda n: hashlib.sha256(str(n).encode()).hexdigest())
    splits = {"train": order[:8], "validation": order[8:9], "test": order[9:]}
    return {
        task: {
            split: [(numbers[n], grey(pictures[n] * np.uint8(255))) for n in places]
            for split, places in splits.items()
        }
        for task, numbers in labels.items()
    }


def norb_matrix(array, magic):
    sizes = [*array.shape, *[1] * max(0, 3 - array.ndim)]
    head = struct.pack(f"<{2 + len(sizes)}i", magic, array.ndim, *sizes)
    return head + array.tobytes()


def write_norb(root):
    found = {"azimuth": {}, "elevation": {}}
    for seed, (prefix, count) in enumerate(
        (("smallnorb-5x46789x9x18x6x2x96x96-training", 3),
         ("smallnorb-5x01235x9x18x6x2x96x96-testing", 4))
    ):  # fmt: skip
        pictures = pixels_of(seed, count, 2, 96, 96)
        info = np.array([[4, 8 - n, 34 - 2 * n, 5] for n in range(count)], "<i4")
        (root / f"{prefix}-dat.mat").write_bytes(norb_matrix(pictures, 507333717))
        (root / f"{prefix}-info.mat").write_bytes(norb_matrix(info, 507333716))
        order = sorted(range(count), key=lambda n: hashlib.sha256(str(n).encode()).hexdigest())
        splits = {"validation": order[:2], "test": order[2:]} if seed else {"train": order}
        for split, places in splits.items():
            shown = [(n, grey(pictures[n, 0])) for n in places]
            found["azimuth"][split] = [(17 - n, pixels) for n, pixels in shown]
            found["elevation"][split] = [(8 - n, pixels) for n, pixels in shown]
    return found


def write_camelyon(root):
    import h5py

    found = {}
    for seed, (split, name) in enumerate(
        (("train", "train"), ("validation", "valid"), ("test", "test"))
    ):
        pictures, labels = pixels_of(seed, 2, 96, 96, 3), [seed % 2, 1]
        for kind, array in (("x", pictures), ("y", np.reshape(labels, (2, 1, 1, 1)))):
            with h5py.File(root / f"camelyonpatch_level_2_split_{name}_{kind}.h5", "w") as file:
                file[kind] = array
        found[split] = list(zip(labels, pictures, strict=True))
    return found


def field(number, content):
    """Return a length-delimited field in the wire format of protocol buffers."""
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def varint(value):
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def write_dmlab(root):
    found = {}
    for seed, split in enumerate(("train", "validation", "test")):
        records, shown = b"", []
        for number in range(3):
            content, label = small_jpeg(3 * seed + number), (3 * seed + number) % 6
            integers = bytes([1 << 3]) + varint(label)  # not packed
            if number:
                integers = field(1, varint(label))  # packed
            values = {
                b"filename": field(1, field(1, b"x/1.jpg")),
                b"image": field(1, field(1, content)),
                b"label": field(3, integers),
            }
            entries = [field(1, field(1, key) + field(2, item)) for key, item in values.items()]
            example = field(1, b"".join(entries))
            records += struct.pack("<Q", len(example)) + b"crc1" + example + b"crc2"
            shown.append((label, decode_image(content)))
        (root / f"dmlab-{split}.tfrecord").write_bytes(records)
        found[split] = shown
    return found


def write_sun(root):
    lists = {
        "train": ["/a/abbey/sun_1.jpg", "/c/church/outdoor/sun_2.jpg"],
        "validation": ["/c/church/indoor/sun_3.jpg"],
        "test": ["/a/abbey/sun_4.jpg", "/c/church/indoor/sun_5.jpg"],
    }
    classes = ["/a/abbey", "/c/church/indoor", "/c/church/outdoor"]
    found = {}
    for (split, names), short in zip(lists.items(), ("tr", "va", "te"), strict=True):
        contents = {name: small_jpeg(int(name[-5])) for name in names}
        write_folder(root, {name.lstrip("/"): content for name, content in contents.items()})
        (root / f"sun397_tfds_{short}.txt").write_text("\n".join(names) + "\n")
        found[split] = [
            (classes.index(name.rpartition("/")[0]), decode_image(content))
            for name, content in contents.items()
        ]
    return found


def write_resisc(root):
    """Write five images per class: three for training, one for validation, one for test."""
    found = {"train": [], "validation": [], "test": []}
    for label, name in enumerate(("baseball_diamond", "thermal_power_station")):
        files = {f"{name}/{name}_{n:03d}.jpg": small_jpeg(10 * label + n) for n in range(5)}
        write_folder(root, files)
        order = sorted(files, key=lambda path: hashlib.sha256(path.encode()).hexdigest())
        splits = ["train"] * 3 + ["validation", "test"]
        for split, path in zip(splits, order, strict=True):
            found[split].append((label, decode_image(files[path])))
    assert Counter(map(len, found.values())) == {6: 1, 2: 2}
    return found


def write_retinopathy(root):
    """Write images of a uniform disc, which preprocessing turns grey."""
    rows = np.arange(60) - 30
    disc = rows[:, None] ** 2 + (np.arange(80) - 40) ** 2 < 25**2
    eye = np.where(disc[..., None], np.array([200, 120, 60]), 0).astype(np.uint8)
    names = {"train": ["1_left", "1_right"], "test": ["2_left", "2_right", "3_left"]}
    for folder, files in names.items():
        (root / folder).mkdir()
        for name in files:
            Image.fromarray(eye).save(root / folder / f"{name}.jpeg", quality=95)
    (root / "trainLabels.csv").write_text("image,level\n1_left,0\n1_right,4\n")
    (root / "retinopathy_solution.csv").write_text(
        "image,level,Usage\n2_left,2,Private\n2_right,0,Public\n3_left,1,Private\n"
    )
    return {"train": [0, 4], "validation": [0], "test": [2, 1]}
