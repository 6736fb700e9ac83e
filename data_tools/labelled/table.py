"""All labelled data sets, by the name that `--layout` takes."""

from __future__ import annotations

from data_tools.labelled.binary import list_cifar10, list_cifar100, list_stl10
from data_tools.labelled.data_set import (
    EXTRA,
    TEST,
    TRAIN,
    UNLABELED,
    VALIDATION,
    LabelledSet,
)
from data_tools.labelled.folders import list_caltech101, list_eurosat
from data_tools.labelled.lists import list_aircraft, list_dtd, list_food, list_pets
from data_tools.labelled.matlab import list_cars, list_flowers, list_svhn


def _sizes(train: int, validation: int, test: int, **more: int) -> dict[str, int]:
    sizes = {TRAIN: train, VALIDATION: validation, TEST: test, **more}
    return {split: size for split, size in sizes.items() if size}


_DATA_SETS = (
    LabelledSet(
        "cifar-10",
        [["data_batch_1.bin"], ["data_batch_1"], ["test_batch.bin"], ["test_batch"]],
        _sizes(50_000, 0, 10_000),
        list_cifar10,
    ),
    LabelledSet(
        "cifar-100",
        [["fine_label_names.txt"], ["meta", "train", "test", "file.txt~"]],
        _sizes(50_000, 0, 10_000),
        list_cifar100,
    ),
    LabelledSet(
        "stl-10",
        [["train_X.bin"], ["test_X.bin"], ["unlabeled_X.bin"]],
        _sizes(5_000, 0, 8_000, **{UNLABELED: 100_000}),
        list_stl10,
    ),
    LabelledSet(
        "svhn",
        [["train_32x32.mat"], ["test_32x32.mat"]],
        _sizes(73_257, 0, 26_032, **{EXTRA: 531_131}),
        list_svhn,
    ),
    LabelledSet("flowers-102", [["setid.mat"]], _sizes(1_020, 1_020, 6_149), list_flowers),
    LabelledSet("pets", [["annotations/trainval.txt"]], _sizes(3_680, 0, 3_669), list_pets),
    LabelledSet("dtd", [["labels/train1.txt"]], _sizes(1_880, 1_880, 1_880), list_dtd),
    LabelledSet("food-101", [["meta/classes.txt"]], _sizes(75_750, 0, 25_250), list_food),
    LabelledSet("aircraft", [["data/variants.txt"]], _sizes(3_334, 3_333, 3_333), list_aircraft),
    LabelledSet("cars", [["devkit/cars_meta.mat"]], _sizes(8_144, 0, 8_041), list_cars),
    LabelledSet(
        "caltech-101", [["accordion", "yin_yang"]], _sizes(3_030, 0, 5_647), list_caltech101
    ),
    LabelledSet("eurosat", [["AnnualCrop", "SeaLake"]], _sizes(16_200, 5_400, 5_400), list_eurosat),
)
DATA_SETS = {data_set.name: data_set for data_set in _DATA_SETS}
