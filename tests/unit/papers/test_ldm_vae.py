"""VAEs of latent diffusion against the equations of their released code, and their import."""

import argparse
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_batches import photographs
from tiny import tiny

from megavis.cli import main
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.tokenizers.network_tokenizer import open_tokenizer
from megavis.tokenizers.vae import VAE
from megavis.weights import ldm_vae
from megavis.weights.released import blank_weights

pytestmark = pytest.mark.once

SMALL = {"filters": 32, "multipliers": (1, 2, 2), "channels": 5, "attends": (1, 0)}


# The released code: names and shapes, then equations.


def convolution(name, inputs, outputs, side):
    return {f"{name}.weight": (outputs, inputs, side, side), f"{name}.bias": (outputs,)}


def norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def residual(name, inputs, outputs):
    shapes = norm(f"{name}.norm1", inputs) | convolution(f"{name}.conv1", inputs, outputs, 3)
    shapes |= norm(f"{name}.norm2", outputs) | convolution(f"{name}.conv2", outputs, outputs, 3)
    if inputs != outputs:
        shapes |= convolution(f"{name}.nin_shortcut", inputs, outputs, 1)
    return shapes


def attention(name, width):
    shapes = norm(f"{name}.norm", width)
    for part in ("q", "k", "v", "proj_out"):
        shapes |= convolution(f"{name}.{part}", width, width, 1)
    return shapes


def middle(name, width):
    blocks = residual(f"{name}.block_1", width, width) | residual(f"{name}.block_2", width, width)
    return blocks | attention(f"{name}.attn_1", width)


def released_shapes(filters, multipliers, channels, attends):
    """Return the shapes of a checkpoint by name; `attends` levels of each part have attention."""
    widths, last = [filters * each for each in multipliers], len(multipliers) - 1
    shapes = convolution("encoder.conv_in", 3, filters, 3)
    width = filters
    for level, outputs in enumerate(widths):
        for block in range(2):
            shapes |= residual(f"encoder.down.{level}.block.{block}", width, outputs)
            width = outputs
            if level > last - attends[0]:
                shapes |= attention(f"encoder.down.{level}.attn.{block}", width)
        if level < last:
            shapes |= convolution(f"encoder.down.{level}.downsample.conv", width, width, 3)
    shapes |= middle("encoder.mid", width) | norm("encoder.norm_out", width)
    shapes |= convolution("encoder.conv_out", width, 2 * channels, 3)
    shapes |= convolution("quant_conv", 2 * channels, 2 * channels, 1)
    shapes |= convolution("post_quant_conv", channels, channels, 1)
    shapes |= convolution("decoder.conv_in", channels, width, 3) | middle("decoder.mid", width)
    for level in reversed(range(last + 1)):
        for block in range(3):
            shapes |= residual(f"decoder.up.{level}.block.{block}", width, widths[level])
            width = widths[level]
            if level > last - attends[1]:
                shapes |= attention(f"decoder.up.{level}.attn.{block}", width)
        if level:
            shapes |= convolution(f"decoder.up.{level}.upsample.conv", width, width, 3)
    return shapes | norm("decoder.norm_out", width) | convolution("decoder.conv_out", width, 3, 3)


def released(**sizes):
    """Return random tensors of a checkpoint."""
    generator = torch.Generator().manual_seed(4)
    return {
        name: torch.randn(shape, generator=generator) / max(4, len(shape) * 2)
        for name, shape in released_shapes(**(SMALL | sizes)).items()
    }


def given(tensors, name):
    return tensors[f"{name}.weight"], tensors[f"{name}.bias"]


def normed(tensors, name, x):
    return F.group_norm(x, 32, *given(tensors, name), 1e-6)


def run_residual(tensors, name, x):
    y = x
    for part in (1, 2):
        y = normed(tensors, f"{name}.norm{part}", y)
        y = F.conv2d(y * y.sigmoid(), *given(tensors, f"{name}.conv{part}"), padding=1)
    if f"{name}.nin_shortcut.weight" in tensors:
        x = F.conv2d(x, *given(tensors, f"{name}.nin_shortcut"))
    return x + y


def run_attention(tensors, name, x):
    y = normed(tensors, f"{name}.norm", x)
    query, key, value = (F.conv2d(y, *given(tensors, f"{name}.{p}")).flatten(2) for p in "qkv")
    weights = (query.mT @ key * x.shape[1] ** -0.5).softmax(2)
    y = (value @ weights.mT).view_as(x)
    return x + F.conv2d(y, *given(tensors, f"{name}.proj_out"))


def run_level(tensors, name, x, blocks):
    for block in range(blocks):
        x = run_residual(tensors, f"{name}.block.{block}", x)
        if f"{name}.attn.{block}.norm.weight" in tensors:
            x = run_attention(tensors, f"{name}.attn.{block}", x)
    return x


def run_middle(tensors, name, x):
    x = run_residual(tensors, f"{name}.block_1", x)
    return run_residual(tensors, f"{name}.block_2", run_attention(tensors, f"{name}.attn_1", x))


def run_end(tensors, name, x):
    x = normed(tensors, f"{name}.norm_out", x)
    return F.conv2d(x * x.sigmoid(), *given(tensors, f"{name}.conv_out"), padding=1)


def encoded(tensors, pixels):
    """Return means and deviations of pixels in [-1, 1]."""
    x = F.conv2d(pixels, *given(tensors, "encoder.conv_in"), padding=1)
    for level in range(3):
        x = run_level(tensors, f"encoder.down.{level}", x, 2)
        if level < 2:
            x = F.pad(x, (0, 1, 0, 1))
            x = F.conv2d(x, *given(tensors, f"encoder.down.{level}.downsample.conv"), stride=2)
    x = run_end(tensors, "encoder", run_middle(tensors, "encoder.mid", x))
    mean, log_variance = F.conv2d(x, *given(tensors, "quant_conv")).chunk(2, 1)
    return mean, torch.exp(0.5 * log_variance.clamp(-30, 20))


