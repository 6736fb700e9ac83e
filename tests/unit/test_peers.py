"""`benchmarks.peers` in small: megavis trains like plain loops around other libraries' models."""

import re
from dataclasses import replace

import pytest
import torch
from timm_alone import whole_timm

from benchmarks.peers import finetune, igpt, mae
from benchmarks.peers.__main__ import main
from benchmarks.peers.comparison import COMPARED, TOLERANCE, Result
from benchmarks.peers.sizes import Sizes

SIZES = Sizes(
    layers=2,
    width=32,
    heads=4,
    decoder_layers=1,
    decoder_width=16,
    decoder_heads=2,
    image_size=16,
    batch_size=8,
    steps=8,
    warmup=3,
    rate=3e-3,
)


def check(result, *, first_loss):
    """Check that a comparison agrees by far, and that both trained."""
    assert result.difference < 0.1 * TOLERANCE
    assert result.agrees
    assert len(result.losses) == SIZES.steps
    assert abs(result.losses[0][0] - first_loss) < 0.5
    assert len({losses[0] for losses in result.losses}) == SIZES.steps
    # Adam divides by the size of a gradient, so that rounding moves a few weights by a small step.
    assert result.weights < 0.1 * SIZES.rate


def test_mae_trains_like_vit_mae(context, image_shards):
    """One rounding of the first weights does not lead further than megavis in this short run."""
    result = mae.run(replace(SIZES, control=True), image_shards / "train", context)
    check(result, first_loss=1.0)
    assert 0 < result.rounding < 0.1 * TOLERANCE


def test_igpt_trains_like_image_gpt(context, shards):
    result = igpt.run(SIZES, shards / "train", context)
    check(result, first_loss=4.2)  # ln 64
    assert result.rounding is None


def test_fine_tuning_trains_like_timm(context, image_shards):
    """Mixup and CutMix, label smoothing, layer-wise decay, weight decay, EMA."""
    with whole_timm():
        result = finetune.run(SIZES, image_shards / "train", context)
    check(result, first_loss=2.3)  # ln 10
    assert result.average < 0.1 * SIZES.rate


def test_draws_of_the_short_run_mix_in_both_ways():
    drawn = torch.stack(
        [
            finetune.uniform(torch.tensor([step]), 4, seed=SIZES.seed, purpose="mixing")[0]
            for step in range(SIZES.steps)
        ]
    )
    assert 0 < int((drawn[:, 0] < 0.5).sum()) < SIZES.steps


def test_another_schedule_of_the_peer_is_found(context, image_shards, monkeypatch):
    monkeypatch.setattr(mae, "cosine_rate", lambda step, *, peak, warmup, steps: peak)
    result = mae.run(SIZES, image_shards / "train", context)
    assert result.losses[0][0] == pytest.approx(result.losses[0][1], abs=1e-6)
    assert not result.agrees


def test_another_layer_decay_of_the_peer_is_found(context, image_shards, monkeypatch):
    grouped = finetune.layer_groups

    def without_scales(model, num_layers):
        return [{**group, "lr_scale": 1.0} for group in grouped(model, num_layers)]

    monkeypatch.setattr(finetune, "layer_groups", without_scales)
    with whole_timm():
        assert not finetune.run(SIZES, image_shards / "train", context).agrees


def test_a_loss_that_is_no_number_does_not_agree():
    nan = float("nan")
    assert not Result("a", "b", 2, losses=[(nan, 1.0)]).agrees
    assert not Result("a", "b", 2, losses=[(1.0, 1.0), (nan, nan)]).agrees


def test_only_the_first_steps_have_to_agree():
    equal, last = [(1.0, 1.0)] * COMPARED, [(1.0, 2.0)]
    assert Result("a", "b", 2, losses=equal + last).agrees
    assert not Result("a", "b", 2, losses=equal[1:] + last).agrees


@pytest.mark.parametrize("words", [[], ["--only", "igpt", "--images", "x"], ["--only", "mae"]])
def test_missing_shards_are_named(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert re.search(
        r"give --images for mae and finetune, --tokens for igpt", capsys.readouterr().err
    )
