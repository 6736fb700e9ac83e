"""The denoiser of "Autoregressive Image Generation without Vector Quantization" in plain torch.

The references are the equations as loops over steps in float64 or float32: the modulated MLP, the
loss with a learned variance, and a step of the reverse process.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from compositions import CLASSES, CONTENT, INSTRUCT, LATENTS, MASK, ONE_BY_ONE, RANDOM, config
from small_batches import batch_of

from megavis.config.errors import UserError
from megavis.densities.diffusion import DiffusionOptions, with_gamma
from megavis.densities.noise_levels import CosineNoise
from megavis.sampling.sampler import Sampler, settings_of
from megavis.training.optimizer import decays

pytestmark = pytest.mark.once
CPU = torch.device("cpu")
STEPS, DEPTH, WIDTH, VALUES = 50, 2, 24, 4
LEARNED = "learns_variance: true"
RELEASED = "1e-12"
"""A `least_signal` below every γ of a schedule, as in the released code."""
MASKED = "schedule: {kind: masked, mask_ratio: 0.5}"
BRIDGE = "asks: {kind: visible, decoder: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}}"
CONTEXT = "schedule: {kind: context, mask_ratio: 0.5}"


def density(*words, decoder="modulated_mlp", predicts="noise", wide=True):
    more = [f"decoder_width: {WIDTH}"] * wide + list(words)
    extra = "".join(f", {word}" for word in more)
    return (
        f"density: {{kind: diffusion, decoder: {decoder}, decoder_layers: {DEPTH}, noise: cosine,"
        f" noise_steps: {STEPS}, sampling_steps: 5, least_signal: {RELEASED}, predicts:"
        f" {predicts}{extra}}}"
    )


@pytest.fixture
def build(build_paper):
    def composed(*words, more=()):
        return build_paper(config(f"{{name: compose, {', '.join(words)}}}"), *more, std=0.3)

    return composed


def latents(count=2, seed=0):
    return torch.randn(count, 4, 4, 4, generator=torch.Generator().manual_seed(seed))


def normals(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def products(count):
    """Return γ of each step in Python floats: products of 1 - β of the cosine schedule."""

    def power(time):
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    found, product = [], 1.0
    for step in range(count):
        beta = min(1 - power((step + 1) / count) / power(step / count), 0.999)
        product *= 1 - beta
        found.append(product)
    return found


# The schedule of the noise.


@pytest.mark.parametrize("count", [2, 50, 1000])
def test_cosine_schedule(count):
    levels, expected = CosineNoise(count, CPU), products(count)
    found = levels.from_uniform(torch.arange(count) / count + 0.5 / count)
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=1e-5, atol=0)
    assert levels.times(found).tolist() == [*range(count)]
    assert levels.times(torch.tensor([1.0, 0.0])).tolist() == [0, count - 1]
    between = levels.times((found[:-1] + found[1:]) / 2)
    assert ((between > torch.arange(count - 1)) & (between < torch.arange(1, count))).all()
    assert levels.from_uniform(torch.tensor([1 - 2.0**-24])) == found[-1]
    before = [1.0, *expected[:-1]]
    for step in range(count):
        alpha = expected[step] / before[step]
        mean = math.sqrt(before[step]) * (1 - alpha) / (1 - expected[step])
        other = max(step, 1)
        small = (1 - expected[other] / before[other]) * (1 - before[other]) / (1 - expected[other])
        assert levels.of_clean[step] == pytest.approx(mean, rel=1e-5)
        assert levels.log_small[step] == pytest.approx(math.log(small), rel=1e-5)
        assert levels.log_large[step] == pytest.approx(math.log(1 - alpha), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kept", [1, 2, 7, 100, 250, 1000])
def test_respacing_keeps_evenly_spaced_steps(kept):
    levels = CosineNoise(1000, CPU)
    steps, place = [], 0.0
    for _ in range(kept):
        steps.append(round(place))
        place += 999 / max(1, kept - 1)
    steps = [999] if kept == 1 else steps
    expected = [*(products(1000)[step] for step in reversed(steps)), 1.0]
    found = levels.schedule(kept)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert levels.times(found[:-1].float()).tolist() == [*reversed(steps)]


# The network.


def weights_of(inference):
    return {
        name.removeprefix("head."): value.detach()
        for name, value in inference.layers.named_parameters()
        if name.startswith("head.")
    }


def modulated(weights, output, noisy, step):
    """Return what the released network makes of one row: `output` `[h]`, `noisy` `[d]`."""

    def linear(x, name):
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    waves = [step * 10_000 ** (-i / 128) for i in range(128)]
    waves = torch.tensor([*map(math.cos, waves), *map(math.sin, waves)])
    level = linear(F.silu(linear(waves, "decoder.level.inner")), "decoder.level.outer")
    vector = F.silu(level + linear(output, "entry"))
    hidden = linear(noisy, "noisy")
    for i in range(DEPTH):
        name = f"decoder.layers.{i}"
        shift, scale, gate = linear(vector, f"{name}.modulation").split(WIDTH)
        own = weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"]
        x = F.layer_norm(hidden, (WIDTH,), *own, 1e-6) * (1 + scale) + shift
        hidden = hidden + gate * linear(F.silu(linear(x, f"{name}.inner")), f"{name}.outer")
    shift, scale = linear(vector, "decoder.modulation").split(WIDTH)
    return linear(F.layer_norm(hidden, (WIDTH,), eps=1e-6) * (1 + scale) + shift, "decoder.linear")


def test_network_equals_its_equations(build):
    objective, inference = build(LATENTS, ONE_BY_ONE, CONTENT, density(LEARNED))
    head, weights = inference.layers.modules[-1], weights_of(inference)
    levels, steps = CosineNoise(STEPS, CPU), torch.tensor([[0, 7, STEPS - 1], [3, 3, 20]])
    output, noisy = normals(2, 3, 16), normals(2, 3, VALUES, seed=1)
    gamma = levels.from_uniform((steps + 0.5) / STEPS)
    with torch.no_grad():
        found = head.decode(head.entry(output), with_gamma(noisy, gamma[..., None]))
    expected = [
        [modulated(weights, output[b, s], noisy[b, s], int(steps[b, s])) for s in range(3)]
        for b in range(2)
    ]
    torch.testing.assert_close(
        found, torch.stack([torch.stack(row) for row in expected]), rtol=1e-4, atol=1e-4
    )
    assert objective.density.num_outputs == 2 * VALUES


def test_initial_weights_predict_zero_and_do_not_decay(build):
    words = density(LEARNED, "decoder_positions: learned")
    objective, _ = build(LATENTS, ONE_BY_ONE, CONTENT, words)
    torch.manual_seed(0)
    head = objective.density.build_head()
    noisy = with_gamma(normals(2, 3, VALUES), torch.full((2, 3, 1), 0.5))
    assert not head.decode(head.entry(normals(2, 3, 16)), noisy).any()
    zero = set()
    for name, value in head.named_parameters():
        if not name.startswith("norm."):
            assert not decays(value), name
        if value.ndim == 2 and not value.any():
            zero.add(name)
    layers = {f"decoder.layers.{i}.modulation.weight" for i in range(DEPTH)}
    assert zero == layers | {"decoder.modulation.weight", "decoder.linear.weight"}
    assert head.decoder.level.inner.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    "words",
    [
        [LATENTS, ONE_BY_ONE, CONTENT],
        [LATENTS, RANDOM, INSTRUCT],
        [LATENTS, MASKED, MASK, CLASSES],
        [LATENTS, CONTEXT, BRIDGE],
    ],
)
def test_each_row_reads_the_position_of_its_token(build, words):
    """The position's table at the row's place, whatever the order; a start token has none."""
    objective, inference = build(*words, density("decoder_positions: learned"))
    sequence = objective.sequence(batch_of(latents()))
    head = inference.layers.modules[-1]
    seen = []
    hook = head.entry.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    inference.predictions(sequence.inputs)
    table = head.positions.weight.detach().clone()
    with torch.no_grad():
        head.positions.weight.zero_()
    inference.predictions(sequence.inputs)
    hook.remove()
    added = (seen[0] - seen[1])[:, head.num_skipped :]
    plan = objective.schedule.draw(torch.arange(2))
    order = plan.order.expand(2, -1)
    if not objective.asks.permutes:
        order = torch.arange(16).expand(2, -1)
    expected = table[order]
    if CONTENT in words:  # Rows with their own place, after one without.
        expected = F.pad(expected[:, :-1], (0, 0, 1, 0))
    # A bridge's head reads the last of the rows.
    torch.testing.assert_close(added, expected[:, -added.shape[1] :], rtol=1e-4, atol=1e-5)


# The loss.


def gaussian_mass(value, mean, deviation):
    """Return the mass of a value's bin by the tanh approximation."""

    def below(x):
        return 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    upper = below((value - mean + 1 / 255) / deviation)
    lower = below((value - mean - 1 / 255) / deviation)
    if value < -0.999:
        return max(upper, 1e-12)
    return max(1 - lower if value > 0.999 else upper - lower, 1e-12)