def decoded(tensors, latents):
    """Return pixels in [-1, 1]."""
    x = F.conv2d(latents, *given(tensors, "post_quant_conv"))
    x = run_middle(
        tensors, "decoder.mid", F.conv2d(x, *given(tensors, "decoder.conv_in"), padding=1)
    )
    for level in (2, 1, 0):
        x = run_level(tensors, f"decoder.up.{level}", x, 3)
        if level:
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
            x = F.conv2d(x, *given(tensors, f"decoder.up.{level}.upsample.conv"), padding=1)
    return run_end(tensors, "decoder", x)


# Imported.


def imported(tmp_path, content):
    """Save a checkpoint, import it, and return the exit code and the run folder."""
    torch.save(content, tmp_path / "kl16.ckpt")
    run = tmp_path / "vae"
    return main(["import", "ldm-vae", str(tmp_path / "kl16.ckpt"), str(run)]), run


@pytest.mark.parametrize(
    ("key", "attends"), [("state_dict", (2, 2)), ("state_dict", (0, 0)), ("model", (1, 0))]
)
def test_imported_network_equals_the_released_equations(tmp_path, key, attends):
    """Of LDM, with a discriminator, and of MAR; for each level with attention and without."""
    tensors = released(attends=attends)
    extra = {"loss.logvar": torch.zeros(()), "loss.discriminator.main.0.bias": torch.zeros(3)}
    code, run = imported(tmp_path, {key: tensors | extra, "epoch": 7})
    assert code == 0
    config = load_config(run / "config.yaml").config
    assert config.objective.attention_levels == attends
    assert config.objective.downsampling == 4
    tokenizer = open_tokenizer(run)
    images = photographs(2, 16)
    pixels = images.permute(0, 3, 1, 2) / 255
    mean, deviation = encoded(tensors, 2 * pixels - 1)
    found = tokenizer.encode(images)
    assert mean.abs().mean() > 0.01
    torch.testing.assert_close(found[:, 0], mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[:, 1], deviation, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        made = tokenizer.network.decode(mean)
    torch.testing.assert_close(made, (decoded(tensors, mean) + 1) / 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("multipliers", "channels", "attends"),
    [
        ((1, 2, 4), 3, (0, 0)),
        ((1, 2, 4, 4), 4, (0, 0)),
        ((1, 1, 2, 2, 4), 16, (1, 1)),
        ((1, 1, 2, 2, 4), 16, (1, 0)),
        ((1, 1, 2, 2, 4, 4), 64, (2, 2)),
    ],
    ids=["kl-f4", "kl-f8", "kl-f16", "kl16 of MAR's code", "kl-f32"],
)
def test_released_sizes(monkeypatch, multipliers, channels, attends):
    """Names and shapes by LDM's configs/autoencoder and MAR's models/vae.py."""
    shapes = released_shapes(128, multipliers, channels, attends)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    monkeypatch.setattr(ldm_vae, "read_weights_file", lambda path, inside: tensors)
    args = argparse.Namespace(source=Path("a.ckpt"), image_size=256)
    found = ldm_vae.read_ldm_vae(args)
    own = blank_weights(found.config(Path("runs/vae")))
    assert {f"vae.network.{name}": shape for name, shape in shapes.items()} == {
        name: tuple(tensor.shape) for name, tensor in own.items()
    }
    assert found.tensors.keys() == shapes.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_conv.bias": None}, "the weights have no quant_conv.bias"),
        ({"encoder.conv_in.weight": None}, "no encoder.conv_in.weight, which a VAE of latent"),
        ({"encoder.mid.extra": torch.zeros(1)}, "encoder.mid.extra does not belong to a VAE"),
        (
            {"encoder.conv_out.bias": torch.zeros(5)},
            r"encoder.conv_out.bias has shape \[5\]; the other tensors imply \[10\]",
        ),
    ],
)
def test_what_is_no_released_network_is_named(tmp_path, capsys, change, message):
    tensors = {n: t for n, t in (released() | change).items() if t is not None}
    code, run = imported(tmp_path, {"state_dict": tensors})
    assert code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not run.exists()


# Keys.


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("attention_levels: [0, 1]", "is for layers: taming; maskgit has no attention"),
        ("layers: taming, attention_levels: [1, 3]", "are more than the 2 levels"),
    ],
)
def test_levels_with_attention_are_checked(tmp_path, keys, message):
    objective = f"{{name: vae, multipliers: [1, 1], perceptual_weight: 0, {keys}}}"
    (tmp_path / "vae.yaml").write_text(tiny(objective, model=None))
    with pytest.raises(UserError, match=message):
        load_config(tmp_path / "vae.yaml")


def test_networks_of_before_keep_their_identity():
    """Shards have the identity of the tokenizer that encoded them, which hashes its settings."""
    old = {"latent_channels": 2, "filters": 8, "multipliers": [1, 1], "blocks_per_level": 1}
    tokenizer = VAE.from_config({"objective": old | {"norm_groups": 4}})
    sizes = {"multipliers": (1, 1), "latent_channels": 2, "filters": 8, "blocks_per_level": 1}
    assert tokenizer.settings == sizes | {"groups": 4}
    taming = VAE.from_config({"objective": old | {"norm_groups": 4, "layers": "taming"}})
    assert taming.settings == sizes | {"groups": 4, "layers": "taming", "attention_levels": (1, 1)}
