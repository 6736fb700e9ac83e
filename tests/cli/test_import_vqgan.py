"""`megavis import vqgan`: released checkpoints become tokenizers."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from janus_network import janus_network
from safetensors.torch import save_file

from megavis.cli import main
from megavis.tokenizers.network_tokenizer import open_tokenizer
from megavis.tokenizers.shapes import VQGANShape
from megavis.tokenizers.vqgan import VQGANNetwork

SHAPE = VQGANShape(codebook_size=20, code_size=6, filters=32, multipliers=(1, 2), latent_channels=8)


@pytest.fixture
def released():
    torch.manual_seed(0)
    tensors = dict(VQGANNetwork(SHAPE).state_dict())
    return {**tensors, "loss.discriminator.main.0.weight": torch.zeros(3)}


def test_import_checkpoint(released, tmp_path, capsys):
    torch.save({"state_dict": released}, tmp_path / "last.ckpt")
    assert main(["import", "vqgan", str(tmp_path / "last.ckpt"), str(tmp_path / "run")]) == 0
    tokenizer = open_tokenizer(tmp_path / "run")
    network = VQGANNetwork(SHAPE)
    network.load_state_dict({n: t for n, t in released.items() if not n.startswith("loss.")})
    images = torch.randint(256, (2, 8, 8, 3), dtype=torch.uint8)
    vectors = network.vectors(images.permute(0, 3, 1, 2) / 255)
    assert torch.equal(tokenizer.encode(images), network.quantize(vectors).ids.flatten(1))
    assert "parameters from" in capsys.readouterr().out


def plain_block(tensors, name, x):
    """Apply a residual block of MAGE's network."""
    hidden = x
    for number in (1, 2):
        norm = f"{name}.norm{number}"
        hidden = F.group_norm(hidden, 32, tensors[f"{norm}.weight"], tensors[f"{norm}.bias"], 1e-6)
        hidden = F.conv2d(F.silu(hidden), tensors[f"{name}.conv{number}.weight"], padding=1)
    if f"{name}.nin_shortcut.weight" in tensors:
        x = F.conv2d(hidden, tensors[f"{name}.nin_shortcut.weight"])
    return x + hidden


def plain_end(tensors, name, x):
    norm = f"{name}.norm_out"
    x = F.silu(F.group_norm(x, 32, tensors[f"{norm}.weight"], tensors[f"{norm}.bias"], 1e-6))
    weight = tensors[f"{name}.conv_out.weight"]
    return F.conv2d(x, weight, tensors[f"{name}.conv_out.bias"], padding=weight.shape[-1] // 2)


def plain_mage(tensors, pixels):
    """Return ids and reconstruction of MAGE's VQGAN, layer by layer from its tensors."""
    x = F.conv2d(pixels, tensors["encoder.conv_in.weight"], padding=1)
    for level in range(2):
        for block in range(2):
            x = plain_block(tensors, f"encoder.down.{level}.block.{block}", x)
        x = F.avg_pool2d(x, 2) if level == 0 else x
    for block in (1, 2):
        x = plain_block(tensors, f"encoder.mid.block_{block}", x)
    x = plain_end(tensors, "encoder", x)
    book = tensors["quantize.embedding.weight"]
    ids = torch.cdist(x.flatten(2).mT, book[None]).argmin(-1)
    x = book[ids].mT.unflatten(2, x.shape[2:])
    x = F.conv2d(x, tensors["decoder.conv_in.weight"], tensors["decoder.conv_in.bias"], padding=1)
    for block in (1, 2):
        x = plain_block(tensors, f"decoder.mid.block_{block}", x)
    for level in (1, 0):
        for block in range(2):
            x = plain_block(tensors, f"decoder.up.{level}.block.{block}", x)
        if level:
            name = "decoder.up.1.upsample.conv"
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = F.conv2d(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], padding=1)
    return ids, plain_end(tensors, "decoder", x)


def mage_tensors():
    """Return random tensors in MAGE's format: 32 and 64 channels, 20 entries of size 6."""
    shapes = {"encoder.conv_in.weight": (32, 3, 3, 3), "quantize.embedding.weight": (20, 6)}

    def block(name, inputs, outputs):
        for number, width in ((1, inputs), (2, outputs)):
            shapes[f"{name}.norm{number}.weight"] = shapes[f"{name}.norm{number}.bias"] = (width,)
            shapes[f"{name}.conv{number}.weight"] = (outputs, width, 3, 3)
        if inputs != outputs:
            shapes[f"{name}.nin_shortcut.weight"] = (outputs, outputs, 1, 1)

    def end(name, width, outputs, side):
        shapes[f"{name}.norm_out.weight"] = shapes[f"{name}.norm_out.bias"] = (width,)
        shapes[f"{name}.conv_out.weight"] = (outputs, width, side, side)
        shapes[f"{name}.conv_out.bias"] = (outputs,)

    for level, widths in enumerate(((32, 32), (32, 64))):
        block(f"encoder.down.{level}.block.0", *widths)
        block(f"encoder.down.{level}.block.1", widths[1], widths[1])
    for level, widths in ((1, (64, 64)), (0, (64, 32))):
        block(f"decoder.up.{level}.block.0", *widths)
        block(f"decoder.up.{level}.block.1", widths[1], widths[1])
    for part in ("encoder", "decoder"):
        for number in (1, 2):
            block(f"{part}.mid.block_{number}", 64, 64)
    shapes["decoder.conv_in.weight"], shapes["decoder.conv_in.bias"] = (64, 6, 3, 3), (64,)
    shapes["decoder.up.1.upsample.conv.weight"] = (64, 64, 3, 3)
    shapes["decoder.up.1.upsample.conv.bias"] = (64,)
    end("encoder", 64, 6, 1)
    end("decoder", 32, 3, 3)
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}


