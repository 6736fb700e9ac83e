"""AIM against the equations of its released code in plain torch, on the same random weights."""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from image_shards import write_image_shards
from PIL import Image
from safetensors.torch import save_file
from small_batches import batch_of, photographs, run_layers
from tiny import VIT, tiny
from torch.utils._python_dispatch import TorchDispatchMode

import megavis
from megavis.checkpoint.format.manifest import read_manifest
from megavis.cli import main
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.sampling.sampler import Sampler
from megavis.tokenizers.patches import standardize
from megavis.weights import aim
from megavis.weights.aim import aim_table
from megavis.weights.tables import read_table

# Loading a run opens a job unless one is open.
pytestmark = [pytest.mark.once, pytest.mark.usefixtures("context")]

WIDTH, HEADS, LAYERS, CLASSES = 32, 4, 3, 5
HEAD = "{num_layers: 2, hidden_size: 24}"
CONFIG = tiny(
    f"{{name: aim, patch_size: 4, head: {HEAD}}}",
    model={
        **VIT,
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "add_bias": False,
    },
)
PROBE = (
    f"finetune={{num_classes: {CLASSES}, visibility: full, read_out: attention,"
    " linear_evaluation: true, average: 2}",
    "model.features=blocks",
    "data.validation=held",
    "training.validate_every=1",
)


@pytest.fixture
def make(build_paper):
    """Build a model of sixteen patches."""
    return lambda *words: build_paper(CONFIG, *words, std=0.2)


# The released code, from its equations.


