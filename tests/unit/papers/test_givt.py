"""GIVT's sequences, labels, masks and losses against plain loops and equations."""

import math
from dataclasses import replace

import pytest
import torch
from small_batches import run_layers
from tiny import tiny

from megavis.composition import encoded_tokens, model
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.data.loading.loader import Batch
from megavis.model.stack import LayerStack
from megavis.papers.givt.deviation_figure import applies, predicted_deviations
from megavis.tokenizers.patches import stack, to_grid, to_tokens, unstack

CONFIG = tiny(
    "{name: givt, latent_channels: 4, downsampling: 8, num_classes: 3, num_components: 2}",
    model={"normalization": "layer_norm"},
    data={"image_size": 32},
)


@pytest.fixture
def make(build_paper):
    """Build a tiny model."""
    return lambda *words: build_paper(CONFIG, *words, std=0.3)


def batch_of(count=6, label=1):
    generator = torch.Generator().manual_seed(1)
    moments = torch.rand(count, 2, 4, 4, 4, generator=generator).half()
    return Batch(moments, torch.full((count,), label), torch.arange(count))


def test_stacked_latents_have_the_released_layout():
    latents = torch.randn(2, 3, 4, 6)
    stacked = stack(latents, 2)
    for c in range(3):
        for p in range(2):
            torch.testing.assert_close(stacked[:, c * 2 + p], latents[:, c, :, p::2])
    torch.testing.assert_close(unstack(stacked, 2), latents)
    tokens = to_tokens(stacked)
    torch.testing.assert_close(tokens[:, 3 + 1], stacked[:, :, 1, 1])
    torch.testing.assert_close(to_grid(tokens, height=4), stacked)


def test_predicted_deviations_match_the_mixture(make):
    """Figure 7: √variance by component, weighted, over the numbers of each token."""
    objective, inference = make("objective.label_dropout=0.1")
    assert applies(objective)
    batch = batch_of(2)
    arguments = (batch.inputs, batch.sample_index)
    found = predicted_deviations(inference, objective, *arguments, batch.labels)
    inputs = objective.inputs_from(arguments[0], sample_index=arguments[1], labels=batch.labels)
    outputs = objective.outputs(inference.predictions(inputs))
    assert found.shape == outputs.shape[:2] == (2, 16)
    for token in (0, 7, 15):
        numbers = outputs[1, token].tolist()
        odds = [math.exp(value) for value in numbers[:2]]
        # Logits of two components, then four means and four scales of each.
        scales = [
            [(x + math.sqrt(x * x + 4)) / 2 for x in numbers[2 + 8 * k + 4 :][:4]] for k in (0, 1)
        ]
        expected = sum(o / sum(odds) * sum(s) / 4 for o, s in zip(odds, scales, strict=True))
        assert found[1, token].item() == pytest.approx(expected, rel=1e-4)
    none = predicted_deviations(inference, objective, *arguments, torch.full((2,), -1))
    assert not torch.allclose(found, none)


def test_latents_are_sampled_by_sample_index(make):
    objective, _ = make()
    batch = batch_of()
    first = objective.reads.of(batch.inputs, batch.sample_index)
    again = objective.reads.of(batch.inputs[2:], batch.sample_index[2:])
    torch.testing.assert_close(first[2:], again, rtol=0, atol=0)
    later = objective.reads.of(batch.inputs, batch.sample_index + 100)
    assert not torch.equal(first, later)
    mean, scale = batch.inputs.float().unbind(1)
    many = objective.reads.of(batch.inputs[:1].expand(20_000, -1, -1, -1, -1), torch.arange(20_000))
    torch.testing.assert_close(many.mean(0), mean[0], rtol=0, atol=0.04)
    torch.testing.assert_close(many.std(0), scale[0], rtol=0.04, atol=0.01)
    torch.testing.assert_close(objective.reads.of(batch.inputs, None), mean)


class FirstPixels:
    """A VAE stub: its latents are the first 64 values of an image, with zero deviation."""

    target_kind = None

    def to(self, device):
        return self

    def encode(self, images):
        means = images.flatten(1)[:, :64].float().view(-1, 4, 4, 4)
        return torch.stack([means, torch.zeros_like(means)], 1)


