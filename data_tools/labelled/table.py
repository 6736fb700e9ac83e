"""All labelled data sets, by their name in `--layout`."""

from __future__ import annotations

from data_tools.labelled.array_files import (
    list_camelyon,
    list_cars,
    list_dsprites_location,
    list_dsprites_orientation,
    list_flowers,
    list_norb_azimuth,
    list_norb_elevation,
    list_svhn,
)
from data_tools.labelled.binary import list_cifar10, list_cifar100, list_stl10
from data_tools.labelled.data_set import EXTRA, TEST, TRAIN, UNLABELED, VALIDATION, LabelledSet
from data_tools.labelled.idx import TEST_IMAGES, TRAIN_IMAGES, list_mnist
from data_tools.labelled.lists import (
    list_aircraft,
    list_caltech101,
    list_caltech102,
    list_dtd,
    list_fifths,
    list_food,
    list_pets,
    list_sun397,
)
from data_tools.labelled.tiny_imagenet import ANNOTATIONS, IDS, list_tiny_imagenet
from data_tools.labelled.vtab import (
    is_retinopathy,
    list_clevr_count,
    list_clevr_distance,
    list_dmlab,
    list_kitti,
    list_retinopathy,
)


def _sizes(train: int, validation: int, test: int, **more: int) -> dict[str, int]:
    sizes = {TRAIN: train, VALIDATION: validation, TEST: test, **more}
    return {split: size for split, size in sizes.items() if size}


_CLEVR = [["scenes/CLEVR_train_scenes.json"], ["scenes/CLEVR_val_scenes.json"]]
_NORB = [["smallnorb-5x46789x9x18x6x2x96x96-training-info.mat"]]

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
    LabelledSet("mnist", [[TRAIN_IMAGES], [TEST_IMAGES]], _sizes(60_000, 0, 10_000), list_mnist),
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
    LabelledSet(
        "tiny-imagenet",
        [[IDS], [ANNOTATIONS]],
        _sizes(100_000, 0, 10_000, **{UNLABELED: 10_000}),
        list_tiny_imagenet,
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
    LabelledSet(
        "caltech-102", [["accordion", "yin_yang"]], _sizes(3_060, 0, 6_084), list_caltech102
    ),
    LabelledSet("eurosat", [["AnnualCrop", "SeaLake"]], _sizes(16_200, 5_400, 5_400), list_fifths),
    LabelledSet(
        "resisc45",
        [["baseball_diamond", "thermal_power_station"]],
        _sizes(18_900, 6_300, 6_300),
        list_fifths,
    ),
    LabelledSet("sun397", [["a/abbey"]], _sizes(76_128, 10_875, 21_750), list_sun397),
    LabelledSet(
        "camelyon",
        [["camelyonpatch_level_2_split_train_x.h5"], ["camelyonpatch_level_2_split_test_x.h5"]],
        _sizes(262_144, 32_768, 32_768),
        list_camelyon,
    ),
    LabelledSet(
        "retinopathy",
        [["trainLabels.csv"], ["retinopathy_solution.csv"]],
        _sizes(35_126, 10_906, 42_670),
        list_retinopathy,
        is_retinopathy,
    ),
    *(
        LabelledSet(name, _CLEVR, _sizes(70_000, 0, 15_000), lists)
        for name, lists in (
            ("clevr-count", list_clevr_count),
            ("clevr-distance", list_clevr_distance),
        )
    ),
    LabelledSet(
        "dmlab",
        [["dmlab-train.tfrecord"], ["dmlab-test.tfrecord"]],
        _sizes(65_550, 22_628, 22_735),
        list_dmlab,
    ),
    LabelledSet(
        "kitti-distance", [["mapping/train_mapping.txt"]], _sizes(6_347, 423, 711), list_kitti
    ),
    *(
        LabelledSet(name, [["latents_classes.npy"]], _sizes(589_824, 73_728, 73_728), lists)
        for name, lists in (
            ("dsprites-location", list_dsprites_location),
            ("dsprites-orientation", list_dsprites_orientation),
        )
    ),
    *(
        LabelledSet(name, _NORB, _sizes(24_300, 12_150, 12_150), lists)
        for name, lists in (
            ("smallnorb-azimuth", list_norb_azimuth),
            ("smallnorb-elevation", list_norb_elevation),
        )
    ),
)
DATA_SETS = {data_set.name: data_set for data_set in _DATA_SETS}
