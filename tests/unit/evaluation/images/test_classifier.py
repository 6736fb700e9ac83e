"""A small image classifier that measures class accuracy of conditional samples."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from image_shards import write_image_shards
from PIL import Image
from small_vqgan import write_untrained_run
from tiny import tiny
from torch.nn import functional as F

from megavis.cli import main
from megavis.evaluation.classes import (
    ImageClassifier,
    class_accuracies,
    classify_images,
    fit_classifier,
)
from megavis.evaluation.images.image_files import open_images
from megavis.tokenizers.network_tokenizer import open_tokenizer

pytestmark = pytest.mark.once

CLASSES = ("across", "down", "flat")


def striped(count, seed):
    """Return uint8 images with horizontal, vertical or no stripes, and their int64 classes."""
    random = np.random.default_rng(seed)
    images = np.empty((count, 16, 16, 3), np.uint8)
    for number in range(count):
        dark, light = random.integers(0, 100, 3), random.integers(156, 256, 3)
        stripes = np.arange(16) // 2 % 2 == 0
        rows = {0: stripes[:, None, None], 1: stripes[None, :, None]}.get(number % 3, True)
        images[number] = np.where(rows, dark, light)
    return torch.from_numpy(images), torch.arange(count) % 3


@pytest.fixture(scope="module")
def classifier():
    images, labels = striped(300, seed=0)
    return fit_classifier(images, labels, num_classes=3, epochs=3, seed=0)


def test_classifier_generalizes_to_new_images(classifier):
    images, labels = striped(60, seed=1)
    assert classify_images(classifier, images).tolist() == labels.tolist()


def test_class_accuracies_match_plain_loop(classifier):
    images, _ = striped(60, seed=1)
    # Relabel half of the first class as the second.
    labels = torch.arange(60) % 3
    labels[torch.arange(0, 60, 6)] = 1
    named = [int(classifier(image[None]).argmax()) for image in images]
    found = class_accuracies(classifier, images, labels, CLASSES)
    assert found.images == 60
    right = [a == b for a, b in zip(named, labels.tolist(), strict=True)]
    assert found.overall == pytest.approx(sum(right) / 60)
    for label, name in enumerate(CLASSES):
        of_class = [r for r, each in zip(right, labels.tolist(), strict=True) if each == label]
        assert found.classes[name] == pytest.approx(sum(of_class) / len(of_class))
    assert found.classes == pytest.approx({"across": 1, "down": 2 / 3, "flat": 1})


def test_class_without_images_is_omitted(classifier):
    images, labels = striped(60, seed=1)
    found = class_accuracies(classifier, images[labels < 2], labels[labels < 2], CLASSES)
    assert list(found.classes) == ["across", "down"]


def test_fit_depends_only_on_the_seed(classifier):
    images, labels = striped(300, seed=0)
    torch.manual_seed(5)
    again = fit_classifier(images, labels, num_classes=3, epochs=3, seed=0)
    other = fit_classifier(images, labels, num_classes=3, epochs=3, seed=1)
    for name, weight in classifier.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert not torch.equal(weight, other.state_dict()[name])


def test_network_is_three_convolutions_and_a_linear_layer():
    torch.manual_seed(0)
    classifier = ImageClassifier(3)
    images, _ = striped(4, seed=0)
    x = images.permute(0, 3, 1, 2) / 127.5 - 1
    weights = list(classifier.parameters())
    for kernel, bias in zip(weights[:6:2], weights[1:6:2], strict=True):
        x = F.conv2d(x, kernel, bias, stride=2, padding=1).clamp(min=0)
    # The convolutions reduce 16² to 2², which the network repeats to 4².
    x = x.repeat_interleave(2, 2).repeat_interleave(2, 3).flatten(1)
    expected = x @ weights[6].T + weights[7]
    assert torch.allclose(classifier(images), expected, atol=1e-5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write training and real shards of striped images, a VQGAN run, and samples."""
    folder = tmp_path_factory.mktemp("classes")
    for part, count in (("train", 300), ("real", 60)):
        images, labels = striped(count, seed=count)
        for number, (image, label) in enumerate(zip(images.numpy(), labels.tolist(), strict=True)):
            path = folder / "images" / part / CLASSES[label] / f"{number:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
        write_image_shards(folder / "images" / part, folder / part)
    (folder / "vqgan").mkdir()
    write_untrained_run(folder / "vqgan")
    images, _ = striped(30, seed=7)
    np.savez(folder / "samples.npz", arr_0=images.numpy())
    return folder


