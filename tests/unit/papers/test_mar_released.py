"""`megavis import mar`: released weights of MAR become runs."""

import argparse
import re
from pathlib import Path

import pytest
import torch
from mar_equations import HEADS, MLP, TOKENS, UPPER, UPPER_HEADS, WIDTH, Sizes, check_loss, released
from released_tensors import assert_is_preset, on_meta
from tiny import tiny

import megavis
from megavis.cli import main
from megavis.config.load import load_config
from megavis.weights import mar
from megavis.weights import released as released_weights

pytestmark = pytest.mark.once

HEAD_WORDS = ["--heads", str(HEADS), "--decoder-heads", str(UPPER_HEADS)]


def imported(tmp_path, content, *words):
    """Save a checkpoint, import it, and return the exit code and the run folder."""
    torch.save(content, tmp_path / "checkpoint-last.pth")
    run = tmp_path / "runs" / "mar"
    source = str(tmp_path / "checkpoint-last.pth")
    return main(["import", "mar", source, str(run), *HEAD_WORDS, *words]), run


@pytest.mark.usefixtures("context")
def test_released_weights_are_imported(tmp_path):
    """Of a checkpoint with all that training keeps, the average of the weights."""
    tensors = released()
    trained = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    content = {"model": trained, "model_ema": tensors, "optimizer": {"state": {}}, "epoch": 799}
    code, folder = imported(tmp_path, content | {"args": argparse.Namespace(model="mar_base")})
    assert code == 0
    run = megavis.load(folder)
    assert run.config.data.image_size == 64
    check_loss(run.objective, run.inference, tensors, scale=0.2325)


def test_weights_without_an_average_and_a_tokenizer(tmp_path):
    vae = tiny("{name: vae, filters: 32, multipliers: [1, 1, 1], perceptual_weight: 0}", model=None)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.yaml").write_text(vae)
    content = {"model": released(), "model_ema": None}
    code, folder = imported(tmp_path, content, "--tokenizer", str(tmp_path / "vae"))
    assert code == 0
    config = load_config(folder / "config.yaml").config
    assert (config.objective.downsampling, config.data.image_size) == (4, 16)
    assert config.objective.tokenizer == str(tmp_path / "vae")


@pytest.mark.parametrize(
    ("preset", "width", "layers", "mlp", "mlp_layers", "published"),
    [("b", 768, 12, 1024, 6, 208), ("l", 1024, 16, 1280, 8, 479), ("h", 1280, 20, 1536, 12, 943)],
)
def test_released_sizes_are_the_presets(
    monkeypatch, preset, width, layers, mlp, mlp_layers, published
):
    """Names and shapes of the released networks, of models/mar.py and its commands."""
    sizes = Sizes(width, width, layers, 16, 256, 1000, 64, mlp, mlp_layers)
    tensors = on_meta(sizes.shapes())
    monkeypatch.setattr(released_weights, "read_weights_file", lambda path, inside: tensors)
    args = argparse.Namespace(source=Path("a.pth"), heads=None, decoder_heads=None, tokenizer=None)
    own = assert_is_preset(
        mar.read_mar(args), f"mar/{preset}.yaml", tokenizer=None, latent_scale=0.2325
    )
    # Table 4.
    assert sum(each.numel() for each in own.values()) == pytest.approx(published * 1e6, rel=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_norm.bias": None}, "the weights have no decoder_norm.bias, which MAR has"),
        ({"z_proj.bias": None}, "the weights have no z_proj.bias, which MAR has"),
        ({"cls_token": torch.zeros(1)}, "cls_token does not belong to MAR"),
        (
            {"diffloss.net.cond_embed.weight": torch.zeros(MLP, 3)},
            r"cond_embed.weight has shape \[24, 3\]; the other tensors imply \[24, 16\]",
        ),
        (
            {"diffusion_pos_embed_learned": torch.zeros(1, 15, UPPER)},
            "diffusion_pos_embed_learned has 15 and encoder_pos_embed_learned 20 positions",
        ),
        (
            {"encoder_pos_embed_learned": torch.zeros(1, TOKENS, WIDTH)},
            "at least two more for the class",
        ),
        (
            {"z_proj.bias": torch.zeros(30)},
            "a width of 30 is not divisible by 4 heads; pass --heads",
        ),
        (
            {"decoder_embed.bias": torch.zeros(15)},
            f"a width of 15 is not divisible by {UPPER_HEADS} heads; pass --decoder-heads",
        ),
    ],
)
def test_what_is_no_released_network_is_named(tmp_path, capsys, change, message):
    tensors = {n: t for n, t in (released() | change).items() if t is not None}
    code, run = imported(tmp_path, {"model_ema": tensors})
    assert code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not run.exists()


def test_another_checkpoint_is_named(tmp_path, capsys):
    code, _ = imported(tmp_path, {"net": {"weight": torch.zeros(2)}, "epoch": 3})
    assert code == 2
    assert "the weights have no z_proj.bias, which MAR has" in capsys.readouterr().err