def rar_name(name):
    """Return the name of a tensor of MAGE's in `maskgit-vqgan-imagenet-f16-256.bin` of RAR."""
    for theirs, own in ((".block_1.", ".0."), (".block_2.", ".1."), ("sample.c", "sample_c")):
        name = name.replace(theirs, own)
    return name


@pytest.mark.parametrize("named", [str, rar_name])
def test_import_maskgit_checkpoint(tmp_path, named):
    tensors = mage_tensors()
    stored = {named(name): tensor for name, tensor in tensors.items()}
    assert len(stored) == len(tensors)
    torch.save(stored, tmp_path / "maskgit.bin")
    source, run = str(tmp_path / "maskgit.bin"), str(tmp_path / "run")
    assert main(["import", "vqgan", source, run]) == 0
    tokenizer = open_tokenizer(tmp_path / "run")
    images = torch.randint(256, (2, 8, 8, 3), dtype=torch.uint8)
    ids, made = plain_mage(tensors, images.permute(0, 3, 1, 2) / 255)
    assert torch.equal(tokenizer.encode(images), ids)
    shown = (made.clamp(0, 1) * 255).round().permute(0, 2, 3, 1)
    assert (tokenizer.decode(ids).int() - shown).abs().max() <= 1
    plain = {**tokenizer.settings}
    assert plain.pop("layers") == "maskgit"


def llamagen_name(name):
    """Return the name in LlamaGen's files of a tensor of Janus's network."""
    for number, part in enumerate(("block_1", "attn_1", "block_2")):
        name = name.replace(f"mid.{part}.", f"mid.{number}.")
    for side in ("down", "up"):
        name = name.replace(f"coder.{side}.", "coder.conv_blocks.")
    return name.replace(".block.", ".res.")


@pytest.mark.parametrize("averaged", [False, True])
def test_import_llamagen_checkpoint(tmp_path, averaged):
    shape = replace(SHAPE, blocks_per_level=1, multipliers=(1, 2, 2))
    network = janus_network(shape, side=4)
    images = torch.randint(256, (2, 16, 16, 3), dtype=torch.uint8)
    with torch.no_grad():
        encoded = network.encoder(images.permute(0, 3, 1, 2) / 127.5 - 1)
        # Center the vectors, which otherwise share one direction.
        network.quant_conv.bias -= network.quant_conv(encoded).mean((0, 2, 3))
        vectors = F.normalize(network.quant_conv(encoded)).flatten(2).mT
        entries = F.normalize(network.quantize.embedding.weight)
        ids = torch.cdist(vectors, entries[None]).argmin(-1)
        made = network.decode(ids)  # from entries of length 1
    assert len(ids.unique()) > 3
    tensors = {llamagen_name(name): tensor for name, tensor in network.state_dict().items()}
    assert "decoder.conv_blocks.0.res.1.norm1.weight" in tensors
    tensors["quantize.codebook_used"] = torch.zeros(65536)
    content = {"model": tensors}
    if averaged:
        last = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        content = {"model": last, "ema": tensors, "steps": 3, "args": Namespace(lr=1e-4)}
    torch.save(content, tmp_path / "vq_ds16_c2i.pt")
    source, run = str(tmp_path / "vq_ds16_c2i.pt"), str(tmp_path / "run")
    assert main(["import", "vqgan", source, run]) == 0
    tokenizer = open_tokenizer(tmp_path / "run")
    assert torch.equal(tokenizer.encode(images), ids)
    shown = ((made + 1).clamp(0, 2) * 127.5).round().permute(0, 2, 3, 1)
    assert (tokenizer.decode(ids).int() - shown).abs().max() <= 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensors: tensors.pop("quantize.embedding.weight"), "it is not a released VQGAN"),
        (
            lambda tensors: tensors.pop("decoder.conv_in.bias"),
            "have no decoder.conv_in.bias, which a VQGAN has",
        ),
        (
            lambda tensors: tensors.pop("quant_conv.weight"),
            "have no quant_conv.weight, which a VQGAN has",
        ),
    ],
)
def test_invalid_checkpoints(released, tmp_path, capsys, spoil, message):
    spoil(released)
    save_file(released, tmp_path / "a.safetensors")
    assert main(["import", "vqgan", str(tmp_path / "a.safetensors"), str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_pickled_objects_are_refused(tmp_path, capsys):
    torch.save({"state_dict": {}, "callbacks": VQGANShape}, tmp_path / "last.ckpt")
    assert main(["import", "vqgan", str(tmp_path / "last.ckpt"), str(tmp_path / "run")]) == 2
    assert "contains more than tensors" in capsys.readouterr().err