def released():
    """Return random tensors under the names of the released code."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return 0.3 * torch.randn(*shape, generator=generator)

    shapes = {
        "preprocessor.patchifier.proj.weight": (WIDTH, 3, 4, 4),
        "preprocessor.patchifier.proj.bias": (WIDTH,),
        "head.cls_token": (1, 1, WIDTH),
        "head.k.weight": (WIDTH, WIDTH),
        "head.v.weight": (WIDTH, WIDTH),
        "head.linear.weight": (CLASSES, WIDTH),
        "head.bn.running_mean": (WIDTH,),
    }
    norms = ["preprocessor.patchifier.norm", "trunk.post_trunk_norm"]
    for i in range(LAYERS):
        block = f"trunk.blocks.{i}"
        norms += [f"{block}.norm_1", f"{block}.norm_2"]
        shapes |= {
            f"{block}.attn.qkv.weight": (3 * WIDTH, WIDTH),
            f"{block}.attn.proj.weight": (WIDTH, WIDTH),
            f"{block}.mlp.fc1.weight": (4 * WIDTH, WIDTH),
            f"{block}.mlp.fc2.weight": (WIDTH, 4 * WIDTH),
        }
    shapes |= {f"{name}.{kind}": (WIDTH,) for name in norms for kind in ("weight", "bias")}
    tensors = {name: random(*shape) for name, shape in shapes.items()}
    tensors["head.bn.running_var"] = 1 + random(WIDTH).square()
    tensors["head.bn.num_batches_tracked"] = torch.tensor(7)
    return tensors


def sines(width):
    """Return the positions of 4 × 4 patches: column, then row; sines, then cosines."""
    rows = []
    for place in range(16):
        for coordinate in (place % 4, place // 4):
            count = width // 4
            angles = [coordinate / 10_000 ** (i / count) for i in range(count)]
            rows += [*map(math.sin, angles), *map(math.cos, angles)]
    return torch.tensor(rows).view(16, width)


def normed(tensors, name, x):
    given = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return F.layer_norm(x, x.shape[-1:], *given, 1e-6)


def trunk(tensors, images, *, prefix=None):
    """Return the output of each block, and the last norm's, `[b, n, h]`.

    `prefix` has the length of each image's; a patch attends to it and to those up to itself. None:
    to all.
    """
    pixels = standardize(images).permute(0, 3, 1, 2)
    kernel = tensors["preprocessor.patchifier.proj.weight"]
    bias = tensors["preprocessor.patchifier.proj.bias"]
    x = F.conv2d(pixels, kernel, bias, stride=4).flatten(2).transpose(1, 2)
    x = normed(tensors, "preprocessor.patchifier.norm", x) + sines(WIDTH)
    outputs = []
    for i in range(LAYERS):
        block = f"trunk.blocks.{i}"
        y = normed(tensors, f"{block}.norm_1", x)
        stacked = (y @ tensors[f"{block}.attn.qkv.weight"].T).unflatten(-1, (3, HEADS, -1))
        query, key, value = stacked.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        if prefix is not None:
            for image, length in enumerate(prefix):
                for row in range(16):
                    scores[image, :, row, max(row + 1, length) :] = -math.inf
        y = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + y @ tensors[f"{block}.attn.proj.weight"].T
        y = F.gelu(normed(tensors, f"{block}.norm_2", x) @ tensors[f"{block}.mlp.fc1.weight"].T)
        x = x + y @ tensors[f"{block}.mlp.fc2.weight"].T
        outputs.append(x)
    return outputs, normed(tensors, "trunk.post_trunk_norm", x)


def probe(tensors, layers):
    """Return the logits of the mean of some blocks' outputs, from the released head."""
    x = sum(layers) / len(layers)
    variance = tensors["head.bn.running_var"]
    x = (x - tensors["head.bn.running_mean"]) / (variance + 1e-6).sqrt()
    query = tensors["head.cls_token"].view(HEADS, -1)
    key, value = (
        (x @ tensors[f"head.{name}.weight"].T).unflatten(-1, (HEADS, -1)) for name in ("k", "v")
    )
    scores = torch.einsum("hd,bnhd->bhn", query, key) / (WIDTH // HEADS) ** 0.5
    pooled = torch.einsum("bhn,bnhd->bhd", scores.softmax(-1), value).flatten(1)
    return pooled @ tensors["head.linear.weight"].T


def copy(inference, tensors, probed=LAYERS):
    """Copy released weights, by the table, to the layers that have them."""
    table = aim_table(num_layers=LAYERS, num_heads=HEADS, patch_size=4, probed=probed)
    ours = read_table(table, tensors)
    named = dict(inference.layers.named_parameters()) | dict(inference.layers.named_buffers())
    with torch.no_grad():
        for name, tensor in ours.items():
            if name in named:
                named[name].copy_(tensor)
    return named.keys() - ours.keys()


def seen(inference, layer):
    """Return a list to which the input of a layer's norm is appended."""
    found = []
    norm = inference.layers.modules[layer].feature_norm
    norm.register_forward_hook(lambda _, entering, out: found.extend([entering[0], out]))
    return found


# Equal to it.


def test_features_equal_the_released_trunk(make):
    """With full attention, and without asking for it, since for features all is prefix."""
    tensors, images = released(), photographs(3, 16)
    blocks, last = trunk(tensors, images)
    objective, inference = make("model.features=blocks")
    copy(inference, tensors)
    found = seen(inference, -1)
    features = inference.features(objective.feature_inputs(batch_of(images)))
    torch.testing.assert_close(found[0].transpose(0, 1), blocks[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].transpose(0, 1), last, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(features[1:], blocks, strict=True):
        torch.testing.assert_close(ours, theirs.mean(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["prefix", "causal"])
def test_loss_equals_the_equations(make, attention):
    """Trunk with prefix attention, MLP head, squared error of the patches after the prefix."""
    tensors, images = released(), photographs(3, 16)
    objective, inference = make(f"objective.attention={attention}")
    own = copy(inference, tensors)
    assert {name.split(".")[1] for name in own} == {"entry", "decoder"}
    sequence = objective.training_sequence(batch_of(images, first=5))
    predictions = run_layers(inference.layers.modules, sequence.inputs)

    lengths = [1, 1, 1]
    if attention == "prefix":
        groups = objective.schedule.draw(torch.arange(5, 8)).groups
        lengths = (groups == 0).sum(1).tolist()
        assert len(set(lengths)) > 1
    _, x = trunk(tensors, images, prefix=lengths)
    head = {name.removeprefix("head."): p for name, p in inference.layers.named_parameters()}
    x = x @ head["entry.weight"].T + sines(24)
    for i in range(2):
        layer = f"decoder.layers.{i}"
        y = F.gelu(normed(head, f"{layer}.norm", x) @ head[f"{layer}.mlp.linear_fc1.weight"].T)
        x = x + y @ head[f"{layer}.mlp.linear_fc2.weight"].T
    x = normed(head, "decoder.norm", x) @ head["decoder.linear.weight"].T
    x = x + head["decoder.linear.bias"]
    torch.testing.assert_close(predictions, x, rtol=1e-4, atol=1e-4)

    patches = standardize(images).unflatten(1, (4, 4)).unflatten(3, (4, 4))
    patches = patches.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)
    mean, deviation = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
    patches = (patches - mean) / (deviation + 1e-6).sqrt()
    losses = [(x[i, n - 1 : -1] - patches[i, n:]).square().mean() for i, n in enumerate(lengths)]
    loss = objective.loss(predictions, sequence.targets)
    torch.testing.assert_close(loss, sum(losses) / 3, rtol=1e-4, atol=0)


def test_attentive_probe_equals_the_released_head(make):
    tensors, images = released(), photographs(3, 16)
    objective, inference = make(*PROBE)
    assert copy(inference, tensors) == set()
    logits = inference.predictions(objective.inputs_from(images))
    blocks, _ = trunk(tensors, images)
    torch.testing.assert_close(logits, probe(tensors, blocks[-2:]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("probed", [[0, 1], [1, 2], 2])
def test_released_weights_are_imported(tmp_path, probed):
    tensors, images = released(), photographs(3, 16)
    folder, run = tmp_path / "released", tmp_path / "runs" / "aim"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    settings = {"img_size": 16, "num_heads": HEADS, "probe_layers": probed}
    (folder / "config.json").write_text(json.dumps(settings))
    assert main(["import", "aim", str(folder), str(run)]) == 0
    logits = megavis.load(run).outputs(images)
    blocks, _ = trunk(tensors, images)
    layers = blocks[-probed:] if isinstance(probed, int) else [blocks[i] for i in probed]
    torch.testing.assert_close(logits, probe(tensors, layers), rtol=1e-4, atol=1e-4)


def test_imported_classifier_is_evaluated_on_given_images(parts, monkeypatch, capsys):
    monkeypatch.setattr(aim, "_HEAD_SIZE", WIDTH // HEADS)
    monkeypatch.setattr(aim, "_IMAGE_SIZE", 16)
    assert import_parts(parts, "--head-layers", "last") == 0
    images = photographs(4 * CLASSES, 16)
    for number, image in enumerate(images):
        path = parts / "images" / str(number % CLASSES) / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.numpy()).save(path)
    shards = write_image_shards(parts / "images", parts / "shards")
    command = ["ensemble", str(parts / "runs" / "aim")]
    assert main(command) == 2
    assert "has imported weights and no test images; name shards with --images" in (
        capsys.readouterr().err
    )
    assert main([*command, "--images", str(shards), "--json", str(parts / "found.json")]) == 0
    blocks, _ = trunk(released(), images)
    answers = probe(released(), blocks).argmax(1)
    right = (answers == torch.arange(len(images)) % CLASSES).sum() / len(images)
    (row,) = json.loads((parts / "found.json").read_text())["rows"]
    assert row["top1"] == pytest.approx(float(right))


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that is created in memory."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type != "meta":
            self.size = max(self.size, made.numel())
        return made


def test_trunk_without_a_head_is_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(aim, "_IMAGE_SIZE", 16)
    tensors = {n: t for n, t in released().items() if not n.startswith("head.")}
    torch.save(tensors, tmp_path / "trunk.pth")
    run = tmp_path / "runs" / "aim"
    assert main(["import", "aim", str(tmp_path / "trunk.pth"), str(run)]) == 0
    config = load_config(run / "config.yaml").config
    assert (config.finetune.layer, config.finetune.average) == (LAYERS, LAYERS)
    assert config.model.num_attention_heads == 1
    with LargestTensor() as largest:
        opened = megavis.load(run)
    # Without the decoder of 12 layers of width 2048, which a classifier does not run.
    assert 0 < largest.size < 2048**2
    assert torch.equal(opened.outputs(photographs(1, 16)), torch.zeros(1, 2))
    head = opened.inference.layers.modules[-1].classifier
    head.train().requires_grad_(True)
    with torch.enable_grad():
        head(torch.randn(3, 2, WIDTH)).sum().backward()
    assert head.linear.weight.grad.abs().min() > 0


@pytest.fixture
def parts(tmp_path):
    """A trunk's file and a probe's, as they were released."""
    tensors = released()
    for name, is_head in (("trunk", False), ("head", True)):
        own = {n: t for n, t in tensors.items() if n.startswith("head.") == is_head}
        torch.save(own, tmp_path / f"{name}.pth")
    return tmp_path


def import_parts(parts, *words):
    named = [
        str(parts / "trunk.pth"),
        str(parts / "runs" / "aim"),
        "--head",
        str(parts / "head.pth"),
    ]
    return main(["import", "aim", *named, *words])


@pytest.mark.parametrize(
    ("chosen", "blocks_read"), [("best", [0, 1]), ("last", [0, 1, 2]), ("1,2", [1, 2])]
)
def test_head_of_its_own_file_reads_the_chosen_layers(parts, monkeypatch, chosen, blocks_read):
    monkeypatch.setitem(aim._BEST, WIDTH, range(0, 2))
    monkeypatch.setattr(aim, "_HEAD_SIZE", WIDTH // HEADS)
    monkeypatch.setattr(aim, "_IMAGE_SIZE", 16)
    assert import_parts(parts, "--head-layers", chosen) == 0
    tensors, images = released(), photographs(3, 16)
    blocks, _ = trunk(tensors, images)
    expected = probe(tensors, [blocks[i] for i in blocks_read])
    opened = megavis.load(parts / "runs" / "aim")
    torch.testing.assert_close(opened.outputs(images), expected, rtol=1e-4, atol=1e-4)
    origin = read_manifest(opened.checkpoint).origin
    assert all(f"{name}.pth has the SHA-256" in origin for name in ("trunk", "head"))


def test_best_layers_are_those_of_the_released_code():
    """`LAYERS_BEST`, of 600M, 1B, 3B and 7B, whose widths table 1 of the paper has."""
    first = {1536: 14, 2048: 12, 3072: 12, 4096: 14}
    assert {width: [*blocks] for width, blocks in aim._BEST.items()} == {
        width: [*range(start, start + 6)] for width, start in first.items()
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--head needs --head-layers"),
        (["--head-layers", "best"], "--head-layers is best: say last, numbers of adjacent blocks"),
        (["--head-layers", "0,2"], "--head-layers is 0,2: .* from 0 to 2"),
        (["--head-layers", "2,3"], "--head-layers is 2,3"),
        (["--head-layers", "six"], "--head-layers is six"),
    ],
)
def test_layers_of_a_head_must_be_named(parts, capsys, words, message):
    assert import_parts(parts, *words) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_trunk_is_no_head(parts, capsys):
    torch.save(released(), parts / "head.pth")
    assert import_parts(parts, "--head-layers", "last") == 2
    assert "not a head of AIM: preprocessor.patchifier.norm.bias" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trunk.blocks.1.norm_1.bias": None}, "the weights have no trunk.blocks.1.norm_1.bias"),
        ({"trunk.cls": torch.zeros(1)}, "trunk.cls does not belong to AIM"),
        ({"head.k.weight": torch.zeros(3, WIDTH)}, r"head.k.weight has shape \[3, 32\]"),
    ],
)
def test_what_is_no_released_network_is_named(tmp_path, capsys, change, message):
    tensors = {n: t for n, t in (released() | change).items() if t is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": HEADS, "probe_layers": 2}))
    assert main(["import", "aim", str(tmp_path), str(tmp_path / "runs" / "aim")]) == 2
    assert re.search(message, capsys.readouterr().err)


# Keys.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.patch_size=5"], "5 does not divide data.image_size 16"),
        (
            ["objective.patch_size=16"],
            "objective.attention: a drawn prefix needs at least two tokens",
        ),
        (["objective.order=round_robin"], "round_robin is not an order of this paper"),
        (["objective.head={hidden_size: 6}"], "objective.head.positions: the width 6"),
        (["model.positions=rope_2d", "model.hidden_size=4"], "head width divisible by 4|rope_2d"),
    ],
)
def test_incompatible_keys(make, words, message):
    with pytest.raises(UserError, match=message):
        make(*words)


def test_a_model_of_normalised_patches_generates_nothing(make):
    objective, _ = make()
    reason = objective.config.objective.cannot_generate(objective.config)
    assert "set objective.normalize_targets to false" in reason
    objective, _ = make("objective.normalize_targets=false")
    assert objective.config.objective.cannot_generate(objective.config) is None


def test_given_patches_are_a_prefix_with_a_cache_and_without(make, tmp_path):
    """They attend to each other: the first drawn patch is that of a full pass with their mask."""
    objective, inference = make("objective.normalize_targets=false")
    images = photographs(3, 16)
    given = objective.tokens_of(images)[:, :6]
    drawing = Sampler(inference, objective, tmp_path, {}, seed=0)
    drawn = [
        drawing.tokens(torch.arange(3), given=given, cached=cached) for cached in (True, False)
    ]
    torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=1e-5)

    def seventh(prefix):
        inputs = objective.inputs_from(images, prefix=prefix)
        return objective.outputs(inference.predictions(inputs))[:, 5]

    torch.testing.assert_close(drawn[0][:, 6], seventh(6), rtol=0, atol=1e-5)
    assert not torch.isclose(seventh(1), seventh(6), atol=1e-3).all()
