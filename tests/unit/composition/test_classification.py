"""Classification on top of a paper: loss against plain loops, visibility, drop path and head."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from class_logits import PATCHES, WORDS, class_logits

from megavis.composition.classification import Classification
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import Batch
from megavis.model.parameters import options_of
from megavis.papers import OBJECTIVES
from megavis.parallel.random import uniform

PAPERS = {
    "igpt": ("finetune.read_out=last",),
    "gvp": ("objective={name: gvp, patch_size: 2, num_groups: 2}", *PATCHES),
    "mp3": ("objective={name: mp3, patch_size: 2}", "finetune.read_out=first", *PATCHES),
}


@pytest.fixture
def batch(shard_folders):
    """Six images of three classes as palette ids."""
    tokens, labels = ShardDataset(shard_folders / "train").read(np.arange(0, 120, 20))
    ids = torch.from_numpy(tokens.astype(np.int64))
    return Batch(ids, torch.from_numpy(labels), torch.arange(6))


@pytest.fixture
def pictures(batch):
    """Six images of three classes as pixels."""
    pixels = torch.randint(0, 256, (6, 4, 4, 3), generator=torch.Generator().manual_seed(0))
    return Batch(pixels.to(torch.uint8), batch.labels, batch.sample_index)


def cross_entropy(logits, label, smoothing=0.0):
    total = math.log(sum(math.exp(z) for z in logits))
    even = sum(total - z for z in logits) / len(logits)
    return (1 - smoothing) * (total - logits[label]) + smoothing * even


@pytest.mark.parametrize("mode", ["autoregressive", "bert"])
def test_joint_loss_is_the_weighted_sum(build, tmp_path, batch, mode):
    words = (*WORDS, f"objective.mode={mode}", "finetune.generative_weight=0.5")
    objective, inference = build(tmp_path / "c.yaml", *words)
    sequence = objective.sequence(batch)
    predictions = inference.predictions(sequence.inputs)
    got = objective.loss(predictions, sequence.targets)

    plain = OBJECTIVES["igpt"](objective.config, inference.context)
    own = plain.sequence(batch)
    generative = plain.loss(predictions[0], own.targets)
    logits = class_logits(inference, own.inputs, "mean")
    nats = [cross_entropy(z, y) for z, y in zip(logits, batch.labels.tolist(), strict=True)]
    np.testing.assert_allclose(objective.outputs(predictions), logits, rtol=1e-4, atol=1e-4)
    assert float(got) == pytest.approx(0.5 * float(generative) + sum(nats) / 6, rel=1e-5)
    # The classifier's are left out.
    assert objective.flops_per_image() == plain.flops_per_image()


@pytest.mark.parametrize("visibility", ["kept", "full"])
@pytest.mark.parametrize("name", list(PAPERS))
def test_class_logits_and_loss_for_every_paper(build, tmp_path, batch, pictures, name, visibility):
    words = (*WORDS, *PAPERS[name], f"finetune.visibility={visibility}")
    objective, inference = build(tmp_path / "c.yaml", *words, "finetune.label_smoothing=0.1")
    images = batch if name == "igpt" else pictures
    sequence = objective.sequence(images)
    predictions = inference.predictions(sequence.inputs)

    logits = class_logits(inference, sequence.inputs, objective.settings.read_out)
    np.testing.assert_allclose(predictions, logits, rtol=1e-4, atol=1e-4)
    labels = images.labels.tolist()
    nats = [cross_entropy(z, y, 0.1) for z, y in zip(logits, labels, strict=True)]
    loss = objective.loss(predictions, sequence.targets)
    assert float(loss) == pytest.approx(sum(nats) / 6, rel=1e-5)
    # Smoothing is for training: held-out images have plain cross-entropy.
    total, count = objective.held_out_loss(predictions, sequence.targets, 6)
    plain = [cross_entropy(z, y, 0.0) for z, y in zip(logits, labels, strict=True)]
    assert float(total) / count == pytest.approx(sum(plain) / 6, rel=1e-5)
    named = np.argmax(logits, axis=1) == np.array(labels)
    assert objective.measures(predictions, sequence.targets)["accuracy"] == (named.sum(), 6)
    again = inference.predictions(objective.inputs_from(images.inputs))
    torch.testing.assert_close(again, predictions)


@pytest.mark.parametrize(("visibility", "sees"), [("kept", False), ("full", True)])
@pytest.mark.parametrize("name", ["igpt", "gvp"])
def test_visibility_of_finetuning(build, tmp_path, batch, pictures, name, visibility, sees):
    """The first token depends on the last one only under full visibility."""
    words = (*WORDS, *PAPERS[name], f"finetune.visibility={visibility}")
    objective, inference = build(tmp_path / "c.yaml", *words, "finetune.read_out=first")
    images = (batch if name == "igpt" else pictures).inputs
    changed = images.clone()
    changed.flatten(1)[:, -4:-1] = changed.flatten(1)[:, -4:-1] // 2
    one, other = (inference.predictions(objective.inputs_from(each)) for each in (images, changed))
    assert not torch.equal(images, changed)
    assert torch.equal(one, other) is not sees


@pytest.mark.parametrize(("kind", "sees"), [("none", False), ("learned", True), ("sincos", True)])
def test_mp3_class_token_depends_on_positions(build, tmp_path, pictures, kind, sees):
    """Without position embeddings, MP3 is invariant to the order of patches (section 3.3)."""
    words = (*WORDS, *PAPERS["mp3"], f"model.positions={kind}")
    objective, inference = build(tmp_path / "c.yaml", *words)
    images = pictures.inputs
    # Swap the upper and the lower half, two rows of patches.
    moved = torch.cat([images[:, 2:], images[:, :2]], dim=1)
    one, other = (inference.predictions(objective.inputs_from(each)) for each in (images, moved))
    assert torch.allclose(one, other, atol=1e-5) is not sees


@torch.no_grad()
@pytest.mark.parametrize("name", ["igpt", "mp3"])
def test_drop_path_drops_attention_and_mlp_independently(build, tmp_path, batch, pictures, name):
    """The first of two blocks is never dropped, the second at the given rate."""
    words = (*WORDS, *PAPERS[name], "finetune.drop_path=0.4")
    objective, inference = build(tmp_path / "c.yaml", *words)
    images = batch if name == "igpt" else pictures
    embedding, first, second, head = inference.layers.modules
    start = embedding.train()(objective.training_sequence(images).inputs)
    middle = first.train()(start)
    for one, other in zip(middle, first.eval()(start), strict=True):
        torch.testing.assert_close(one, other)

    *_, samples = middle
    assert samples.tolist() == list(range(6))
    attention_context = second.core.attention_context(
        dict(zip(second.core.carried_names, middle[1:], strict=True))
    )
    draws = uniform(samples, 2, seed=0, purpose="drop-path-2")
    kept = (draws >= 0.4).float() / 0.6
    assert kept.unique().numel() == 2
    mixed, bias = second.self_attention(second.input_layernorm(middle[0]), attention_context)
    expected = middle[0] + kept[:, :1] * (mixed if bias is None else mixed + bias)
    mixed, bias = second.mlp(second.pre_mlp_layernorm(expected))
    expected = expected + kept[:, 1:] * (mixed if bias is None else mixed + bias)
    torch.testing.assert_close(second.train()(middle)[0], expected)
    # Evaluation drops nothing.
    assert torch.equal(
        inference.predictions(objective.inputs_from(images.inputs)),
        inference.predictions(objective.inputs_from(images.inputs, sample_index=samples + 99)),
    )


def test_unlabelled_images_add_nothing_to_the_loss(build, tmp_path, batch):
    objective, _ = build(tmp_path / "c.yaml", *WORDS)
    logits = torch.randn(2, 5)
    alone = objective.loss(logits[:1], (torch.tensor([3]),))
    both = objective.loss(logits, (torch.tensor([3, -1]),))
    assert float(both) == pytest.approx(float(alone) / 2)


@pytest.mark.parametrize("weight", [0, 1])
def test_class_head_starts_at_zero_and_keeps_other_names(build, tmp_path, weight):
    words = (*WORDS, f"finetune.generative_weight={weight}")
    with_classes, _ = build(tmp_path / "c.yaml", *words)
    without, _ = build(tmp_path / "c.yaml")
    head = with_classes.layer_plans()[-1].build()
    assert not any(p.any() for p in head.classifier.parameters())
    names = {name for name, _ in head.named_parameters()}
    plain = {name for name, _ in without.layer_plans()[-1].build().named_parameters()}
    new = {"classifier.linear.weight", "classifier.linear.bias"}
    assert names == (plain if weight else {"norm.weight"}) | new


@pytest.mark.parametrize(
    ("words", "deviation"),
    [
        (("finetune.linear_evaluation=true",), 0.01),
        (("finetune.linear_evaluation=true", "finetune.classifier_std=0.5"), 0.5),
        (("finetune.classifier_std=0.02",), 0.02),
    ],
)
def test_deviation_of_a_new_classifier(build, tmp_path, words, deviation):
    """0.01 in the linear probe of MAE's code, unless a key says otherwise."""
    sizes = ("model.hidden_size=64", "finetune.num_classes=40")
    objective, _ = build(tmp_path / "c.yaml", *WORDS, *sizes, *words)
    linear = objective.layer_plans()[-1].build().classifier.linear
    assert float(linear.weight.detach().std()) == pytest.approx(deviation, rel=0.1)
    assert not linear.bias.any()


