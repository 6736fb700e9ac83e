"""The VAE of label maps: channels, loss and network against plain loops."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from label_map_config import write_label_map_config
from scene_shards import write_scene_shards

from megavis.cli import main
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.data.codecs.label_maps import to_numbers, to_pixels
from megavis.data.codecs.transforms import Transform
from megavis.data.loading.dataset import ShardDataset
from megavis.notebook import Run
from megavis.parallel.context import close_context, current_context
from megavis.tokenizers.label_map_vae import (
    LabelChannels,
    LabelMapVAE,
    embed_labels,
    patch_pixels,
    resize_tokens,
    unpatch_pixels,
)
from megavis.tokenizers.network_tokenizer import open_tokenizer

pytestmark = pytest.mark.once

PANOPTIC = LabelChannels("panoptic", (5, 4))
DEPTH = LabelChannels("depth", (10,), 0.5, 3.0)


def random_maps(channels, *, count=2, side=8, seed=0):
    random = np.random.default_rng(seed)
    if channels.kind == "depth":
        numbers = random.choice([0, 3000, 9999, 12_345, 29_999, 40_000], (count, side, side))
    else:
        numbers = random.integers(0, 5, (count, side, side)) + 256 * random.integers(
            0, 6, (count, side, side)
        )
    return torch.from_numpy(to_pixels(numbers))


def test_depth_bins_have_equal_width():
    metres = [0.0, 0.3, 0.5, 0.7499, 0.7501, 1.74, 2.99, 3.0, 9.0]
    numbers = np.array([[round(10_000 * metre) for metre in metres]])
    labels = DEPTH.labels(torch.from_numpy(to_pixels(numbers))[None])
    assert labels[0, 0, 0].tolist() == [0, 0, 0, 0, 1, 4, 9, 9, 9]
    logits = F.one_hot(labels[:, 0], 10).permute(0, 3, 1, 2).float()
    back = to_numbers(DEPTH.maps(logits)[0].numpy()) / 10_000
    assert back[0].tolist() == pytest.approx([0.625] * 4 + [0.875, 1.625] + [2.875] * 3)


def test_instances_take_their_most_likely_class():
    torch.manual_seed(0)
    logits = torch.randn(2, 9, 6, 7)
    maps = PANOPTIC.maps(logits)
    for image in range(2):
        segment = logits[image, 5:].argmax(0)
        assert (maps[image, ..., 1] == segment).all()
        for number in range(4):
            inside = segment == number
            sums = [float(logits[image, label][inside].sum()) for label in range(5)]
            if inside.any():
                expected = max(range(5), key=sums.__getitem__)
                assert set(maps[image, ..., 0][inside].tolist()) == {expected}


@pytest.mark.parametrize("channels", [PANOPTIC, DEPTH], ids=["panoptic", "depth"])
def test_loss_matches_cross_entropy_loops(channels):
    torch.manual_seed(1)
    labels = channels.labels(random_maps(channels))
    logits = torch.randn(2, channels.num_channels, 8, 8)
    found = channels.loss(logits, labels)
    for image in range(2):
        expected, start = 0.0, 0
        for group, size in enumerate(channels.sizes):
            part, total, counted = logits[image, start : start + size], 0.0, 0
            for row in range(8):
                for column in range(8):
                    label = int(labels[image, group, row, column])
                    counts = channels.kind == "panoptic" or label > 0
                    counted += counts
                    if counts and label < size:
                        numbers = part[:, row, column].tolist()
                        total -= numbers[label] - math.log(sum(map(math.exp, numbers)))
            expected += total / counted
            start += size
        assert float(found[image]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("channels", [PANOPTIC, DEPTH], ids=["panoptic", "depth"])
def test_embed_labels_equals_a_convolution(channels):
    torch.manual_seed(2)
    labels = channels.labels(random_maps(channels))
    size, width = 4, 3
    table = torch.randn(size**2 * channels.num_channels, width)
    found = embed_labels(table, labels, channels, size)
    hot = []
    for group, count in enumerate(channels.sizes):
        # Labels beyond the channels have no one-hot channel.
        hot.append(F.one_hot(labels[:, group], 6 if count < 6 else count)[..., :count])
    images = torch.cat(hot, dim=-1).permute(0, 3, 1, 2).float()
    kernel = table.view(size, size, channels.num_channels, width).permute(3, 2, 0, 1)
    expected = F.conv2d(images, kernel, stride=size).flatten(2).transpose(1, 2)
    assert torch.allclose(found, expected, atol=1e-5)


def test_unpatch_inverts_patch():
    maps = torch.arange(2 * 3 * 8 * 8).view(2, 3, 8, 8)
    patches = patch_pixels(maps, 4)
    assert patches.shape == (2, 4, 16, 3)
    assert (patches[1, 3, 5] == maps[1, :, 5, 5]).all()
    assert (unpatch_pixels(patches, 4, rows=2) == maps).all()


def test_resize_tokens_matches_jax():
    """JAX's antialiased linear resize weighs (1, 3, 3, 1) / 8, renormalised at borders."""
    tokens = torch.randn(1, 16, 2, dtype=torch.float32)
    matrix = torch.tensor(
        [[3 / 7, 3 / 7, 1 / 7, 0.0], [0.0, 1 / 7, 3 / 7, 3 / 7]], dtype=torch.float32
    )
    expected = torch.einsum("ri,cj,bijh->brch", matrix, matrix, tokens.view(1, 4, 4, 2))
    assert torch.allclose(resize_tokens(tokens, rows=4, to=2), expected.flatten(1, 2), atol=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a short run of each kind of maps."""
    folder = write_scene_shards(tmp_path_factory.mktemp("label_maps"))
    for kind in ("panoptic", "depth"):
        path = write_label_map_config(folder, kind)
        assert main(["train", str(path), "--device", "cpu"]) == 0
    return folder


@pytest.fixture(autouse=True)
def _closed_job():
    yield
    if current_context() is not None:
        close_context()


@pytest.mark.parametrize("kind", ["panoptic", "depth"])
def test_tokenizer_matches_the_run(trained, kind):
    run = Run.open(trained / "runs" / kind)
    tokenizer = open_tokenizer(trained / "runs" / kind)
    assert isinstance(tokenizer, LabelMapVAE)
    dataset = ShardDataset(trained / kind / "validation", Transform(32, crop="center"))
    pairs, _ = dataset.read(np.arange(4))
    pairs = torch.from_numpy(pairs)
    moments = run.outputs(pairs)
    found = tokenizer.encode(pairs[:, 1])
    mean, log_variance = moments.chunk(2, dim=1)
    assert torch.allclose(found[:, 0], mean, atol=1e-5)
    assert torch.allclose(found[:, 1], (0.5 * log_variance).exp(), atol=1e-5)
    predictions = run.inference.predictions(run.objective.inputs_from(pairs))
    expected = run.objective.logits(predictions)
    assert expected.abs().max() > 0.1, "the zero-initialised head was not trained"
    assert torch.allclose(tokenizer.logits(found[:, 0]), expected, atol=1e-4)
    assert (tokenizer.decode(found[:, 0]) == run.objective.reconstructed_maps(predictions)).all()


def test_loss_includes_the_kl_divergence(trained):
    run = Run.open(trained / "runs" / "panoptic")
    dataset = ShardDataset(trained / "panoptic" / "train", Transform(32, crop="center"))
    pairs = torch.from_numpy(dataset.read(np.arange(3))[0])
    index = torch.tensor([5, 6, 7])
    predictions = run.inference.predictions(run.objective.inputs_from(pairs, sample_index=index))
    labels = run.objective.channels.labels(pairs[:, 1])
    terms = run.objective.terms(predictions, (labels,))
    mean, log_variance = predictions[1].double().chunk(2, dim=1)
    normal = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    kl = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0))
    assert float(terms["kl"]) == pytest.approx(float(kl.sum((1, 2, 3)).mean()), rel=1e-5)
    expected = float(terms["cross_entropy"]) + 2.5e-4 * float(terms["kl"])
    assert float(run.objective.loss(predictions, (labels,))) == pytest.approx(expected)


def test_training_reduces_the_loss_and_saves_figures(trained):
    for kind in ("panoptic", "depth"):
        folder = trained / "runs" / kind
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line).get("validation_cross_entropy") for line in lines]
        losses = [loss for loss in losses if loss is not None]
        assert losses[-1] < 0.95 * losses[0]
        assert list((folder / "samples").glob("*.png"))


def test_shards_are_checked(trained, capsys):
    path = write_label_map_config(trained, "panoptic")
    words = [f"data.train={trained}/depth/train", "name=other"]
    assert main(["train", str(path), *words, "--device", "cpu"]) == 2
    assert "holds depth maps; objective.target panoptic needs" in capsys.readouterr().err
    words = ["objective.semantic_channels=5", "name=other"]
    assert main(["train", str(path), *words, "--device", "cpu"]) == 2
    assert "holds 5 classes; with void they do not fit" in capsys.readouterr().err


def test_unsupported_model_keys_are_refused(tmp_path):
    path = write_label_map_config(tmp_path, "panoptic")
    for word in (
        "model.activation=quick_gelu",
        "model.add_bias=false",
        "model.positions=sincos",
        "model.qk_norm=true",
    ):
        with pytest.raises(UserError, match="does not fit label maps"):
            load_config(path, [word])


def test_plan(tmp_path, capsys):
    path = write_label_map_config(tmp_path, "depth")
    assert main(["plan", str(path), "--gpus", "2", "--json"]) == 0
    out = capsys.readouterr().out
    assert [stack["name"] for stack in json.loads(out)["stacks"]] == ["blocks", "decoder"]
    assert "pp2" in out
