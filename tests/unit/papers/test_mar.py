"""MAR against the equations of its released code in plain torch, on the same random weights.

No package ships the model, so it is written here from its equations, image by image.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from released_tensors import copy_named
from small_batches import run_layers
from tiny import VIT, tiny

from megavis.config.errors import UserError
from megavis.data.loading.loader import Batch
from megavis.densities.density import SamplingKeys
from megavis.model.attention import join_heads
from megavis.sampling.sampler import Sampler

pytestmark = pytest.mark.once

WIDTH, HEADS, LAYERS = 32, 4, 2
UPPER, UPPER_HEADS = 16, 2
CHANNELS, TOKENS, CLASSES, BUFFER = 3, 16, 5, 4
MLP, MLP_LAYERS, FREQUENCIES, STEPS = 24, 2, 256, 1000
CONFIG = tiny(
    f"{{name: mar, latent_channels: {CHANNELS}, downsampling: 4, num_classes: {CLASSES},"
    f" class_rows: {BUFFER}, denoiser_layers: {MLP_LAYERS}, denoiser_width: {MLP},"
    f" decoder: {{num_layers: {LAYERS}, hidden_size: {UPPER},"
    f" num_attention_heads: {UPPER_HEADS}}}}}",
    model={**VIT, "num_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS},
)


@pytest.fixture
def make(build_paper):
    """Build a model of sixteen latents."""
    return lambda *words: build_paper(CONFIG, *words, std=0.2)


# The released code, from its equations.


def linear(name, inputs, outputs):
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def block(name, width):
    return {
        **norm(f"{name}.norm1", width),
        **linear(f"{name}.attn.qkv", width, 3 * width),
        **linear(f"{name}.attn.proj", width, width),
        **norm(f"{name}.norm2", width),
        **linear(f"{name}.mlp.fc1", width, 4 * width),
        **linear(f"{name}.mlp.fc2", 4 * width, width),
    }


def released():
    """Return random tensors under the names of the released code."""
    shapes = {
        "class_emb.weight": (CLASSES, WIDTH),
        "fake_latent": (1, WIDTH),
        **linear("z_proj", CHANNELS, WIDTH),
        **norm("z_proj_ln", WIDTH),
        "encoder_pos_embed_learned": (BUFFER + TOKENS, WIDTH),
        **norm("encoder_norm", WIDTH),
        **linear("decoder_embed", WIDTH, UPPER),
        "mask_token": (UPPER,),
        "decoder_pos_embed_learned": (BUFFER + TOKENS, UPPER),
        **norm("decoder_norm", UPPER),
        "diffusion_pos_embed_learned": (TOKENS, UPPER),
    }
    for i in range(LAYERS):
        shapes |= block(f"encoder_blocks.{i}", WIDTH) | block(f"decoder_blocks.{i}", UPPER)
    net = "diffloss.net"
    shapes |= linear(f"{net}.time_embed.mlp.0", FREQUENCIES, MLP)
    shapes |= linear(f"{net}.time_embed.mlp.2", MLP, MLP)
    shapes |= linear(f"{net}.cond_embed", UPPER, MLP) | linear(f"{net}.input_proj", CHANNELS, MLP)
    for i in range(MLP_LAYERS):
        layer = f"{net}.res_blocks.{i}"
        shapes |= norm(f"{layer}.in_ln", MLP) | linear(f"{layer}.mlp.0", MLP, MLP)
        shapes |= linear(f"{layer}.mlp.2", MLP, MLP)
        shapes |= linear(f"{layer}.adaLN_modulation.1", MLP, 3 * MLP)
    shapes |= linear(f"{net}.final_layer.adaLN_modulation.1", MLP, 2 * MLP)
    shapes |= linear(f"{net}.final_layer.linear", MLP, 2 * CHANNELS)
    generator = torch.Generator().manual_seed(2)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def mapped(tensors, name, x):
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def normed(tensors, name, x):
    return F.layer_norm(
        x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], eps=1e-6
    )


def run_block(tensors, name, heads, x):
    stacked = mapped(tensors, f"{name}.attn.qkv", normed(tensors, f"{name}.norm1", x))
    query, key, value = stacked.unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
    weights = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).softmax(-1)
    x = x + mapped(tensors, f"{name}.attn.proj", (weights @ value).transpose(0, 1).flatten(1))
    y = F.gelu(mapped(tensors, f"{name}.mlp.fc1", normed(tensors, f"{name}.norm2", x)))
    return x + mapped(tensors, f"{name}.mlp.fc2", y)


def conditions(tensors, latents, shown, label):
    """Return z, `[n, w]`: what the MLP is conditioned on, at each place of one image.

    Args:
        latents: `[n, c]` in raster order.
        shown: places of the latents that the encoder sees.
        label: the class; None for the dummy.
    """
    known = tensors["fake_latent"][0] if label is None else tensors["class_emb.weight"][label]
    places = tensors["encoder_pos_embed_learned"]
    x = mapped(tensors, "z_proj", latents) + places[BUFFER:]
    x = torch.cat([known.expand(BUFFER, -1) + places[:BUFFER], x])
    x = normed(tensors, "z_proj_ln", x)
    x = torch.cat([x[:BUFFER], x[BUFFER:][shown]])
    for i in range(LAYERS):
        x = run_block(tensors, f"encoder_blocks.{i}", HEADS, x)
    x = mapped(tensors, "decoder_embed", normed(tensors, "encoder_norm", x))
    whole = tensors["mask_token"].repeat(BUFFER + TOKENS, 1)
    whole[:BUFFER] = x[:BUFFER]
    whole[[BUFFER + place for place in shown]] = x[BUFFER:]
    x = whole + tensors["decoder_pos_embed_learned"]
    for i in range(LAYERS):
        x = run_block(tensors, f"decoder_blocks.{i}", UPPER_HEADS, x)
    x = normed(tensors, "decoder_norm", x)[BUFFER:]
    return x + tensors["diffusion_pos_embed_learned"]


def denoised(tensors, noisy, step, z):
    """Return the MLP's outputs `[.., 2 c]`: noise, and what is learned of the variance."""
    net = "diffloss.net"
    rates = torch.exp(-math.log(10_000) * torch.arange(FREQUENCIES // 2) / (FREQUENCIES // 2))
    angles = step * rates
    waves = torch.cat([angles.cos(), angles.sin()])
    level = F.silu(mapped(tensors, f"{net}.time_embed.mlp.0", waves))
    known = mapped(tensors, f"{net}.time_embed.mlp.2", level)
    known = F.silu(known + mapped(tensors, f"{net}.cond_embed", z))
    x = mapped(tensors, f"{net}.input_proj", noisy)
    for i in range(MLP_LAYERS):
        layer = f"{net}.res_blocks.{i}"
        shift, scale, gate = mapped(tensors, f"{layer}.adaLN_modulation.1", known).chunk(3, -1)
        y = normed(tensors, f"{layer}.in_ln", x) * (1 + scale) + shift
        y = F.silu(mapped(tensors, f"{layer}.mlp.0", y))
        x = x + gate * mapped(tensors, f"{layer}.mlp.2", y)
    shift, scale = mapped(tensors, f"{net}.final_layer.adaLN_modulation.1", known).chunk(2, -1)
    x = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
    return mapped(tensors, f"{net}.final_layer.linear", x)


def kept_shares():
    """Return the signal's share of the power at each step of the cosine schedule, float64."""

    def power(time):
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    kept, shares = 1.0, []
    for step in range(STEPS):
        beta = min(1 - power((step + 1) / STEPS) / power(step / STEPS), 0.999)
        kept *= 1 - beta
        shares.append(kept)
    return torch.tensor(shares, dtype=torch.float64)


def token_loss(tensors, clean, noise, step, z):
    """Return squared error and bound of one noisy latent `[c]`."""
    shares = kept_shares()
    share, before = shares[step], shares[step - 1] if step else torch.tensor(1.0).double()
    noisy = (share.sqrt() * clean + (1 - share).sqrt() * noise).float()
    guess, spread = denoised(tensors, noisy, step, z).chunk(2)
    beta = 1 - share / before
    small = beta * (1 - before) / (1 - share)
    if step == 0:
        first, second = shares[0], shares[1]
        small = (1 - second / first) * (1 - first) / (1 - second)
    part = (spread + 1) / 2
    log_scale = part * beta.log() + (1 - part) * small.log()
    of_clean, of_noisy = (
        before.sqrt() * beta / (1 - share),
        (share / before).sqrt() * (1 - before) / (1 - share),
    )
    found = (noisy - (1 - share).sqrt() * guess) / share.sqrt()
    means = [of_clean * each + of_noisy * noisy for each in (clean, found)]
    if step == 0:
        bound = -bins(clean, means[1], (0.5 * log_scale).exp())
    else:
        bound = 0.5 * (
            -1 + log_scale - small.log()
            + (small.log() - log_scale).exp()
            + (means[0] - means[1]) ** 2 * (-log_scale).exp()
        )  # fmt: skip
    return (guess - noise).square().mean() + bound.mean() / math.log(2)


def bins(clean, mean, scale):
    """Return the log-likelihood of 255 bins, with the released approximation of the normal."""

    def below(x):
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    upper, lower = (below((clean - mean + side / 255) / scale) for side in (1, -1))
    inner = (upper - lower).clamp(min=1e-12).log()
    first = upper.clamp(min=1e-12).log()
    last = (1 - lower).clamp(min=1e-12).log()
    return torch.where(clean < -0.999, first, torch.where(clean > 0.999, last, inner))


def ours(tensors):
    """Return the same weights under our names."""
    places, upper = tensors["encoder_pos_embed_learned"], tensors["decoder_pos_embed_learned"]
    named = {
        "embedding.front.weight": torch.cat([tensors["class_emb.weight"], tensors["fake_latent"]]),
        "embedding.front_position": places[:BUFFER],
        "embedding.positions.weight": places[BUFFER:],
        "bridge.mask": tensors["mask_token"],
        "bridge.front_position": upper[:BUFFER],
        "bridge.positions.weight": upper[BUFFER:],
        "head.positions.weight": tensors["diffusion_pos_embed_learned"],
    }
    names = {
        "embedding.content": "z_proj",
        "embedding.row_norm": "z_proj_ln",
        "bridge.norm": "encoder_norm",
        "bridge.linear": "decoder_embed",
        "head.norm": "decoder_norm",
        "head.entry": "diffloss.net.cond_embed",
        "head.noisy": "diffloss.net.input_proj",
        "head.decoder.level.inner": "diffloss.net.time_embed.mlp.0",
        "head.decoder.level.outer": "diffloss.net.time_embed.mlp.2",
        "head.decoder.modulation": "diffloss.net.final_layer.adaLN_modulation.1",
        "head.decoder.linear": "diffloss.net.final_layer.linear",
    }
    for i in range(MLP_LAYERS):
        own, theirs = f"head.decoder.layers.{i}", f"diffloss.net.res_blocks.{i}"
        names |= {
            f"{own}.norm": f"{theirs}.in_ln",
            f"{own}.inner": f"{theirs}.mlp.0",
            f"{own}.outer": f"{theirs}.mlp.2",
            f"{own}.modulation": f"{theirs}.adaLN_modulation.1",
        }
    inner = {
        "input_layernorm": "norm1",
        "pre_mlp_layernorm": "norm2",
        "self_attention.linear_proj": "attn.proj",
        "mlp.linear_fc1": "mlp.fc1",
        "mlp.linear_fc2": "mlp.fc2",
    }
    for own, theirs, heads in (("blocks", "encoder", HEADS), ("decoder", "decoder", UPPER_HEADS)):
        for i in range(LAYERS):
            prefix = f"{theirs}_blocks.{i}"
            names |= {f"{own}.{i}.{name}": f"{prefix}.{other}" for name, other in inner.items()}
            for kind in ("weight", "bias"):
                joined = join_heads(*tensors[f"{prefix}.attn.qkv.{kind}"].chunk(3), heads)
                named[f"{own}.{i}.self_attention.linear_qkv.{kind}"] = joined
    for own, theirs in names.items():
        named |= {f"{own}.{kind}": tensors[f"{theirs}.{kind}"] for kind in ("weight", "bias")}
    return named


# Equal to it.


def batch(count=4, first=7):
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(count, CHANNELS, 4, 4, generator=generator)
    labels = torch.tensor([0, 4, -1, 2]).repeat(2)[:count]
    return Batch(latents, labels, torch.arange(first, first + count))


def test_loss_equals_the_released_equations(make):
    """Images show different numbers of latents, and some have no class."""
    tensors = released()
    objective, inference = make("objective.label_dropout=0.5")
    copy_named(inference, ours(tensors))
    samples = batch()
    sequence = objective.training_sequence(samples)
    loss = objective.loss(run_layers(inference.layers.modules, sequence.inputs), sequence.targets)

    arrangement = objective.schedule.draw(samples.sample_index)
    labels = sequence.inputs[3].tolist()
    assert CLASSES in labels
    numbers, losses = set(), []
    for image, order in enumerate(arrangement.order.tolist()):
        shown = [
            p for p, hidden in zip(order, arrangement.groups[image], strict=True) if not hidden
        ]
        numbers.add(len(shown))
        latents = samples.inputs[image].flatten(1).T
        label = None if labels[image] == CLASSES else labels[image]
        z = conditions(tensors, latents, shown, label)
        own = []
        for noisy in range(4):
            noise, share = objective.density.draw_noise(samples.sample_index, TOKENS, noisy)
            for position in range(len(shown), TOKENS):
                distances = (kept_shares() - share[image, position, 0]).abs()
                step, place = int(distances.argmin()), order[position]
                values = latents[place], noise[image, position], step, z[place]
                own.append(token_loss(tensors, *values))
        losses.append(torch.stack(own).mean())
    assert len(numbers) > 1
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-4, atol=1e-4)


def sampled(tensors, z, free, scale, count):
    """Return a latent `[c]` by `count` of the steps, without noise, with guidance."""
    shares = kept_shares()
    steps = [round(i * (STEPS - 1) / (count - 1)) for i in range(count)]
    x = torch.zeros(CHANNELS)
    for number in reversed(range(count)):
        share = shares[steps[number]]
        before = shares[steps[number - 1]] if number else torch.tensor(1.0).double()
        given, without = (
            denoised(tensors, x, steps[number], each)[:CHANNELS] for each in (z, free)
        )
        guess = without + scale * (given - without)
        clean = (x - (1 - share).sqrt() * guess) / share.sqrt()
        beta = 1 - share / before
        mean = before.sqrt() * beta / (1 - share) * clean
        x = (mean + (share / before).sqrt() * (1 - before) / (1 - share) * x).float()
    return x


@pytest.mark.parametrize(("rounds", "scale"), [(3, 1.0), (4, 3.0), (TOKENS, 2.0)])
def test_samples_equal_the_released_loop(make, tmp_path, monkeypatch, rounds, scale):
    """Rounds along an order, with guidance that grows linearly; all noise is zero."""
    tensors = released()
    objective, inference = make("objective.sampling_steps=5")
    copy_named(inference, ours(tensors))

    def zeros(self, purpose, count):
        return torch.zeros(self.num_tokens, count)

    monkeypatch.setattr(SamplingKeys, "normal", zeros)
    options = {"rounds": rounds, "guidance": scale - 1}
    options |= {"guidance_schedule": "linear"} if scale > 1 else {}
    sampler = Sampler(inference, objective, tmp_path, options)
    images, labels = torch.arange(2), torch.tensor([3, 1])
    order = sampler.order_of(images)
    found = sampler.tokens(images, conditions={"labels": labels})
    for image, label in enumerate(labels.tolist()):
        latents, masked = torch.zeros(TOKENS, CHANNELS), TOKENS
        for number in range(rounds):
            places = order[image].tolist()
            shown = places[: TOKENS - masked]
            z, free = (conditions(tensors, latents, shown, each) for each in (label, None))
            left = math.floor(TOKENS * math.cos(math.pi / 2 * (number + 1) / rounds))
            left = max(1, min(masked - 1, left))
            now = 1 + (scale - 1) * (TOKENS - left) / TOKENS
            end = TOKENS if number == rounds - 1 else TOKENS - left
            for place in places[TOKENS - masked : end]:
                latents[place] = sampled(tensors, z[place], free[place], now, 5)
            masked = left
        expected = latents[order[image]]
        torch.testing.assert_close(found[image], expected, rtol=1e-3, atol=1e-4)


def test_hidden_latents_do_not_reach_the_known_ones(make):
    """The encoder has rows for as many latents as any image shows, some of which are hidden."""
    objective, inference = make()
    samples = batch(8)
    arrangement = objective.schedule.draw(samples.sample_index)
    assert arrangement.num_content == TOKENS - math.ceil(0.7 * TOKENS)

    def predictions(latents):
        changed = Batch(latents, samples.labels, samples.sample_index)
        sequence = objective.training_sequence(changed)
        noisy = objective.training_sequence(samples).inputs[4]
        inputs = (*sequence.inputs[:4], noisy)
        with torch.no_grad():
            return run_layers(inference.layers.modules, inputs)

    hidden = torch.zeros(8, TOKENS, dtype=torch.bool)
    hidden.scatter_(1, arrangement.order, arrangement.groups > 0)
    assert hidden.sum(1).unique().numel() > 1
    other = torch.where(hidden.view(8, 1, 4, 4), samples.inputs + 3.0, samples.inputs)
    torch.testing.assert_close(predictions(samples.inputs), predictions(other))
    seen = torch.where(hidden.view(8, 1, 4, 4), samples.inputs, samples.inputs + 3.0)
    assert (predictions(samples.inputs) - predictions(seen)).abs().max() > 1e-3


def test_latents_are_scaled(make):
    objective, _ = make("objective.latent_scale=0.25")
    latents = batch().inputs
    tokens = objective.given(objective.tokens_of(latents))
    torch.testing.assert_close(tokens, 0.25 * latents.flatten(2).transpose(1, 2))
    torch.testing.assert_close(objective.reads.from_sequence(tokens), latents)


# Keys.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.downsampling=5"], "5 does not divide data.image_size 16"),
        (["objective.downsampling=16"], "set it to half of data.image_size or less"),
        (
            ["objective.least_masking=0.99"],
            r"objective.least_masking: 0.99 of 16 tokens shows none",
        ),
        (
            ["objective.decoder.hidden_size=18"],
            "objective.decoder.hidden_size: 18 is not divisible",
        ),
        (["model.positions=rope_2d"], "rope_2d does not reach the decoder"),
    ],
)
def test_incompatible_keys(make, words, message):
    with pytest.raises(UserError, match=message):
        make(*words)
