"""`megavis import rar`: released weights of RAR become runs."""

import argparse
import re
from pathlib import Path

import pytest
import torch
from rar_equations import (
    CLASSES,
    HEADS,
    IDS,
    TOKENS,
    WIDTH,
    generator_logits,
    released,
)
from released_tensors import assert_is_preset, on_meta
from small_batches import run_layers
from small_vqgan import SMALL

import megavis
from megavis.cli import main
from megavis.config.load import dump_config, load_config
from megavis.data.loading.loader import Batch
from megavis.weights import rar
from megavis.weights import released as released_weights

pytestmark = pytest.mark.once


def saved(tensors):
    """Return the tensors of the equations as the released code saves them, with unused rows."""
    generator = torch.Generator().manual_seed(4)
    found = dict(tensors)
    found["embeddings.weight"] = found.pop("embeddings")
    found["cls_token"] = found["cls_token"].view(1, 1, WIDTH)
    # image_seq_len + 1024, and image_seq_len + 100.
    spare = {"pos_embed": 1022, "target_aware_pos_embed": 1022, "timesteps_embeddings": 98}
    for name, rows in spare.items():
        unused = torch.randn(rows, WIDTH, generator=generator)
        found[name] = torch.cat([found[name], unused])[None]
    return found


def imported(tmp_path, content, *words, name="rar"):
    """Save a file, import it, and return the exit code and the run folder."""
    torch.save(content, tmp_path / "rar_b.bin")
    run = tmp_path / "runs" / name
    return main(["import", "rar", str(tmp_path / "rar_b.bin"), str(run), *words]), run


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("words", [[], ["objective.randomness=[1,1]"]])
def test_imported_weights_equal_the_released_generator(tmp_path, words):
    """In raster order, to which the released weights have converged, and in random orders."""
    tensors = released()
    code, folder = imported(tmp_path, saved(tensors))
    assert code == 0
    path = folder / "config.yaml"
    path.write_text(dump_config(load_config(path, words).config))
    run = megavis.load(folder)
    assert run.config.data.image_size == 64
    assert run.config.model.num_attention_heads == HEADS
    for module in run.inference.layers.modules:
        # An imported run has dropout.
        module.eval()
    ids = torch.randint(IDS, (3, TOKENS), generator=torch.Generator().manual_seed(3))
    samples = Batch(ids, torch.tensor([0, 4, -1]), torch.arange(7, 10))
    sequence = run.objective.sequence(samples)
    predictions = run_layers(run.inference.layers.modules, sequence.inputs)
    orders = run.objective.schedule.at(None).draw(samples.sample_index).order.tolist()
    assert (orders[0] == list(range(TOKENS))) == (not words)
    for image, order in enumerate(orders):
        label = sequence.inputs[4].tolist()[image]
        label = None if label == CLASSES else label
        expected = generator_logits(tensors, ids[image][order], label, order)[:-1]
        found = run.objective.outputs(predictions)[image]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def shapes(width, layers, mlp):
    """Return names and shapes of a released generator, of modeling/rar.py."""
    found = {
        "cls_token": (1, 1, width),
        "embeddings.weight": (1024 + 1 + 1000 + 1, width),
        "pos_embed": (1, 256 + 1024, width),
        "target_aware_pos_embed": (1, 256 + 1024, width),
        "timesteps_embeddings": (1, 256 + 100, width),
    }
    linear = {"adaln_before_head.adaLN_modulation.1": (2 * width, width), "lm_head": (1024, width)}
    for number in range(layers):
        block = f"blocks.{number}"
        linear |= {
            f"{block}.attn.qkv": (3 * width, width),
            f"{block}.attn.proj": (width, width),
            f"{block}.mlp.fc1": (mlp, width),
            f"{block}.mlp.fc2": (width, mlp),
            f"{block}.adaLN_modulation.1": (6 * width, width),
        }
        norms = {"norm1": width, "norm2": width, "attn.q_norm": width // 16}
        norms["attn.k_norm"] = width // 16
        for name, size in norms.items():
            found |= {f"{block}.{name}.{kind}": (size,) for kind in ("weight", "bias")}
    for name, shape in linear.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return found


@pytest.mark.parametrize(
    ("preset", "width", "layers", "mlp", "published"),
    [
        ("b", 768, 24, 3072, 261),
        ("l", 1024, 24, 4096, 461),
        ("xl", 1280, 32, 5120, 955),
        ("xxl", 1408, 40, 6144, 1499),
    ],
)
def test_released_sizes_are_the_presets(monkeypatch, preset, width, layers, mlp, published):
    """Names and shapes of the released networks, on the meta device."""
    tensors = on_meta(shapes(width, layers, mlp))
    # Table 1.
    assert sum(each.numel() for each in tensors.values()) == pytest.approx(
        published * 1e6, rel=2e-3
    )
    monkeypatch.setattr(released_weights, "read_weights_file", lambda path, inside: tensors)
    found = rar.read_rar(argparse.Namespace(source=Path("a.bin"), tokenizer=None))
    assert_is_preset(found, f"rar/{preset}.yaml", tokenizer=None, randomness=(0.0, 0.0))


def test_pixels_of_an_id_are_those_of_the_tokenizer(tmp_path):
    folder = tmp_path / "vqgan"
    folder.mkdir()
    (folder / "config.yaml").write_text(SMALL.format(output=tmp_path, shards="nowhere"))
    code, run = imported(tmp_path, saved(released()), "--tokenizer", str(folder))
    assert code == 0
    config = load_config(run / "config.yaml").config
    assert config.objective.tokenizer == str(folder)
    assert (config.objective.patch_size, config.data.image_size) == (4, 16)


def test_other_tokenizers_are_named(tmp_path, capsys):
    _, run = imported(tmp_path, saved(released()))
    code, _ = imported(tmp_path, saved(released()), "--tokenizer", str(run), name="second")
    assert code == 2
    assert f"--tokenizer: {run} is a run of rar, not of a VQGAN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": None}, "the weights have no lm_head.weight, which RAR has"),
        ({"blocks.1.norm1.bias": None}, "the weights have no blocks.1.norm1.bias"),
        ({"mask": torch.zeros(1)}, "mask does not belong to RAR"),
        (
            {"target_aware_pos_embed": torch.zeros(1, 1039, WIDTH)},
            r"target_aware_pos_embed has shape \[1, 1039, 32\]; the other tensors imply \[1, 1040",
        ),
        ({"pos_embed": torch.zeros(1, 1041, WIDTH)}, "pos_embed has 1041 and timesteps_embeddings"),
        ({"embeddings.weight": torch.zeros(IDS + 2, WIDTH)}, "0 classes beside 12 ids"),
        ({"blocks.0.attn.q_norm.weight": torch.zeros(7)}, "a width of 32 with heads of 7"),
    ],
)
def test_what_is_no_released_network_is_named(tmp_path, capsys, change, message):
    tensors = {n: t for n, t in (saved(released()) | change).items() if t is not None}
    code, run = imported(tmp_path, tensors)
    assert code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not run.exists()
