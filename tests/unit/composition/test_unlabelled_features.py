"""Features and class logits of class-conditional models do not depend on the label."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from tiny import tiny

from megavis.config.errors import UserError
from megavis.config.papers import PAPER_CONFIGS
from megavis.data.loading.loader import Batch

NUM_CLASSES = 10
KEYS = f"latent_channels: 4, downsampling: 8, num_classes: {NUM_CLASSES}, num_components: 2"
IDS = f"patch_size: 8, vocabulary_size: 32, num_classes: {NUM_CLASSES}"
OBJECTIVES = {
    "causal": f"{{name: givt, {KEYS}}}",
    "adapter": f"{{name: givt, {KEYS}, adapter_blocks: 2}}",
    "masked": f"{{name: givt_maskgit, {KEYS}}}",
    "encoder_decoder": f"{{name: givt_encoder_decoder, {KEYS}, encoder_layers: 1}}",
    "annealed": f"{{name: rar, {IDS}}}",
    "instructed": f"{{name: randar, {IDS}}}",
    "hidden": f"{{name: mar, latent_channels: 4, downsampling: 8, num_classes: {NUM_CLASSES},"
    " class_rows: 2, decoder: {num_layers: 1, hidden_size: 8, num_attention_heads: 2}}",
}
OF_IDS = ("annealed", "instructed")
FINETUNE = (
    f"finetune={{num_classes: {NUM_CLASSES}}}",
    "data.validation=shards/validation",
    "training.validate_every=1",
)


class FirstPixels:
    """A VAE whose latents are the first values of an image."""

    target_kind = None

    def to(self, device):
        return self

    def encode(self, images):
        means = images.flatten(1)[:, :64].float().view(-1, 4, 4, 4) / 255
        return torch.stack([means, torch.full_like(means, 0.1)], 1)


@pytest.fixture
def make(build_paper):
    """Build a small class-conditional model."""

    def make(name, *words):
        text = tiny(
            OBJECTIVES[name], model={"normalization": "layer_norm"}, data={"image_size": 32}
        )
        objective, inference = build_paper(text, *words, std=0.3)
        paper = objective.backbone
        paper.reads.__dict__["tokenizer"] = FirstPixels()
        return objective, inference

    return make


def random_batch(name, count, seed=0):
    """Return random latents or ids, or images for an encoder, with random labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    if name == "encoder_decoder":
        shape = (count, 32, 32, 3)
        inputs = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    elif name in OF_IDS:
        inputs = torch.randint(32, (count, 16), generator=generator)
    else:
        inputs = torch.rand(count, 2, 4, 4, 4, generator=generator).half()
    return Batch(inputs, labels, torch.arange(count))


def test_all_class_conditional_papers_are_covered():
    wanted = {name for name, keys in PAPER_CONFIGS.items() if "num_classes" in keys.model_fields}
    assert wanted == {text.split(",")[0].removeprefix("{name: ") for text in OBJECTIVES.values()}


def tokenized(name):
    return ("objective.tokenizer=vae",) if name == "encoder_decoder" else ()


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_features_do_not_leak_labels(make, name):
    objective, inference = make(name, *tokenized(name))
    batch = random_batch(name, 600)
    layers = inference.features(objective.backbone.feature_inputs(batch)).numpy()
    train, test = slice(0, 400), slice(400, 600)
    for features in layers:
        features = (features - features.mean(0)) / features.std(0).clip(1e-6)
        probe = LogisticRegression(max_iter=300).fit(features[train], batch.labels[train])
        # Chance for ten classes plus four standard deviations over 200 guesses.
        assert probe.score(features[test], batch.labels[test]) < 0.1 + 4 * (0.09 / 200) ** 0.5


@pytest.mark.parametrize("words", [(), FINETUNE, (*FINETUNE, "finetune.generative_weight=1")])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_features_and_logits_are_independent_of_labels(make, name, words):
    if name == "hidden" and len(words) > len(FINETUNE):
        # An encoder hides tokens for the paper's own loss, and sees all for classes.
        with pytest.raises(UserError, match=r"finetune\.generative_weight.*set it to 0"):
            make(name, *words)
        return
    objective, inference = make(name, *tokenized(name), *words)
    batch = random_batch(name, 6)
    other = Batch(batch.inputs, batch.labels.roll(1), batch.sample_index)
    assert not torch.equal(batch.labels, other.labels)
    features = [
        inference.features(objective.backbone.feature_inputs(each)) for each in (batch, other)
    ]
    assert torch.equal(*features)
    if not words:
        return
    logits = [
        objective.outputs(inference.predictions(sequence(each).inputs))
        for sequence in (objective.sequence, objective.training_sequence)
        for each in (batch, other)
    ]
    assert all(torch.equal(logits[0], each) for each in logits[1:])
    assert logits[0].std(0).min() > 0, "logits must depend on the image"


@pytest.mark.parametrize("name", ["causal", "masked"])
def test_features_use_the_null_label_and_no_mask(make, name):
    objective, _ = make(name)
    tokens, _, third, rows = objective.backbone.feature_inputs(random_batch(name, 5))
    assert tokens.shape == (5, 15 if name == "causal" else 16, 4)
    assert rows.tolist() == [objective.condition.null_row] * 5
    assert objective.condition.null_row == objective.condition.num_rows - 1
    assert name == "causal" or not third.any()


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_missing_null_label_raises(make, name):
    words = (*tokenized(name), "objective.label_dropout=0")
    objective, _ = make(name, *words)
    with pytest.raises(UserError, match=r"objective\.label_dropout is 0"):
        objective.backbone.feature_inputs(random_batch(name, 2))
    for more in (FINETUNE, (*FINETUNE[1:], "evaluation={what: [probe]}")):
        with pytest.raises(UserError, match=r"objective\.label_dropout: is 0"):
            make(name, *words, *more)
    if name in (*OF_IDS, "hidden"):  # They always have classes.
        return
    # An unconditional model needs no null label.
    objective, _ = make(name, *words, "objective.num_classes=0")
    labelled = random_batch(name, 3)
    other = Batch(labelled.inputs, labelled.labels.roll(1), labelled.sample_index)
    inputs = [objective.backbone.feature_inputs(batch) for batch in (labelled, other)]
    assert all(torch.equal(*pair) for pair in zip(*inputs, strict=True))
