"""Numbers of the papers' figures, from held-out images to rows and lines, against plain loops."""

import argparse
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from small_batches import photographs
from tiny import tiny
from vae_config import SMALL

from megavis.config.errors import UserError
from megavis.evaluation.figures import FigureInput
from megavis.papers.givt.deviation_figure import plot_deviations, predicted_deviations
from megavis.papers.gvp.group_figure import fill, plot_groups
from megavis.papers.mp3 import place_figures
from megavis.papers.vae.posterior_figure import plot_posterior
from megavis.sampling.pictures import pixels_of
from megavis.sampling.sampler import Sampler


class HeldOut:
    """Samples with labels, read as shards are."""

    directory = Path("held_out")

    def __init__(self, samples, labels):
        self.samples, self.labels = samples.numpy(), np.array(labels)

    def __len__(self):
        return len(self.labels)

    def read(self, indices, positions=None):
        return self.samples[indices], self.labels[indices]


def subject(built, tmp_path, samples, labels=None):
    objective, inference = built
    images = HeldOut(samples, [0] * len(samples) if labels is None else labels)
    return FigureInput(tmp_path, objective, inference, images)


def decibels(made, true):
    """Return the PSNR of two lists of values in 0 .. 255."""
    errors = (np.asarray(made, float) - np.asarray(true, float)) ** 2
    return 10 * math.log10(255**2 / errors.mean())


def test_groups_are_scored_over_hidden_pixels(build_gvp, tmp_path):
    built, images = build_gvp(), photographs(3, 12)
    options = argparse.Namespace(
        groups=(1, 3), share=1 / 3, orders=2, num_images=2, seed=5,
        perceptual_weights=None, lpips_weights=None,
    )  # fmt: skip
    figure = plot_groups(subject(built, tmp_path, images), options)
    assert [row["groups"] for row in figure.rows] == [1, 3]
    true, objective, inference = images[:2], *built
    for row, orders in zip(figure.rows, (1, 2), strict=True):
        sampler = Sampler(inference, objective, tmp_path, {"groups": row["groups"]}, seed=5)
        made, given = fill(sampler, true, torch.arange(2), num_given=3, num_orders=orders)
        shown = pixels_of(given, (3, 3), true.numpy())
        assert shown.sum() == 2 * 3 * 16
        assert row["psnr"] == pytest.approx(decibels(made[~shown], true[~shown]), rel=1e-5)
        whole = [decibels(one, other) for one, other in zip(made, true, strict=True)]
        assert row["psnr_of_images"] == pytest.approx(sum(whole) / 2, rel=1e-5)
    # An image, its given part and two completions, enlarged to 120 pixels, between lines of two.
    assert figure.picture.shape == (2 * 122 + 2, 4 * 122 + 2, 3)


GIVT = tiny(
    "{name: givt, latent_channels: 4, downsampling: 8, num_classes: 3, num_components: 2}",
    model={"normalization": "layer_norm"},
    data={"image_size": 32},
)


def latents(count):
    return torch.rand(count, 2, 4, 4, 4, generator=torch.Generator().manual_seed(1)).half()


@pytest.mark.parametrize("label", [None, 2])
def test_deviations_are_means_over_images(build_paper, tmp_path, label):
    built, samples, labels = build_paper(GIVT, std=0.3), latents(40), [0, 1, 2, -1] * 10
    options = argparse.Namespace(num_images=35, label=label)
    figure = plot_deviations(subject(built, tmp_path, samples, labels), options)
    chosen = [i for i, each in enumerate(labels) if each == label or (label is None and each >= 0)]
    assert len(chosen) == (10 if label else 30)
    index, classes = torch.tensor(chosen), torch.tensor([labels[i] for i in chosen])
    means = [
        predicted_deviations(built[1], built[0], samples[index], index, each).mean(0).numpy()
        for each in (classes, torch.full_like(classes, -1))
    ]
    for name, expected in zip(("conditional", "unconditional"), means, strict=True):
        np.testing.assert_allclose([row[name] for row in figure.rows], expected, rtol=1e-4)
        assert f"{name} {expected.mean():.4f}" in figure.lines[0]
    assert [row["token"] for row in figure.rows] == list(range(16))
    assert f"{len(chosen)} images" in figure.lines[0]


def test_deviations_of_a_folder_sorted_by_class_are_of_all_classes(build_paper, tmp_path):
    built, read = build_paper(GIVT, std=0.3), []
    given = subject(built, tmp_path, latents(60), [0] * 20 + [1] * 20 + [2] * 20)
    given.images.read, plain = (
        lambda indices, positions=None: read.extend(indices) or plain(indices),
        given.images.read,
    )
    plot_deviations(given, argparse.Namespace(num_images=15, label=None))
    assert len(set(read)) == 15
    assert {index // 20 for index in read} == {0, 1, 2}


@pytest.mark.parametrize(
    ("label", "text"), [(None, "no image with a class"), (2, "no image of class 2")]
)
def test_deviations_need_images_of_the_class(build_paper, tmp_path, label, text):
    given = subject(build_paper(GIVT), tmp_path, latents(2), [-1, -1])
    with pytest.raises(UserError, match=f"held_out has {text}"):
        plot_deviations(given, argparse.Namespace(num_images=2, label=label))


def test_the_mean_and_draws_of_a_posterior_are_decoded(build_paper, tmp_path):
    words = ("objective.adversarial_weight=0", "data.image_size=8")
    built = build_paper(SMALL.format(output=tmp_path, shards="shards"), *words, std=0.1)
    images = photographs(2, 8)
    options = argparse.Namespace(draws=2, num_images=2)
    figure = plot_posterior(subject(built, tmp_path, images), options)
    objective, inference = built

    def decoded(index):
        inputs = objective.inputs_from(images, sample_index=index)
        return objective.reconstruction(inference.predictions(inputs))

    draws = [decoded(torch.arange(2 * number, 2 * number + 2)) for number in range(2)]
    assert not torch.equal(*draws)
    for row, parts in zip(figure.rows, ([decoded(None)], draws), strict=True):
        each = [
            decibels(one, other) for made in parts for one, other in zip(made, images, strict=True)
        ]
        assert row["psnr"] == pytest.approx(sum(each) / len(each), rel=1e-5)
    assert [row["decoded"] for row in figure.rows] == ["mean", "draws"]
    # An image, its mean and two draws, enlarged to 128 pixels, between lines of two.
    assert figure.picture.shape == (2 * 130 + 2, 4 * 130 + 2, 3)


MP3 = tiny("{name: mp3, patch_size: 4, mask_ratio: 0.5}")


def test_accuracy_of_positions_is_of_ten_mask_ratios(build_paper, tmp_path):
    built, images = build_paper(MP3, std=0.3), photographs(3, 16)
    options = argparse.Namespace(num_images=2)
    figure = place_figures.plot_positions(subject(built, tmp_path, images), options)
    places, inference = place_figures.Places.of(built[0]), built[1]
    assert [row["mask_ratio"] for row in figure.rows] == [number / 10 for number in range(10)]
    for number in (0, 5, 9):
        row = figure.rows[number]
        index = torch.arange(2)
        context = places.context_of(index, number / 10)
        right = place_figures.predicted_places(
            inference, places, places.patches_of(images[:2]), context
        ) == torch.arange(16)  # fmt: skip
        seen = torch.zeros_like(right).scatter(1, context, True)
        assert row["accuracy"] == pytest.approx(right.double().mean().item())
        assert row["of_context"] == pytest.approx(right[seen].double().mean().item())
        if number:
            assert row["of_masked"] == pytest.approx(right[~seen].double().mean().item())
