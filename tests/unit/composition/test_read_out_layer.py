"""Classifiers on any layer or several, against the network's features and scikit-learn."""

import numpy as np
import pytest
import torch
from class_logits import PATCHES, WORDS

from megavis.config.errors import UserError
from megavis.papers import build_objective

LAYERS = ("model.num_layers=3",)
PAPERS = {
    "igpt": (),
    "gvp": ("objective={name: gvp, patch_size: 2, num_groups: 2}", *PATCHES),
    "mae": ("objective={name: mae, patch_size: 2}", *PATCHES),
}
LINEAR = ("finetune.linear_evaluation=true", "finetune.standardize=false")


@pytest.fixture
def images():
    """Return a function that gives six images as ids or pixels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 32, (6, 16), generator=generator)
    pixels = torch.randint(0, 256, (6, 4, 4, 3), generator=generator).to(torch.uint8)
    return lambda name: ids if name == "igpt" else pixels


def features(objective, inference, inputs):
    """Return the features of all layers below the classifier, `[L + 1, b, h]`."""
    from megavis.model.inference import Inference
    from megavis.model.stack import LayerStack, LocalLayers

    plain = build_objective(
        objective.config.model_copy(update={"finetune": None}), inference.context
    )
    plans = plain.layer_plans()
    layers = LocalLayers(plans, list(LayerStack(plans, plain.loss).layers))
    saved = dict(inference.layers.named_parameters())
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if name in saved:
                parameter.copy_(saved[name])
    return Inference(layers, inference.context).features(plain.inputs_for_features(inputs, None))


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("name", list(PAPERS))
def test_classifier_reads_the_configured_layer(build, tmp_path, images, name, layer):
    words = (*WORDS, *LAYERS, *PAPERS[name], f"finetune.layer={layer}")
    objective, inference = build(tmp_path / "c.yaml", *words)
    inputs = images(name)
    got = inference.predictions(objective.inputs_from(inputs))

    linear = inference.layers.modules[-1].classifier.linear
    rows = features(objective, inference, inputs)[layer]
    expected = np.array(rows) @ linear.weight.detach().numpy().T + linear.bias.detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    names = {parameter.split(".")[0:2][-1] for parameter, _ in inference.layers.named_parameters()}
    assert str(layer + 1) not in names


def test_last_layer_is_the_default(build, tmp_path, images):
    words = (*WORDS, *LAYERS)
    named, inference = build(tmp_path / "c.yaml", *words, "finetune.layer=3")
    same, other = build(tmp_path / "c.yaml", *words)
    assert [n for n, _ in inference.layers.named_parameters()] == [
        n for n, _ in other.layers.named_parameters()
    ]
    inputs = images("igpt")
    assert torch.equal(
        inference.predictions(named.inputs_from(inputs)),
        other.predictions(same.inputs_from(inputs)),
    )
    assert named.flops_per_image() == same.flops_per_image()


def test_concatenated_layers(build, tmp_path, images):
    """iGPT, section 4.4: concatenate features of adjacent layers around the configured one."""
    words = (*WORDS, *LAYERS, *LINEAR, "finetune.layer=1", "finetune.concatenate=3")
    objective, inference = build(tmp_path / "c.yaml", *words)
    inputs = images("igpt")
    linear = inference.layers.modules[-1].classifier.linear
    rows = np.concatenate(list(features(objective, inference, inputs)[0:3]), axis=1)
    expected = rows @ linear.weight.detach().numpy().T + linear.bias.detach().numpy()
    for _ in range(2):  # the second pass must not reuse state of the first
        got = inference.predictions(objective.inputs_from(inputs))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_linear_evaluation_trains_only_the_classifier(build, tmp_path):
    _, inference = build(tmp_path / "c.yaml", *WORDS, *LAYERS, *LINEAR, "finetune.layer=2")
    learned = {name for name, p in inference.layers.named_parameters() if p.requires_grad}
    assert learned == {"blocks.2.classifier.linear.weight", "blocks.2.classifier.linear.bias"}


def test_linear_probe_converges_to_scikit_learn(build, tmp_path, images):
    """iGPT's probe (section 3.4): SGD reaches the loss of logistic regression."""
    from sklearn.linear_model import LogisticRegression

    from megavis.training.optimizer import build_optimizer, learning_rate

    words = ("optimizer.algorithm=sgd", "optimizer.weight_decay=0", "finetune.classifier_std=0")
    objective, inference = build(
        tmp_path / "c.yaml", *WORDS, *LAYERS, *LINEAR, *words, "finetune.layer=2"
    )
    inputs, labels = images("igpt"), torch.tensor([0, 1, 2, 0, 1, 0])
    # Equal images with different labels keep the optimum finite.
    inputs[4], inputs[5] = inputs[0], inputs[1]
    inputs[3] = inputs[2]
    sequence = objective.inputs_from(inputs)
    named = dict(inference.layers.named_parameters())
    with torch.no_grad():
        named["blocks.2.classifier.linear.weight"].zero_()
        named["blocks.2.classifier.linear.bias"].zero_()
    config = objective.config.optimizer.model_copy(update={"learning_rate": 1.0})
    optimizer = build_optimizer(named.values(), config)
    steps = 1500
    for step in range(steps):
        rate = learning_rate(step, peak=1.0, total_steps=steps, config=objective.config.schedule)
        for group in optimizer.param_groups:
            group["lr"] = rate
        state = sequence
        for layer in inference.layers.modules:
            state = layer(state)
        loss = objective.loss(state, (labels,))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rows = features(objective, inference, inputs)[2].numpy()
    model = LogisticRegression(C=1e6, max_iter=10_000).fit(rows, labels)
    shares = model.predict_log_proba(rows)[np.arange(6), labels]
    assert float(loss) == pytest.approx(-shares.mean(), abs=2e-3)