def test_pairs_split_into_inputs_and_targets(make):
    words = ["objective.encoder_layers=1", "objective.num_classes=0", "objective.tokenizer=vae"]
    objective, inference = make("objective.name=givt_encoder_decoder", *words)
    objective.reads.__dict__["tokenizer"] = FirstPixels()
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(256, (3, 2, 32, 32, 3), generator=generator, dtype=torch.uint8)
    none, index = torch.full((3,), -1), torch.arange(3)
    sequence = objective.sequence(Batch(pairs, none, index))
    tokens, *_, seen = sequence.inputs

    def rows_of(images):
        """Return the tokens of the latents, 16 positions of 4 channels, without the last."""
        latents = images.flatten(1)[:, :64].float().view(-1, 4, 16).transpose(1, 2)
        return latents[:, :-1]

    assert torch.equal(tokens, rows_of(pairs[:, 1]))
    torch.testing.assert_close(seen, pairs[:, 0] / 127.5 - 1.0)
    alone = objective.sequence(Batch(pairs[:, 0], none, index))
    assert torch.equal(alone.inputs[0], rows_of(pairs[:, 0]))
    assert torch.equal(alone.inputs[-1], seen)
    loss = objective.loss(inference.predictions(sequence.inputs), sequence.targets)
    assert bool(torch.isfinite(loss))
    assert objective.likelihood.given == "the image"


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("pairs", [], "holds images; name the VAE's run folder in objective.tokenizer"),
        (
            "ids",
            [],
            "holds ids shards without images, which the encoder of givt_encoder_decoder reads; give"
            " pairs or jpeg shards",
        ),
        ("pairs", ["objective.tokenizer=vae"], ""),
        ("jpeg", ["objective.tokenizer=vae"], ""),
    ],
)
def test_shard_kinds_of_the_encoder_decoder(make, kind, words, message):
    options = ["objective.encoder_layers=1", "objective.num_classes=0", *words]
    objective, _ = make("objective.name=givt_encoder_decoder", *options)
    manifest = Manifest.model_construct(kind=kind, class_names=())
    assert "".join(objective.check_data(manifest)) == message


@pytest.mark.parametrize(("words", "std"), [([], 1 / 4), (["objective.position_std=0.5"], 0.5)])
def test_scale_of_positions_in_encoder_and_decoder(build_paper, words, std):
    keys = ["objective.encoder_layers=1", "objective.encoder_patch_size=2", "data.image_size=64"]
    keys += ["objective.downsampling=4", "objective.num_classes=0", *words]
    model = ["objective.name=givt_encoder_decoder", "model.hidden_size=16"]
    objective, _ = build_paper(CONFIG, *model, *keys)
    first = next(iter(LayerStack(objective.layer_plans(), objective.loss).layers))
    tables = dict(first.named_parameters())
    for name in ("positions.weight", "encoder.positions.weight"):
        assert float(tables[name].detach().std()) == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize("words", [(), ("objective.adapter_blocks=2",)])
def test_predictions_depend_on_earlier_tokens_and_label(make, words):
    objective, inference = make(*words)
    tokens = torch.randn(1, 16, 4)
    plain = inference.predictions(objective.inputs_from(tokens, labels=torch.tensor([1])))
    changed = tokens.clone()
    changed[:, 5] += 1.0
    other = inference.predictions(objective.inputs_from(changed, labels=torch.tensor([1])))
    label = inference.predictions(objective.inputs_from(tokens, labels=torch.tensor([2])))
    first = [p if isinstance(p, torch.Tensor) else p[0] for p in (plain, other, label)]
    assert torch.equal(first[0][:, :6], first[1][:, :6])
    assert not torch.isclose(first[0][:, 6], first[1][:, 6]).all()
    assert not torch.isclose(first[0][:, 0], first[2][:, 0]).all()


def test_loss_is_the_mixture_nll(make):
    objective, inference = make()
    sequence = objective.sequence(batch_of())
    predictions = inference.predictions(sequence.inputs)
    loss = objective.loss(predictions, sequence.targets)
    (tokens,) = sequence.targets
    total = 0.0
    for image in range(len(tokens)):
        for place in range(16):
            numbers = predictions[image, place].double()
            weights, rest = numbers[:2].softmax(0), numbers[2:].view(2, 2, 4)
            density = 0.0
            for component in range(2):
                mean, raw = rest[component]
                scale = (raw + (raw.square() + 4).sqrt()) / 2
                normal = torch.distributions.Normal(mean, scale)
                log_prob = normal.log_prob(tokens[image, place].double()).sum()
                density += weights[component] * log_prob.exp()
            total -= math.log(density)
    assert loss.dtype == torch.float32
    assert math.isclose(float(loss), total / (6 * 16), rel_tol=1e-5)