def expected_loss(prediction, clean, noise, step, predicts):
    """Return mean squared error and variational bound of one token, from lists of floats."""
    gammas = products(STEPS)
    gamma, before = gammas[step], gammas[step - 1] if step else 1.0
    beta = 1 - gamma / before
    other = max(step, 1)
    beta_other = 1 - gammas[other] / gammas[other - 1]
    small = beta_other * (1 - gammas[other - 1]) / (1 - gammas[other])
    mse = bound = 0.0
    for value in range(VALUES):
        guess, v = prediction[value], (prediction[VALUES + value] + 1) / 2
        noisy = math.sqrt(gamma) * clean[value] + math.sqrt(1 - gamma) * noise[value]
        mse += (guess - (noise if predicts == "noise" else clean)[value]) ** 2
        if predicts == "noise":
            guess = (noisy - math.sqrt(1 - gamma) * guess) / math.sqrt(gamma)
        log_scale = v * math.log(beta) + (1 - v) * math.log(small)
        of_clean = math.sqrt(before) * beta / (1 - gamma)
        of_noisy = math.sqrt(1 - beta) * (1 - before) / (1 - gamma)
        true = of_clean * clean[value] + of_noisy * noisy
        mean = of_clean * guess + of_noisy * noisy
        if step == 0:
            bound -= math.log2(gaussian_mass(clean[value], mean, math.exp(log_scale / 2)))
        else:
            ratio = math.log(small) - log_scale
            kl = math.exp(ratio) - ratio - 1 + (true - mean) ** 2 / math.exp(log_scale)
            bound += kl / 2 / math.log(2)
    return mse / VALUES, bound / VALUES


