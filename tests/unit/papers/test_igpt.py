"""iGPT's two losses against the paper's formulas in plain loops."""

import math

import numpy as np
import pytest
import torch
from small_batches import batch_of

from megavis.config.errors import UserError
from megavis.config.load import dump_config, load_config
from megavis.weights.imagegpt import fits_imagegpt


def draw(batch_size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(32, (batch_size, 16), generator=generator)
    return ids, torch.randn(16, batch_size, 32, generator=generator)


def nats(logits, target):
    """Return -log softmax(logits)[target] in double precision."""
    values = [float(x) for x in logits.double()]
    return math.log(sum(math.exp(v) for v in values)) - values[int(target)]


def test_autoregressive_loss_is_the_mean_nll(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml")
    ids, predictions = draw()
    sequence = objective.sequence(batch_of(ids))
    loss = objective.loss(predictions, sequence.targets)
    plain = [nats(predictions[i, b], ids[b, i]) for b in range(3) for i in range(16)]
    assert abs(float(loss) - sum(plain) / len(plain)) < 1e-5


@pytest.mark.parametrize("order", ["nested_raster", "file"])
def test_autoregressive_loss_follows_the_chain_rule(build, tmp_path, order):
    """Section 2.1: p(x) = Π p(x_π(i) | x_π(1), ..., x_π(i-1)), factor by factor."""
    if order == "file":
        permutation = np.random.default_rng(0).permutation(16)
        np.save(tmp_path / "order.npy", permutation)
        words = [f"objective.order={tmp_path}/order.npy"]
    else:
        permutation = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
        words = ["objective.order=nested_raster", "objective.order_block=2"]
    objective, inference = build(tmp_path / "c.yaml", *words)
    ids, _ = draw()
    total = 0.0
    for place, pixel in enumerate(permutation):
        hidden = ids.clone()
        # The factor must not depend on this pixel or later ones, so replace their colours.
        hidden[:, list(permutation[place:])] = 31 - hidden[:, list(permutation[place:])]
        logits = objective.outputs(inference.predictions(objective.inputs_from(hidden)))
        total += sum(nats(logits[b, place], ids[b, pixel]) for b in range(3))
    sequence = objective.sequence(batch_of(ids))
    loss = objective.loss(inference.predictions(sequence.inputs), sequence.targets)
    assert float(loss) == pytest.approx(total / 48, rel=1e-5)
    assert torch.equal(sequence.targets[0], ids[:, list(permutation)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.arange(9), "objective.order: lists 9 tokens, and images have 16"),
        (np.arange(1, 17), "must contain a permutation: .*, not '.*order.npy'"),
        (np.arange(16).reshape(4, 4), "must contain a permutation"),
        ({"order": np.arange(16)}, "must contain a permutation"),
        (None, "objective.order: must be a file written by numpy.save, not '.*order.npy'"),
    ],
)
def test_invalid_order_file(build, tmp_path, content, message):
    if isinstance(content, dict):
        np.savez(tmp_path / "order.npz", **content)
        (tmp_path / "order.npz").rename(tmp_path / "order.npy")
    elif content is not None:
        np.save(tmp_path / "order.npy", content)
    with pytest.raises(UserError, match=message):
        build(tmp_path / "c.yaml", f"objective.order={tmp_path}/order.npy")


@pytest.mark.parametrize("order", ["[raster, 1]", "[[0, 1], [2, 3]]", "[0, 0, 1]"])
def test_invalid_order_list(build, tmp_path, order):
    with pytest.raises(UserError, match="objective.order: must list every token"):
        build(tmp_path / "c.yaml", f"objective.order={order}")


def test_run_config_contains_the_order(build, tmp_path):
    np.save(tmp_path / "order.npy", np.arange(16)[::-1])
    objective, _ = build(tmp_path / "c.yaml", f"objective.order={tmp_path}/order.npy")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_config(objective.config))
    (tmp_path / "order.npy").unlink()
    assert load_config(resolved).config == objective.config


@pytest.mark.parametrize("ratio", [0.15, 0.2])
def test_bert_loss_averages_the_masked_pixels_of_each_image(build, tmp_path, ratio):
    words = ["objective.mode=bert", f"objective.mask_ratio={ratio}"]
    objective, _ = build(tmp_path / "c.yaml", *words)
    ids, predictions = draw()
    sequence = objective.sequence(batch_of(ids, first=3))
    mask = sequence.targets[1]
    assert torch.equal(mask, sequence.inputs[2])
    images = []
    for b in range(3):
        hidden = [i for i in range(16) if mask[b, i]]
        assert hidden, "pick another seed: this image has no masked pixels"
        images.append(sum(nats(predictions[i, b], ids[b, i]) for i in hidden) / len(hidden))
    assert abs(float(objective.loss(predictions, sequence.targets)) - sum(images) / 3) < 1e-5


def test_unmasked_pixels_have_no_gradient(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml", "objective.mode=bert")
    ids, predictions = draw()
    predictions.requires_grad_()
    sequence = objective.sequence(batch_of(ids))
    objective.loss(predictions, sequence.targets).backward()
    touched = predictions.grad.abs().sum(-1).t() != 0
    assert torch.equal(touched, sequence.targets[1])


def test_mask_depends_on_the_sample_only(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml", "objective.mode=bert")
    ids, _ = draw(batch_size=6)
    whole = objective.sequence(batch_of(ids)).targets[1]
    tail = objective.sequence(batch_of(ids[4:], first=4)).targets[1]
    assert torch.equal(whole[4:], tail)
    assert not torch.equal(whole[0], whole[1])


def test_mask_ratio(build, tmp_path):
    for ratio in (0.15, 0.2):
        words = ["objective.mode=bert", f"objective.mask_ratio={ratio}"]
        objective, _ = build(tmp_path / "c.yaml", *words)
        ids = torch.zeros(4000, 16, dtype=torch.int64)
        share = objective.sequence(batch_of(ids)).targets[1].float().mean().item()
        # Five standard deviations of a mean of 64,000 coin flips.
        assert abs(share - ratio) < 5 * (ratio * (1 - ratio) / 64000) ** 0.5


def test_random_order_permutes_pixels_and_positions(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml", "objective.order=random")
    ids, _ = draw()
    sequence = objective.sequence(batch_of(ids))
    entering, _, pixels = sequence.inputs
    ordered = sequence.targets[0]
    assert sorted(pixels[0].tolist()) == list(range(16))
    assert pixels[0].tolist() != list(range(16))
    for b in range(3):
        for place in range(16):
            assert ordered[b, place] == ids[b, pixels[0, place]]
    assert torch.equal(entering, ordered[:, :-1])


def test_loss_is_float32_under_bf16(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml")
    ids, predictions = draw()
    sequence = objective.sequence(batch_of(ids))
    rounded = predictions.bfloat16()
    loss = objective.loss(rounded, sequence.targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, objective.loss(rounded.float(), sequence.targets))


def test_only_learned_positions_fit_imagegpt(build, tmp_path):
    assert fits_imagegpt(build(tmp_path / "c.yaml")[0].config) == 32
    with pytest.raises(UserError, match="learned positions; model.positions is sincos"):
        fits_imagegpt(build(tmp_path / "c.yaml", "model.positions=sincos")[0].config)