def test_adapter_has_a_gradient(make):
    objective, inference = make("objective.adapter_blocks=2")
    assert objective.carries_gradient
    sequence = objective.sequence(batch_of())
    assert sequence.targets == ()
    state = run_layers(inference.layers.modules, sequence.inputs)
    # Detach the predictions, so that the adapter's gradient comes from the targets alone.
    loss = objective.loss((state[0].detach(), state[1]), ())
    loss.backward()
    adapter = inference.layers.modules[0].transform
    assert all(float(p.grad.abs().sum()) > 0 for p in adapter.parameters())


def test_label_dropout_rate(make):
    objective, _ = make("objective.label_dropout=0.25")
    index = torch.arange(20_000)
    batch = Batch(torch.empty(len(index)), torch.full((len(index),), 2), index)
    (rows,) = objective.condition.training(batch)
    assert set(rows.tolist()) == {2, 3}
    assert abs(float((rows == 3).float().mean()) - 0.25) < 0.01


def test_masked_tokens_are_hidden_and_scored(make):
    objective, inference = make("objective.name=givt_maskgit")
    tokens, mask = torch.randn(2, 16, 4), torch.zeros(2, 16, dtype=torch.bool)
    mask[:, 3:9] = True
    changed = torch.where(mask[..., None], 7.0, tokens)
    labels = torch.tensor([0, 2])
    plain, other = (
        inference.predictions(objective.inputs_from(t, labels=labels, mask=mask))
        for t in (tokens, changed)
    )
    assert torch.equal(plain, other)
    expected = -objective.density.distribution(plain).log_prob(tokens)[:, 3:9].mean()
    torch.testing.assert_close(objective.loss(plain, (tokens, mask)), expected)


STEP = "training.batch_size=6"


def third_step():
    """Return the third step of a run, whose images are 12 to 17 of the stream."""
    return replace(batch_of(), sample_index=torch.arange(12, 18))


def losses_by_token(objective, inference, batch):
    """Return the loss of each token of a training batch, and which of them are masked."""
    sequence = objective.training_sequence(batch)
    losses = objective.density.per_token_loss(
        inference.predictions(sequence.inputs), sequence.targets[0]
    )
    return losses, objective.schedule.draw(batch.sample_index).is_predicted


def test_all_masked_tokens_of_a_step_weigh_the_same(make):
    """ "The loss is normalized by the number of mask tokens" (appendix C.1); a loop over tokens."""
    objective, inference = make("objective.name=givt_maskgit", STEP)
    batch = third_step()
    losses, mask = losses_by_token(objective, inference, batch)
    assert len(set(mask.sum(1).tolist())) > 2, "the images differ in their masked tokens"
    total, count = 0.0, 0
    for image in range(6):
        for token in range(16):
            if mask[image, token]:
                total, count = total + float(losses[image, token]), count + 1
    sequence = objective.training_sequence(batch)
    loss = objective.loss(inference.predictions(sequence.inputs), sequence.targets)
    assert float(loss) == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("parts", [[3, 3], [2, 2, 2], [1, 1, 1, 1, 1, 1]])
def test_micro_batches_average_to_the_loss_of_their_step(make, parts):
    """The mean over micro-batches, and so over processes, is that of the step at once."""
    objective, inference = make("objective.name=givt_maskgit", STEP)
    batch, means = third_step(), []
    for part in torch.arange(6).split(parts):
        some = Batch(batch.inputs[part], batch.labels[part], batch.sample_index[part])
        sequence = objective.training_sequence(some)
        means.append(
            float(objective.loss(inference.predictions(sequence.inputs), sequence.targets))
        )
    losses, mask = losses_by_token(objective, inference, batch)
    assert sum(means) / len(means) == pytest.approx(float(losses[mask].mean()), rel=1e-6)


def test_evaluation_weighs_tokens_alike_whatever_the_batch(make):
    """It divides by the expected number of masked tokens, which no batch changes."""
    objective, inference = make("objective.name=givt_maskgit", STEP)
    expected = 0.0
    for k in range(16):  # E[count] = sum of P(count > k), with count = ceil(16 cos(pi u / 2)).
        expected += min(1.0, 2 / math.pi * math.acos(k / 16) / 0.7)
    counts = objective.schedule.draw(torch.arange(50_000)).is_predicted.sum(1).double()
    assert expected == pytest.approx(float(counts.mean()), rel=2e-3)
    batch = third_step()
    losses, mask = losses_by_token(objective, inference, batch)
    sequence = objective.sequence(batch)
    loss = objective.loss(inference.predictions(sequence.inputs), sequence.targets)
    assert float(loss) == pytest.approx(float(losses[mask].sum()) / 6 / expected, rel=1e-6)