@pytest.mark.parametrize("predicts", ["noise", "clean"])
def test_loss_equals_its_equations(build, predicts):
    objective, _ = build(LATENTS, ONE_BY_ONE, CONTENT, density(LEARNED, predicts=predicts))
    steps = torch.tensor([[0, 0, 1, 2], [10, 25, 48, 49]])
    gamma = CosineNoise(STEPS, CPU).from_uniform((steps + 0.5) / STEPS)[..., None]
    clean, noise = normals(2, 4, VALUES), normals(2, 4, VALUES, seed=1)
    clean[0, 0] = torch.tensor([-1.2, 1.1, 0.1, -0.3])
    offset = 0.1 * normals(2, 4, VALUES, seed=2)
    # Near the truth: far from it the bin of the last step has no mass.
    guess = (noise if predicts == "noise" else clean) + offset * (1 - gamma).sqrt()
    spread = normals(2, 4, VALUES, seed=3)
    prediction = torch.cat([guess, spread], dim=-1).requires_grad_()
    target = torch.cat([clean, noise, gamma], dim=-1)
    found = objective.density.per_token_loss(prediction, target)
    for image in range(2):
        for token in range(4):
            parts = (prediction[image, token], clean[image, token], noise[image, token])
            lists = (part.double().tolist() for part in parts)
            mse, bound = expected_loss(*lists, int(steps[image, token]), predicts)
            assert found[image, token].item() == pytest.approx(mse + bound, rel=2e-4)
    # The variance alone learns from the bound.
    found.sum().backward()
    wanted = 2 * (guess - (noise if predicts == "noise" else clean)) / VALUES
    torch.testing.assert_close(prediction.grad[..., :VALUES], wanted)
    assert prediction.grad[..., VALUES:].any()


def test_loss_of_bf16_predictions_is_float32(build):
    objective, _ = build(LATENTS, ONE_BY_ONE, CONTENT, density(LEARNED))
    (target,) = objective.sequence(batch_of(latents())).targets
    prediction = normals(2, 16, 2 * VALUES).bfloat16()
    found = objective.density.per_token_loss(prediction, target)
    assert found.dtype == torch.float32
    assert torch.equal(found, objective.density.per_token_loss(prediction.float(), target))


