"""MAR's released code, from its equations in plain torch, image by image.

No package ships the model. Tensors have the names and shapes of its checkpoints.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from small_batches import run_layers

from megavis.data.loading.loader import Batch

WIDTH, HEADS, LAYERS = 32, 4, 2
UPPER, UPPER_HEADS = 16, 2
CHANNELS, TOKENS, CLASSES, BUFFER = 3, 16, 5, 4
MLP, MLP_LAYERS, FREQUENCIES, STEPS = 24, 2, 256, 1000


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


@dataclass(frozen=True)
class Sizes:
    """Sizes of a released network; by default of a small one, whose stacks differ."""

    width: int = WIDTH
    upper: int = UPPER
    layers: int = LAYERS
    channels: int = CHANNELS
    tokens: int = TOKENS
    classes: int = CLASSES
    buffer: int = BUFFER
    mlp: int = MLP
    mlp_layers: int = MLP_LAYERS

    def shapes(self):
        """Return the shape of each tensor by its name in the released code."""
        width, upper, mlp = self.width, self.upper, self.mlp
        shapes = {
            "class_emb.weight": (self.classes, width),
            "fake_latent": (1, width),
            **linear("z_proj", self.channels, width),
            **norm("z_proj_ln", width),
            "encoder_pos_embed_learned": (1, self.buffer + self.tokens, width),
            **norm("encoder_norm", width),
            **linear("decoder_embed", width, upper),
            "mask_token": (1, 1, upper),
            "decoder_pos_embed_learned": (1, self.buffer + self.tokens, upper),
            **norm("decoder_norm", upper),
            "diffusion_pos_embed_learned": (1, self.tokens, upper),
        }
        for i in range(self.layers):
            shapes |= block(f"encoder_blocks.{i}", width) | block(f"decoder_blocks.{i}", upper)
        net = "diffloss.net"
        shapes |= linear(f"{net}.time_embed.mlp.0", FREQUENCIES, mlp)
        shapes |= linear(f"{net}.time_embed.mlp.2", mlp, mlp)
        shapes |= linear(f"{net}.cond_embed", upper, mlp)
        shapes |= linear(f"{net}.input_proj", self.channels, mlp)
        for i in range(self.mlp_layers):
            layer = f"{net}.res_blocks.{i}"
            shapes |= norm(f"{layer}.in_ln", mlp) | linear(f"{layer}.mlp.0", mlp, mlp)
            shapes |= linear(f"{layer}.mlp.2", mlp, mlp)
            shapes |= linear(f"{layer}.adaLN_modulation.1", mlp, 3 * mlp)
        shapes |= linear(f"{net}.final_layer.adaLN_modulation.1", mlp, 2 * mlp)
        return shapes | linear(f"{net}.final_layer.linear", mlp, 2 * self.channels)


def released():
    """Return random tensors under the names of the released code."""
    shapes, generator = Sizes().shapes(), torch.Generator().manual_seed(2)
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
    places = tensors["encoder_pos_embed_learned"][0]
    x = mapped(tensors, "z_proj", latents) + places[BUFFER:]
    x = torch.cat([known.expand(BUFFER, -1) + places[:BUFFER], x])
    x = normed(tensors, "z_proj_ln", x)
    x = torch.cat([x[:BUFFER], x[BUFFER:][shown]])
    for i in range(LAYERS):
        x = run_block(tensors, f"encoder_blocks.{i}", HEADS, x)
    x = mapped(tensors, "decoder_embed", normed(tensors, "encoder_norm", x))
    whole = tensors["mask_token"][0].repeat(BUFFER + TOKENS, 1)
    whole[:BUFFER] = x[:BUFFER]
    whole[[BUFFER + place for place in shown]] = x[BUFFER:]
    x = whole + tensors["decoder_pos_embed_learned"][0]
    for i in range(LAYERS):
        x = run_block(tensors, f"decoder_blocks.{i}", UPPER_HEADS, x)
    x = normed(tensors, "decoder_norm", x)[BUFFER:]
    return x + tensors["diffusion_pos_embed_learned"][0]


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


def batch(count=4, first=7):
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(count, CHANNELS, 4, 4, generator=generator)
    labels = torch.tensor([0, 4, -1, 2]).repeat(2)[:count]
    return Batch(latents, labels, torch.arange(first, first + count))


def check_loss(objective, inference, tensors, *, scale=1.0):
    """Compare the loss of latents, which are multiplied by `scale`, with the equations."""
    for module in inference.layers.modules:
        # An imported run has dropout.
        module.eval()
    samples = batch()
    sequence = objective.training_sequence(samples)
    loss = objective.loss(run_layers(inference.layers.modules, sequence.inputs), sequence.targets)
    arrangement = objective.schedule.draw(samples.sample_index)
    labels = sequence.inputs[3].tolist()
    numbers, losses = set(), []
    for image, order in enumerate(arrangement.order.tolist()):
        shown = [
            p for p, hidden in zip(order, arrangement.groups[image], strict=True) if not hidden
        ]
        numbers.add(len(shown))
        latents = scale * samples.inputs[image].flatten(1).T
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
    assert CLASSES in labels
    assert len(numbers) > 1
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-4, atol=1e-4)