@pytest.mark.parametrize("name", list(PAPERS))
def test_block_features_are_means_of_block_outputs(build, tmp_path, images, name):
    """GIVT, appendix F: average a layer's output over the sequence, without a norm."""
    words = (*WORDS, *LAYERS, *LINEAR, *PAPERS[name], "model.features=blocks", "finetune.layer=2")
    objective, inference = build(tmp_path / "c.yaml", *words)
    inputs = objective.inputs_from(images(name))
    embedding, *blocks, head = inference.layers.modules
    with torch.no_grad():
        state, tokens = embedding(inputs), []
        for layer in (*blocks, None):
            tokens.append(state[0] if isinstance(state, tuple) else state)
            state = state if layer is None else layer(state)
        means = [sum(each.float()) / len(each) for each in tokens]
        normed = head.feature_norm(tokens[-1]).mean(0)
        logits = head.classifier.linear(means[-1])
    found = inference.features(inputs)
    torch.testing.assert_close(found, torch.stack(means), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[-1], normed, atol=1e-3)
    torch.testing.assert_close(inference.predictions(inputs), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("finetune.layer=4",), r"finetune\.layer: is 4; the model has layers 0 to 3"),
        (("finetune.layer=1", "finetune.generative_weight=1"), "drops blocks"),
        ((*LINEAR, "finetune.concatenate=2", "finetune.layer=1"), "have no middle"),
        ((*LINEAR, "finetune.concatenate=3"), "not within 0 to 3"),
        (
            ("finetune.concatenate=3", "finetune.layer=1"),
            "applies only to finetune.linear_evaluation",
        ),
        (("finetune.standardize=false",), "applies only to finetune.linear_evaluation"),
        (("model.features=blocks",), r"model\.features: blocks leaves out the last norm"),
        (("optimizer.algorithm=sgd",), "sgd is for finetune.linear_evaluation"),
        (
            ("finetune.layer=1", "parallel.pipeline_model_parallel_size=2"),
            "1 blocks below finetune.layer cannot fill 2",
        ),
    ],
)
def test_incompatible_keys_raise(build, tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        build(tmp_path / "c.yaml", *WORDS, *LAYERS, *words)


def attended(pool, tokens):
    """Return a learned query's attention to tokens `[s, h]` of an image, head by head."""
    query, count = pool.query.detach(), pool.num_heads
    keys, values = (tokens @ each.weight.detach().T for each in (pool.key, pool.value))
    size, pooled = len(query) // count, []
    for head in range(count):
        own = slice(head * size, (head + 1) * size)
        scores = [float(query[own] @ key[own]) / size**0.5 for key in keys]
        shares = [np.exp(score) for score in scores]
        values_of_head = zip(shares, values[:, own], strict=True)
        pooled.append(sum(share * value for share, value in values_of_head) / sum(shares))
    return torch.cat(pooled)


def token_features(inference, inputs, layers):
    """Return the mean of the tokens' features of some layers, `[b, s, h]`, without the head."""
    embedding, *blocks, head = inference.layers.modules
    with torch.no_grad():
        state, found = embedding(inputs), []
        for layer in (*blocks, head):
            hidden = state[0] if isinstance(state, tuple) else state
            by_norm = head.core.model.features == "norms"
            found.append(layer.feature_norm(hidden) if by_norm else hidden)
            state = state if layer is head else layer(state)
    head.classifier.below.clear()  # what the hooks have kept
    return (sum(found[layer] for layer in layers) / len(layers)).transpose(0, 1)


@pytest.mark.parametrize("name", ["igpt", "gvp"])
@pytest.mark.parametrize(
    ("words", "layers"),
    [
        (("finetune.read_out=attention",), (3,)),
        ((*LINEAR, "finetune.read_out=attention", "model.features=blocks"), (3,)),
        ((*LINEAR, "finetune.read_out=attention", "finetune.average=3"), (1, 2, 3)),
        ((*LINEAR, "finetune.average=2", "finetune.layer=2"), (1, 2)),
    ],
)
def test_attention_and_averages_against_loops(build, tmp_path, images, name, words, layers):
    objective, inference = build(tmp_path / "c.yaml", *WORDS, *LAYERS, *PAPERS[name], *words)
    inputs = objective.inputs_from(images(name))
    classifier = inference.layers.modules[-1].classifier
    for _ in range(2):  # the second pass must not reuse state of the first
        logits = inference.predictions(inputs)
        pooled = [
            tokens.mean(0) if classifier.pool is None else attended(classifier.pool, tokens)
            for tokens in token_features(inference, inputs, layers)
        ]
        expected = classifier.linear(torch.stack(pooled))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_attentive_probe_standardises_all_tokens_of_the_batch(build, tmp_path, images):
    """Batch norm without gain and bias over tokens and images; running values in evaluation."""
    words = ("finetune.linear_evaluation=true", "finetune.read_out=attention")
    objective, inference = build(tmp_path / "c.yaml", *WORDS, *LAYERS, *words)
    inputs, classifier = objective.inputs_from(images("igpt")), inference.layers.modules[-1]
    tokens, pool = token_features(inference, inputs, (3,)), classifier.classifier.pool
    rows = tokens.flatten(0, 1)
    state = inputs
    for layer in inference.layers.modules:
        state = layer.train()(state)
    normed = (tokens - rows.mean(0)) / (rows.var(0, unbiased=False) + 1e-6).sqrt()
    pooled = torch.stack([attended(pool, each) for each in normed])
    expected = classifier.classifier.linear(pooled)
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)
    learned = {name for name, p in inference.layers.named_parameters() if p.requires_grad}
    assert learned == {
        f"head.classifier.{name}"
        for name in ("pool.query", "pool.key.weight", "pool.value.weight")
        + ("linear.weight", "linear.bias")
    }
    mean, variance = 0.1 * rows.mean(0), 0.9 + 0.1 * rows.var(0)
    normed = (tokens - mean) / (variance + 1e-6).sqrt()
    pooled = torch.stack([attended(pool, each) for each in normed])
    torch.testing.assert_close(
        inference.predictions(inputs), classifier.classifier.linear(pooled), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("finetune.average=2",), "applies only to finetune.linear_evaluation"),
        ((*LINEAR, "finetune.average=5"), "5 layers up to layer 3 are not within 0 to 3; use at"),
        (
            (*LINEAR, "finetune.average=2", "finetune.concatenate=3", "finetune.layer=1"),
            "averages layers that finetune.concatenate puts side by side",
        ),
    ],
)
def test_averages_are_checked(build, tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        build(tmp_path / "c.yaml", *WORDS, *LAYERS, *words)