@pytest.mark.parametrize(
    "words",
    [
        density(LEARNED),
        density(decoder="mlp"),
        density(decoder="transformer", wide=False, predicts="clean"),
        "density: {kind: diffusion, noise_a: 1, decoder: linear, condition_on_gamma: true}",
    ],
)
def test_several_noises_are_the_mean_of_single_ones(build, words):
    """Four noises of a token, against four passes with one of them each."""
    many, inference = build(LATENTS, ONE_BY_ONE, CONTENT, words[:-1] + ", noises_per_token: 4}")
    one, single = build(LATENTS, ONE_BY_ONE, CONTENT, words)
    loaded = dict(inference.layers.named_parameters())
    for name, value in single.layers.named_parameters():
        value.data.copy_(loaded[name])
    sequence = many.sequence(batch_of(latents()))
    found = many.density.per_token_loss(inference.predictions(sequence.inputs), sequence.targets[0])
    losses = []
    for noisy, target in zip(
        sequence.inputs[-1].chunk(4, -1), sequence.targets[0].chunk(4, -1), strict=True
    ):
        made = single.predictions((*sequence.inputs[:-1], noisy))
        losses.append(one.density.per_token_loss(made, target))
    torch.testing.assert_close(found, torch.stack(losses).mean(0), rtol=1e-4, atol=1e-5)
    plain = one.sequence(batch_of(latents()))
    assert torch.equal(sequence.inputs[-1].chunk(4, -1)[0], plain.inputs[-1])
    assert len({float(loss.sum()) for loss in losses}) == 4


def test_known_tokens_have_no_gradient(build):
    words = [LATENTS, MASKED, MASK, CLASSES]
    objective, inference = build(*words, density(LEARNED, "noises_per_token: 2"))
    sequence = objective.sequence(batch_of(latents()))
    predictions = inference.predictions(sequence.inputs).clone().requires_grad_()
    objective.loss(predictions, sequence.targets).backward()
    predicted = sequence.targets[1].bool()
    assert 0 < predicted.sum() < predicted.numel()
    assert predictions.grad[predicted].any(-1).all()
    assert not predictions.grad[~predicted].any()


@pytest.mark.parametrize("decoder", ["linear", "mlp", "transformer", "modulated_mlp"])
def test_every_decoder_denoises_above_a_bridge(build, decoder):
    """Each noisy token reaches the row that predicts it, and no other."""
    words = density(decoder=decoder, wide=decoder == "mlp", predicts="clean")
    objective, inference = build(LATENTS, CONTEXT, BRIDGE, words)
    sequence = objective.sequence(batch_of(latents()))
    before = inference.predictions(sequence.inputs)
    assert before.shape == sequence.targets[0].shape
    *rows, noisy = sequence.inputs
    noisy = noisy.clone()
    noisy[1, 3, :VALUES] += 1
    changed = (inference.predictions((*rows, noisy)) != before).any(-1)
    assert changed.nonzero().tolist() == [[1, 3]]


# Generation.


def sampled(weights, outputs, spare, draws, *, guidance, temperature, kept):
    """Return a token `[d]` by the reverse process as loops; `spare` is the row without a class."""
    gammas = products(STEPS)
    steps = [round(i * (STEPS - 1) / (kept - 1)) for i in range(kept)]
    noisy = draws[0]
    for count, index in enumerate(reversed(range(kept)), 1):
        step = steps[index]
        gamma, before = gammas[step], gammas[steps[index - 1]] if index else 1.0
        made = modulated(weights, outputs, noisy, step)
        noise, spread = made.split(VALUES)
        free = modulated(weights, spare, noisy, step)[:VALUES]
        noise = free + (1 + guidance) * (noise - free)
        clean = (noisy - math.sqrt(1 - gamma) * noise) / math.sqrt(gamma)
        beta = 1 - gamma / before
        mean = math.sqrt(before) * beta / (1 - gamma) * clean
        mean = mean + math.sqrt(1 - beta) * (1 - before) / (1 - gamma) * noisy
        noisy = mean
        if index:
            small = beta * (1 - before) / (1 - gamma)
            v = (spread + 1) / 2
            log_scale = v * math.log(beta) + (1 - v) * math.log(small)
            noisy = mean + temperature * torch.exp(log_scale / 2) * draws[count]
    return noisy


