"""iGPT's two losses against the paper's formulas, worked by loops."""

import math

import torch

from megavis.data.batch import Batch


def batch_of(ids, first=0):
    index = torch.arange(first, first + len(ids))
    return Batch(ids, torch.full((len(ids),), -1), index)


def draw(batch_size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(32, (batch_size, 16), generator=generator)
    return ids, torch.randn(16, batch_size, 32, generator=generator)


def nats(logits, target):
    """-log softmax(logits)[target], one exponential after the other."""
    values = [float(x) for x in logits.double()]
    return math.log(sum(math.exp(v) for v in values)) - values[int(target)]


def test_autoregressive_loss_is_the_mean_negative_log_likelihood(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml")
    ids, predictions = draw()
    sequence = objective.sequence(batch_of(ids))
    loss = objective.loss(predictions, sequence.targets)
    plain = [nats(predictions[i, b], ids[b, i]) for b in range(3) for i in range(16)]
    assert abs(float(loss) - sum(plain) / len(plain)) < 1e-5


def test_bert_loss_averages_the_masked_pixels_of_each_image(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml", "objective.mode=bert", "objective.mask_ratio=0.4")
    ids, predictions = draw()
    sequence = objective.sequence(batch_of(ids))
    mask = sequence.targets[1]
    assert torch.equal(mask, sequence.inputs[2])
    images = []
    for b in range(3):
        hidden = [i for i in range(16) if mask[b, i]]
        assert hidden, "pick another seed: an image without masked pixels says nothing"
        images.append(sum(nats(predictions[i, b], ids[b, i]) for i in hidden) / len(hidden))
    assert abs(float(objective.loss(predictions, sequence.targets)) - sum(images) / 3) < 1e-5


def test_gradient_of_unmasked_pixels_is_exactly_zero(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml", "objective.mode=bert")
    ids, predictions = draw()
    predictions.requires_grad_()
    sequence = objective.sequence(batch_of(ids))
    objective.loss(predictions, sequence.targets).backward()
    touched = predictions.grad.abs().sum(-1).t() != 0
    assert torch.equal(touched, sequence.targets[1])


def test_mask_is_drawn_for_the_sample_not_for_its_place_in_a_batch(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml", "objective.mode=bert")
    ids, _ = draw(batch_size=6)
    whole = objective.sequence(batch_of(ids)).targets[1]
    tail = objective.sequence(batch_of(ids[4:], first=4)).targets[1]
    assert torch.equal(whole[4:], tail)
    assert not torch.equal(whole[0], whole[1])


def test_mask_ratio_is_that_of_the_config(build, tmp_path):
    for ratio in (0.15, 0.2):
        words = ["objective.mode=bert", f"objective.mask_ratio={ratio}"]
        objective, _ = build(tmp_path / "c.yaml", *words)
        ids = torch.zeros(4000, 16, dtype=torch.int64)
        share = objective.sequence(batch_of(ids)).targets[1].float().mean().item()
        # Five standard deviations of a mean of 64,000 coin flips.
        assert abs(share - ratio) < 5 * (ratio * (1 - ratio) / 64000) ** 0.5


def test_random_order_permutes_pixels_with_their_places(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml", "objective.order=random")
    ids, _ = draw()
    sequence = objective.sequence(batch_of(ids))
    entering, pixels = sequence.inputs
    ordered = sequence.targets[0]
    assert sorted(pixels[0].tolist()) == list(range(16))
    assert pixels[0].tolist() != list(range(16))
    for b in range(3):
        for place in range(16):
            assert ordered[b, place] == ids[b, pixels[0, place]]
    assert torch.equal(entering[:, 1:], ordered[:, :-1])


def test_loss_is_float32_under_bf16(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml")
    ids, predictions = draw()
    sequence = objective.sequence(batch_of(ids))
    rounded = predictions.bfloat16()
    loss = objective.loss(rounded, sequence.targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, objective.loss(rounded.float(), sequence.targets))