def test_each_image_can_weigh_the_same(make):
    objective, inference = make(
        "objective.name=givt_maskgit", STEP, "objective.loss_average=images"
    )
    batch = third_step()
    losses, mask = losses_by_token(objective, inference, batch)
    means = [float(row[shown].mean()) for row, shown in zip(losses, mask, strict=True)]
    sequence = objective.training_sequence(batch)
    loss = objective.loss(inference.predictions(sequence.inputs), sequence.targets)
    assert float(loss) == pytest.approx(sum(means) / 6, rel=1e-6)


def test_mask_ratio_follows_the_cosine(make):
    objective, _ = make("objective.name=givt_maskgit", "objective.least_masking=0.3")
    mask = objective.schedule.draw(torch.arange(20_000)).is_predicted
    shares = mask.float().mean(1)
    assert shares.min() >= math.cos(math.pi / 2 * 0.7)
    # The mean of cos(π u / 2) over u in [0, 0.7], plus half a token for rounding up.
    mean = math.sin(math.pi / 2 * 0.7) / (math.pi / 2 * 0.7) + 0.5 / 16
    assert abs(float(shares.mean()) - mean) < 0.01
    assert float((mask.float().mean(0) - shares.mean()).abs().max()) < 0.02


@pytest.mark.parametrize(
    ("words", "label", "message"),
    [((), 3, "0..2 or -1"), (("objective.label_dropout=0.0",), -1, "0..2, without")],
)
def test_labels_out_of_range(make, words, label, message):
    objective, _ = make(*words)
    with pytest.raises(UserError, match=message):
        objective.inputs_from(torch.zeros(1, 16, 4), labels=torch.tensor([label]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("objective.covariance=full",), "use 1"),
        (
            ("objective.downsampling=5",),
            "objective.downsampling: 5 does not divide data.image_size 32",
        ),
        (("objective.stacked_latents=3",), "3 does not divide the 4 latents"),
        (("objective.adapter_blocks=1", "objective.latent_channels=3"), "channels are odd"),
        (
            ("objective.adapter_blocks=1", "objective.adapter_bottleneck=6"),
            "must be divisible by 2",
        ),
    ],
)
def test_invalid_sizes(make, words, message):
    with pytest.raises(UserError, match=message):
        make(*words)


def test_training_recovers_a_known_density(make):
    objective, inference = make(
        *["data.image_size=8", "objective.num_classes=0", "objective.latent_channels=2"],
        *["model.num_layers=1", "objective.num_components=3"],
    )
    weights = torch.distributions.Categorical(torch.tensor([0.3, 0.7]))
    means = torch.tensor([[-1.5, 0.5], [1.0, -0.5]])
    scales = torch.tensor([[0.3, 0.6], [0.5, 0.2]])
    components = torch.distributions.Independent(torch.distributions.Normal(means, scales), 1)
    truth = torch.distributions.MixtureSameFamily(weights, components)
    modules = torch.nn.ModuleList(inference.layers.modules)
    optimizer = torch.optim.Adam(modules.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)

    def nats_of(latents):
        inputs = objective.inputs_from(latents[..., None, None])
        predictions = run_layers(modules, inputs)
        return objective.loss(predictions, (latents[:, None],))

    for _ in range(200):
        optimizer.zero_grad()
        nats_of(truth.sample((512,))).backward()
        optimizer.step()
        schedule.step()
    held_out = truth.sample((20_000,))
    with torch.no_grad():
        divergence = nats_of(held_out) + truth.log_prob(held_out).mean()
    # The loss is the entropy plus the KL divergence from the true density, in nats.
    assert -0.005 < float(divergence) < 0.01


@pytest.mark.parametrize("words", [(), ("objective.adapter_blocks=1",)], ids=["plain", "adapter"])
def test_batch_is_tokenized_once(make, monkeypatch, words):
    """Inputs and targets share the tokens; with an adapter nothing is gathered."""
    objective, _ = make(*words)
    turned, gathered = [], []
    turn, take = encoded_tokens.to_tokens, model.gather_tokens
    monkeypatch.setattr(encoded_tokens, "to_tokens", lambda grid: turned.append(0) or turn(grid))
    monkeypatch.setattr(model, "gather_tokens", lambda *v: gathered.append(0) or take(*v))
    objective.sequence(objective.blank_batch(2, torch.device("cpu")))
    assert (len(turned), len(gathered)) == (1, 0 if words else 2)