class FixedDraws:
    """Draws of one step for two images and two tokens, from a list."""

    keys = torch.zeros(2, 2, dtype=torch.int64)

    def __init__(self, share_known):
        self.share_known = share_known
        self.values = normals(6, 4, VALUES, seed=9)

    def normal(self, purpose, count):
        return self.values[int(purpose.removeprefix("step/"))]


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        ({}, 0.0),
        ({"temperature": 0.5}, 0.0),
        ({"guidance": 1.5}, 1.5),
        ({"guidance": 1.5, "guidance_schedule": "constant"}, 1.5),
        ({"guidance": 2.0, "guidance_schedule": "linear"}, 0.5),
    ],
)
def test_generation_equals_its_equations(build, options, weight):
    objective, inference = build(LATENTS, ONE_BY_ONE, CONTENT, density(LEARNED), CLASSES)
    weights, head = weights_of(inference), inference.layers.modules[-1]
    sampler = objective.density.token_sampler(DiffusionOptions(**options), scored=False)
    draws, lanes = FixedDraws(share_known=0.25), 2 if weight else 1
    assert sampler.num_lanes == lanes
    hidden = normals(5, 2 * lanes, 16, seed=4)  # Two rows more than are asked for.
    names = objective.core.carried_names
    state = (hidden, *(torch.zeros(1, dtype=torch.int32) for _ in names)) if names else hidden
    with torch.no_grad():
        found = sampler(head, state, draws).tokens
        outputs = head.norm.own(head.normed(state))[:, -2:]
    for image in range(2):
        for token in range(2):
            expected = sampled(
                weights,
                outputs[image, token],
                outputs[image + 2 * (lanes - 1), token],
                draws.values[:, 2 * image + token],
                guidance=weight,
                temperature=options.get("temperature", 1.0),
                kept=5,
            )
            torch.testing.assert_close(found[image, token], expected, rtol=1e-3, atol=1e-3)


def test_instructed_rows_train_and_sample_with_this_density(build, tmp_path):
    """RandAR's rows with MAR's density on latents, several tokens at once, with guidance."""
    words = [density(LEARNED, "noises_per_token: 4", "decoder_positions: learned"), CLASSES]
    objective, inference = build(LATENTS, RANDOM, INSTRUCT, *words)
    options = {"rounds": 4, "guidance": 1.0, "guidance_schedule": "linear", "sampling_steps": 3}
    sampler = Sampler(inference, objective, tmp_path, options)
    chosen = {"conditions": {"labels": torch.tensor([0, 2])}}
    tokens, uncached = (
        sampler.tokens(torch.arange(2), cached=each, **chosen) for each in (True, False)
    )
    assert tokens.shape == (2, 16, VALUES)
    torch.testing.assert_close(tokens, uncached, rtol=1e-2, atol=1e-3)
    sequence = objective.training_sequence(batch_of(latents()))
    rows = inference.layers.modules
    optimizer = torch.optim.Adam([p for each in rows for p in each.parameters()], lr=1e-2)
    losses = []
    for _ in range(12):
        state = sequence.inputs
        for layer in rows:
            state = layer(state)
        loss = objective.loss(state, sequence.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance": -1.0}, "guidance must be 0 or more"),
        (
            {"guidance": 1.0, "guidance_schedule": "cosine"},
            "must be constant or linear, not cosine",
        ),
        ({"guidance_schedule": "linear"}, "needs a guidance above 0"),
        ({"sampling_steps": STEPS + 1}, "must be at most 50"),
    ],
)
def test_options_out_of_range(build, options, message):
    objective, _ = build(LATENTS, ONE_BY_ONE, CONTENT, density(), CLASSES)
    with pytest.raises(UserError, match=message):
        settings_of(objective, options)


def test_operations_by_hand(build):
    """Sixteen rows with three noises each; the last matrix and all before it."""
    objective, _ = build(LATENTS, ONE_BY_ONE, CONTENT, density(LEARNED, "noises_per_token: 3"))
    plain, _ = build(LATENTS, ONE_BY_ONE, CONTENT, "density: {kind: squared_error}")
    layers = DEPTH * (2 + 3) * WIDTH**2 + 2 * WIDTH**2
    level = 256 * WIDTH + WIDTH**2
    token = VALUES * WIDTH + level + layers + WIDTH * 2 * VALUES
    expected = 2 * 16 * (16 * WIDTH + 3 * token)
    found = objective.flops_per_image() - plain.flops_per_image()
    assert found == 3 * (expected - 2 * 16 * 16 * VALUES)
