"""Imported VAEs of label maps against the released network, written out in NumPy."""

import numpy as np
import pytest
import torch
from golden_givt import GOLDEN, import_file

import megavis
from megavis.cli import main
from megavis.data.codecs.label_maps import to_pixels
from megavis.parallel.context import close_context
from megavis.tokenizers.network_tokenizer import open_tokenizer

PATCH, GRID, SMALL, WIDTH, HEADS, LATENT, BLOCKS = 4, 4, 2, 12, 3, 5, 2
SIZES = (4, 3)
"""Channels for classes and for segments."""
PANOPTIC = ("--semantic-channels", "4", "--latents", "4")


@pytest.fixture(scope="module", autouse=True)
def leave_job():
    yield
    close_context()


def released(*, scanned=True):
    """Return random arrays under the released names; `scanned`: blocks are stacked."""
    random, channels = np.random.default_rng(0), sum(SIZES)
    shapes = {
        "embedding": (PATCH, PATCH, channels, WIDTH),
        "encoder_head": (WIDTH, 2 * LATENT),
        "decoder_stem": (LATENT, WIDTH),
        "decoder_head": (WIDTH, PATCH**2 * channels),
    }
    shapes = {f"{n}/kernel": s for n, s in shapes.items()} | {
        f"{n}/bias": s[-1:] for n, s in shapes.items()
    }
    head, block = (HEADS, WIDTH // HEADS), {}
    for part in ("query", "key", "value"):
        block[f"MultiHeadDotProductAttention_0/{part}/kernel"] = (WIDTH, *head)
        block[f"MultiHeadDotProductAttention_0/{part}/bias"] = head
    block["MultiHeadDotProductAttention_0/out/kernel"] = (*head, WIDTH)
    block["MultiHeadDotProductAttention_0/out/bias"] = (WIDTH,)
    for number, (rows, columns) in enumerate([(WIDTH, 20), (20, WIDTH)]):
        block[f"MlpBlock_0/Dense_{number}/kernel"] = (rows, columns)
        block[f"MlpBlock_0/Dense_{number}/bias"] = (columns,)
    for name in ("LayerNorm_0", "LayerNorm_1"):
        block |= {f"{name}/scale": (WIDTH,), f"{name}/bias": (WIDTH,)}
    for part in ("encoder", "decoder"):
        shapes[f"pos_embedding_{part}"] = (1, GRID**2, WIDTH)
        shapes |= {f"{part}/encoder_norm/{end}": (WIDTH,) for end in ("scale", "bias")}
        for name, shape in block.items():
            shapes[f"{part}/encoderblock/{name}"] = (BLOCKS, *shape)
    arrays = {n: random.normal(0, 0.4, s).astype(np.float32) for n, s in sorted(shapes.items())}
    if not scanned:
        for name in [name for name in arrays if "encoderblock" in name]:
            for number, array in enumerate(arrays.pop(name)):
                arrays[name.replace("encoderblock", f"encoderblock_{number}")] = array
    return {f"params/{name}": array for name, array in arrays.items()}


def norm(x, arrays, name):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * arrays[f"{name}/scale"] + arrays[f"{name}/bias"]


def dense(x, arrays, name):
    return x @ arrays[f"{name}/kernel"] + arrays[f"{name}/bias"]


def transformer(x, arrays, part):
    """Run one of the two Transformers on float64 `[n, h]`."""
    for number in range(BLOCKS):
        prefix = f"{part}/encoderblock/"
        block = {n.removeprefix(prefix): a[number] for n, a in arrays.items() if prefix in n}
        inner, name = norm(x, block, "LayerNorm_0"), "MultiHeadDotProductAttention_0"
        query, key, value = (
            np.einsum("nw,whd->hnd", inner, block[f"{name}/{one}/kernel"])
            + block[f"{name}/{one}/bias"][:, None]
            for one in ("query", "key", "value")
        )
        scores = np.exp(np.einsum("hnd,hmd->hnm", query, key) / np.sqrt(WIDTH // HEADS))
        mixed = np.einsum("hnm,hmd->nhd", scores / scores.sum(-1, keepdims=True), value)
        x = x + np.einsum("nhd,hdw->nw", mixed, block[f"{name}/out/kernel"])
        x = x + block[f"{name}/out/bias"]
        inner = dense(norm(x, block, "LayerNorm_1"), block, "MlpBlock_0/Dense_0")
        inner = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        x = x + dense(inner, block, "MlpBlock_0/Dense_1")
    return norm(x, arrays, f"{part}/encoder_norm")


def resize(x, to):
    """Resize tokens `[n, w]` as jax.image.resize does: a triangle kernel, wider if it shrinks."""
    side = int(np.sqrt(len(x)))
    step = side / to
    centres = (np.arange(to)[:, None] + 0.5) * step - 0.5
    weights = np.maximum(0, 1 - np.abs(centres - np.arange(side)) / max(step, 1))
    weights /= weights.sum(1, keepdims=True)
    grid = np.einsum("ij,kl,jlw->ikw", weights, weights, x.reshape(side, side, -1))
    return grid.reshape(to**2, -1)


def reference(labels, arrays):
    """Return moments `[l², 2 d]` and, of the means, logits `[H, W, C]`; labels `[H, W, groups]`."""
    arrays = {name.removeprefix("params/"): a.astype(np.float64) for name, a in arrays.items()}
    sizes = SIZES if labels.shape[-1] == 2 else (sum(SIZES),)
    hot = [np.eye(size)[labels[..., group]] for group, size in enumerate(sizes)]
    patches = np.concatenate(hot, -1).reshape(GRID, PATCH, GRID, PATCH, -1)
    hidden = np.einsum("iajbc,abcw->ijw", patches, arrays["embedding/kernel"])
    hidden = hidden.reshape(GRID**2, -1) + arrays["embedding/bias"]
    hidden = transformer(hidden + arrays["pos_embedding_encoder"][0], arrays, "encoder")
    moments = dense(resize(hidden, SMALL), arrays, "encoder_head")
    hidden = resize(dense(moments[:, :LATENT], arrays, "decoder_stem"), GRID)
    hidden = transformer(hidden + arrays["pos_embedding_decoder"][0], arrays, "decoder")
    logits = dense(hidden, arrays, "decoder_head").reshape(GRID, GRID, PATCH, PATCH, -1)
    return moments, logits.transpose(0, 2, 1, 3, 4).reshape(GRID * PATCH, GRID * PATCH, -1)


def open_file(folder, arrays, *words):
    np.savez(folder / "file.npz", **arrays)
    name = import_file(folder, "givt-label-vae", folder / "file.npz", *words)
    return megavis.load(name, device="cpu"), open_tokenizer(name)


def check(run, tokenizer, labels, maps, arrays):
    """Compare moments and logits of the trained network and of the tokenizer."""
    moments, logits = reference(labels, arrays)
    expected = torch.from_numpy(moments.T.reshape(-1, SMALL, SMALL)).float()
    predictions = run.inference.predictions(run.objective.inputs_from(maps[None]))
    torch.testing.assert_close(predictions[1][0], expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(tokenizer.encode(maps[None])[0, 0], expected[:LATENT])
    for found in (run.objective.logits(predictions), tokenizer.logits(expected[None, :LATENT])):
        made = found[0].detach().permute(1, 2, 0)
        torch.testing.assert_close(made, torch.from_numpy(logits).float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("scanned", [True, False])
def test_panoptic_vae_matches_the_network_written_out(tmp_path, scanned):
    random = np.random.default_rng(1)
    labels = np.stack([random.integers(0, size, (16, 16)) for size in SIZES], axis=-1)
    maps = torch.from_numpy(to_pixels(labels[..., 0] + 256 * labels[..., 1]))
    run, tokenizer = open_file(tmp_path, released(scanned=scanned), *PANOPTIC)
    paper = run.config.objective
    assert (paper.beta, paper.downsampling, paper.decoder_layers) == (2.5e-4, 8, BLOCKS)
    check(run, tokenizer, labels, maps, released())


def test_depth_vae_matches_the_network_written_out(tmp_path):
    bins = np.random.default_rng(2).integers(0, sum(SIZES), (16, 16))
    metres = 0.001 + (bins + 0.5) / sum(SIZES) * 9.999
    maps = torch.from_numpy(to_pixels((10_000 * metres).round().astype(np.int64)))
    run, tokenizer = open_file(tmp_path, released(), "--target", "depth", "--latents", "4")
    assert (run.config.objective.depth_bins, run.config.objective.beta) == (sum(SIZES), 2e-4)
    check(run, tokenizer, bins[..., None], maps, released())


def test_second_stage_is_imported_with_its_vae(tmp_path):
    np.savez(tmp_path / "vae.npz", **released())
    vae = import_file(tmp_path / "vae", "givt-label-vae", tmp_path / "vae.npz", *PANOPTIC)
    file = GOLDEN / "givt_encoder_decoder.npz"
    run = import_file(tmp_path / "model", "givt", file, "--tokenizer", vae)
    paper = megavis.load(run, device="cpu").config.objective
    assert (paper.tokenizer, paper.downsampling) == (vae, 8)


@pytest.mark.parametrize(
    ("words", "removed", "message"),
    [
        (["--latents", "4"], None, "7 channels for classes and segments, not over 134"),
        ([*PANOPTIC[:2], "--latents", "9"], None, "9 latents do not tile a square of 16 pixels"),
        (PANOPTIC, "encoder_head/kernel", "no encoder_head/kernel"),
        (
            PANOPTIC,
            "embedding/kernel",
            "no embedding/kernel, which a released VAE of label maps has",
        ),
        (PANOPTIC, "decoder/encoderblock", "no decoder/encoderblock"),
        (PANOPTIC, "encoder/encoderblock_0", "no encoder/encoderblock_0/"),
        (PANOPTIC, "MlpBlock_0/Dense_0/kernel", "MlpBlock_0/Dense_0/kernel, which a released"),
    ],
)
def test_wrong_file_is_named(tmp_path, capsys, words, removed, message):
    whole = released(scanned=removed != "encoder/encoderblock_0")
    arrays = {n: a for n, a in whole.items() if not (removed and f"/{removed}" in n)}
    np.savez(tmp_path / "file.npz", **arrays)
    command = ["import", "givt-label-vae", str(tmp_path / "file.npz"), str(tmp_path / "run")]
    assert main([*command, *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