def test_a_new_pooling_starts_like_that_of_aim(build, tmp_path):
    """`torch.nn.Linear` for keys and values, without biases, and a query of N(0, 0.02²)."""
    words = ("model.hidden_size=64", "finetune.read_out=attention")
    objective, _ = build(tmp_path / "c.yaml", *WORDS, *words)
    pool = objective.layer_plans()[-1].build().classifier.pool
    named = {name: each.detach() for name, each in pool.named_parameters()}
    assert set(named) == {"query", "key.weight", "value.weight"}
    for name in ("key.weight", "value.weight"):
        assert named[name].abs().max() <= 1 / 8
        assert float(named[name].std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.05)
    assert float(named["query"].std()) == pytest.approx(0.02, rel=0.3)


def test_layer_decay_scales_learning_rates(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml", *WORDS, "finetune.layer_decay=0.5")
    layers = [plan.build() for plan in objective.layer_plans()]
    scales = [
        {options_of(parameter).learning_rate_scale for parameter in layer.parameters()}
        for layer in layers
    ]
    assert scales == [{0.125}, {0.25}, {0.5}, {1.0}]


def test_layer_decay_is_independent_of_layer_names(build, tmp_path):
    objective, _ = build(tmp_path / "c.yaml", *WORDS, "finetune.layer_decay=0.5")
    plans = objective.backbone.layer_plans()
    renamed = [dataclasses.replace(plan, name=f"part{i}") for i, plan in enumerate(plans)]
    objective.backbone.layer_plans = lambda: renamed
    scales = [plan.options.learning_rate_scale for plan in objective.layer_plans()]
    assert scales == [0.125, 0.25, 0.5, 1.0]


def test_classification_does_not_modify_the_paper(build, tmp_path, batch):
    """Classification copies the paper as its backbone if it changes visibility."""
    words = (*WORDS, "finetune.visibility=full")
    objective, _ = build(tmp_path / "c.yaml", *words)
    plain = OBJECTIVES["igpt"](objective.config, objective.context)
    core, head, sequence = plain.core, plain.layer_plans()[-1].factory, plain.sequence(batch)
    on_top = Classification(plain)
    assert plain.core is core
    assert core.visibility_kind == "causal"
    assert on_top.backbone is not plain
    assert on_top.backbone.core.visibility_kind == "full"
    assert plain.layer_plans()[-1].factory == head
    again = plain.sequence(batch)
    assert all(map(torch.equal, again.inputs, sequence.inputs))
    kept = OBJECTIVES["igpt"](build(tmp_path / "c.yaml", *WORDS)[0].config, objective.context)
    assert Classification(kept).backbone is kept