def test_command_scores_samples_real_images_and_reconstructions(folders, capsys):
    words = ["--train", str(folders / "train"), "--images", str(folders / "real")]
    samples, vqgan = folders / "samples.npz", folders / "vqgan"
    options = ["--tokenizer", str(vqgan), "--epochs", "3", "--device", "cpu"]
    assert main(["evaluate", "classes", str(samples), *words, *options]) == 0
    printed = capsys.readouterr().out
    assert "100.0 % of 60 real images" in printed
    assert "100.0 % of 30 samples" in printed
    record = json.loads((folders / "samples.npz.classes.json").read_text())
    assert record["samples"] == {"images": 30, "all": 1, "classes": dict.fromkeys(CLASSES, 1)}
    train, real = (open_images(folders / part) for part in ("train", "real"))
    fitted = fit_classifier(
        torch.from_numpy(train.read(np.arange(300))),
        torch.from_numpy(train.labels).long(),
        num_classes=3,
        epochs=3,
        seed=0,
    )
    tokenizer = open_tokenizer(vqgan)
    made = tokenizer.decode(tokenizer.encode(torch.from_numpy(real.read(np.arange(60)))))
    labels = torch.from_numpy(real.labels).long()
    assert record["reconstructions"] == class_accuracies(fitted, made, labels, CLASSES).record()


@pytest.mark.parametrize(
    ("samples", "train", "reason"),
    [
        ("missing.npz", "train", "has no array arr_0 of images: No such file or directory"),
        (".", "train", "has no array arr_0 of images: Is a directory"),
        ("samples.npz", "missing", "missing does not exist: give a shard folder"),
        ("samples.npz", "samples.npz", "samples.npz"),
    ],
)
def test_files_that_are_not_there_are_named(folders, tmp_path, capsys, samples, train, reason):
    np.savez(tmp_path / "samples.npz", arr_0=np.zeros((3, 8, 8, 3), np.uint8))
    words = ["--train", str(tmp_path / train), "--images", str(folders / "real")]
    if train == "train":
        words[1] = str(folders / train)
    assert main(["evaluate", "classes", str(tmp_path / samples), *words]) == 2
    assert reason in capsys.readouterr().err


def test_mismatched_classes_are_refused(folders, tmp_path, capsys):
    for number in range(4):
        path = tmp_path / "images" / "round" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16)).save(path)
    other = write_image_shards(tmp_path / "images", tmp_path / "other")
    words = ["--train", str(folders / "train"), "--images", str(other)]
    assert main(["evaluate", "classes", str(folders / "samples.npz"), *words]) == 2
    assert (
        f"{other} numbers its classes differently from {folders / 'train'}"
        in capsys.readouterr().err
    )


def test_images_that_the_classifier_was_fitted_on_are_refused(folders, capsys):
    words = [f"--{option}={folders / 'train'}" for option in ("train", "images")]
    assert main(["evaluate", "classes", str(folders / "samples.npz"), *words]) == 2
    assert "cannot evaluate what was trained on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        ("num_classes: 5", "generates images of 5 classes in turn, and .*train has 3"),
        ("num_classes: 0", "generates images without a class"),
    ],
)
def test_a_run_of_other_classes_is_refused(folders, tmp_path, capsys, objective, reason):
    """Its images cycle through its own classes, not through those of the shards."""
    run = tmp_path / "run"
    (run / "samples").mkdir(parents=True)
    keys = f"{{name: givt, latent_channels: 4, downsampling: 4, num_components: 3, {objective}}}"
    (run / "config.yaml").write_text(tiny(keys, shards=tmp_path, data={"validation": None}))
    shutil.copy(folders / "samples.npz", run / "samples")
    words = ["--train", str(folders / "train"), "--images", str(folders / "real")]
    assert main(["evaluate", "classes", str(run), *words, "--device", "cpu"]) == 2
    assert re.search(reason, capsys.readouterr().err)
