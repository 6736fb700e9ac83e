"""Mixup and CutMix against loops over pixels, and the loss on mixed labels."""

import math

import numpy as np
import pytest
import torch
from class_logits import PATCHES, WORDS, class_logits
from scipy import stats
from small_batches import photographs

from megavis.composition.mixing import mix
from megavis.config.errors import UserError
from megavis.data.loading.loader import Batch
from megavis.parallel.random import uniform

SIDE, CLASSES = 12, 4


def mixed_by_loops(images, labels, pairs, *, mixup, cutmix):
    """Mix each image with its neighbour pixel by pixel."""
    mixed, shares = np.zeros(images.shape), np.zeros((len(images), CLASSES))
    cuts = 0
    for i, pair in enumerate(pairs):
        which, draw, row, column = (
            float(x) for x in uniform(torch.tensor([pair]), 4, seed=5, purpose="mixing")[0]
        )
        other = i ^ 1
        if cutmix and (not mixup or which < 0.5):
            cuts += 1
            share = stats.beta.ppf(draw + 2**-25, cutmix, cutmix)
            length = math.floor(SIDE * math.sqrt(1 - share))
            top, left = (math.floor(place * SIDE) - length // 2 for place in (row, column))
            area = 0
            for y in range(SIDE):
                for x in range(SIDE):
                    inside = top <= y < top + length and left <= x < left + length
                    area += inside
                    mixed[i, y, x] = images[other if inside else i, y, x]
            share = 1 - area / SIDE**2
        else:
            share = stats.beta.ppf(draw + 2**-25, mixup, mixup)
            mixed[i] = share * images[i] + (1 - share) * images[other]
        shares[i, labels[i]] += share
        shares[i, labels[other]] += 1 - share
    return mixed, shares, cuts


# timm's `mode` elem, pair and batch: images that share λ, rectangle and choice.
@pytest.mark.parametrize("sharing", [1, 2, 4])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 1.0), (0.8, 0.0), (0.0, 1.0)])
def test_mixing_matches_plain_loops(mixup, cutmix, sharing):
    images, labels = photographs(24, SIDE, seed=0), torch.randint(CLASSES, (24,))
    index = torch.arange(100, 124)
    options = {"num_classes": CLASSES, "mixup": mixup, "cutmix": cutmix, "seed": 5}
    options["sharing"] = sharing
    mixed, shares = mix(images, labels, index, **options)
    expected, classes, cuts = mixed_by_loops(
        images.numpy(), labels.tolist(), (index // sharing).tolist(), mixup=mixup, cutmix=cutmix
    )
    assert cuts in {(0.8, 0.0): [0], (0.0, 1.0): [24]}.get((mixup, cutmix), range(4, 20))
    # Half a level of rounding plus the error of the quantile table.
    assert np.abs(mixed.numpy() - expected).max() < 0.6
    np.testing.assert_allclose(shares, classes, atol=1e-4)
    # An even micro-batch is mixed as in the whole batch.
    again, _ = mix(images[6:10], labels[6:10], index[6:10], **options)
    assert torch.equal(again, mixed[6:10])


MIXING = ("finetune.mixup=0.8", "finetune.cutmix=1.0", "finetune.label_smoothing=0.1")


def test_loss_uses_mixed_labels(build, tmp_path):
    """Only training mixes images."""
    words = (*WORDS, "objective={name: gvp, patch_size: 2, num_groups: 2}", *PATCHES, *MIXING)
    objective, inference = build(tmp_path / "c.yaml", *words)
    images = photographs(6, SIDE, seed=0)[:, :4, :4].contiguous()
    batch = Batch(images, torch.tensor([0, 1, 2, 3, 4, 0]), torch.arange(6))
    sequence = objective.training_sequence(batch)
    shares = sequence.targets[-1]
    assert shares.shape == (6, 5)
    predictions = inference.predictions(sequence.inputs)
    logits = class_logits(inference, sequence.inputs, "mean")
    expected = 0.0
    for z, share in zip(logits, shares.tolist(), strict=True):
        total = math.log(sum(math.exp(value) for value in z))
        expected += sum(
            (0.9 * s + 0.1 / 5) * (total - value) for s, value in zip(share, z, strict=True)
        )
    loss = objective.loss(predictions, sequence.targets)
    assert float(loss) == pytest.approx(expected / 6, rel=1e-5)
    assert torch.equal(objective.sequence(batch).targets[-1], batch.labels)


@pytest.mark.parametrize(
    ("mode", "sharing"), [("batch", 32), ("pair", 2), ("elem", 1), ("batch", 6)]
)
def test_images_of_a_mode_share_their_draws(build, tmp_path, mode, sharing):
    """Plain mixup of black and white pictures shows the share of the other image."""
    words = (*WORDS, "objective={name: gvp, patch_size: 2, num_groups: 2}", *PATCHES)
    more = [] if sharing < 3 else [f"finetune.mixing_batch={sharing}"]
    objective, _ = build(
        tmp_path / "c.yaml", *words, "finetune.mixup=0.8", f"finetune.mixing={mode}", *more
    )
    count = 96
    images = torch.zeros(count, 4, 4, 3, dtype=torch.uint8)
    images[::2] = 255
    batch = Batch(images, torch.zeros(count, dtype=torch.int64), torch.arange(count))
    shown = objective._mixed(batch)[0][:, 0, 0, 0].tolist()
    own = [value if i % 2 == 0 else 255 - value for i, value in enumerate(shown)]
    for first in range(0, count, sharing):
        assert max(own[first : first + sharing]) - min(own[first : first + sharing]) <= 1
    assert len(set(own)) > count // sharing // 2


def test_an_odd_mixing_batch_is_refused(build, tmp_path):
    with pytest.raises(UserError, match=r"finetune.mixing_batch: 33 is odd, and images are mixed"):
        build(tmp_path / "c.yaml", *WORDS, *MIXING, "finetune.mixing_batch=33")


def test_unsupported_mixing_is_refused(build, tmp_path, shard_folders):
    from megavis.config.checks import check_world
    from megavis.data.format.manifest import Manifest

    objective, _ = build(tmp_path / "c.yaml", *WORDS, *MIXING)
    issues = objective.check_data(Manifest.read(shard_folders / "train"))
    assert "finetune.mixup and cutmix need jpeg shards" in list(issues)[0]
    config, size = objective.config, objective.config.training.batch_size
    issues = dict(check_world(config, size))
    assert "make it even" in issues["training.micro_batch_size"]
    with pytest.raises(UserError, match=r"finetune.layer_decay: applies to trained layers"):
        build(
            tmp_path / "c.yaml",
            *WORDS,
            "finetune.linear_evaluation=true",
            "finetune.layer_decay=0.5",
        )
