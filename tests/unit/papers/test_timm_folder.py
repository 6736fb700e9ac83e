"""A converted timm ViT has the features of timm and of its formulas."""

import argparse
import json

import pytest
import torch
from plain_vit import timm_features
from safetensors.torch import save_file
from small_batches import batch_of, photographs
from timm_alone import whole_timm
from tiny import VIT, tiny

from megavis.config.errors import UserError
from megavis.tokenizers.patches import standardize
from megavis.weights.tables import read_table
from megavis.weights.timm_folder import read_timm, timm_settings
from megavis.weights.vits import from_timm

pytestmark = pytest.mark.once

CONFIG = tiny(
    "{name: darl, patch_size: 8}",
    model={**VIT, "hidden_size": 32, "num_attention_heads": 4, "positions": "learned"},
    data={"image_size": 24},
)
SIZES = {"img_size": 24, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}


def random_tensors(*, classes=5):
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "cls_token": (1, 1, 32),
        "pos_embed": (1, 10, 32),
        "patch_embed.proj.weight": (32, 3, 8, 8),
        "patch_embed.proj.bias": (32,),
        "norm.weight": (32,),
        "norm.bias": (32,),
        "head.weight": (classes, 32),
        "head.bias": (classes,),
    }
    for i in range(2):
        for name, rows, columns in (
            ("attn.qkv", 96, 32),
            ("attn.proj", 32, 32),
            ("mlp.fc1", 128, 32),
            ("mlp.fc2", 32, 128),
        ):
            shapes[f"blocks.{i}.{name}.weight"] = (rows, columns)
            shapes[f"blocks.{i}.{name}.bias"] = (rows,)
        for name in ("norm1", "norm2"):
            shapes[f"blocks.{i}.{name}.weight"] = (32,)
            shapes[f"blocks.{i}.{name}.bias"] = (32,)
    return {n: 0.2 * torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def last_norm(head, state):
    """Return the output `[b, s, h]` of the final norm."""
    return head.norm.own(head.normed(state))


@pytest.fixture
def features(build_paper):
    """Compute features of a converted network with unmasked megavis blocks."""

    def features(model, images, **options):
        objective, inference = build_paper(CONFIG, visibility="full")
        weights = from_timm(model, num_heads=4, **options)
        for name, parameter in inference.layers.named_parameters():
            # timm has no pixel decoder.
            if not name.startswith("head.linear."):
                parameter.data.copy_(weights.pop(name))
        assert sorted(weights) == [f"head.classifier.linear.{kind}" for kind in ("bias", "weight")]
        inputs = objective.feature_inputs(batch_of(images))
        return inference.predictions(inputs, finish=last_norm)

    return features


STATISTICS = [((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,) * 3, (0.5,) * 3)]


@pytest.mark.parametrize(("mean", "deviation"), STATISTICS)
def test_features_match_formulas(features, mean, deviation):
    tensors, options = random_tensors(), {"statistics": (mean, deviation)}
    expected = timm_features(tensors, photographs(2, 24), num_heads=4, **options)
    assert expected.shape == (2, 10, 32)
    found = features(tensors, photographs(2, 24), **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.fixture
def timm():
    """Import timm without torchvision."""
    with whole_timm() as package:
        yield package


def test_features_match_timm(timm, features):
    torch.manual_seed(0)
    network = timm.models.vision_transformer.VisionTransformer(num_classes=5, **SIZES).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tensors, images = network.state_dict(), photographs(2, 24)
    with torch.no_grad():
        expected = network.forward_features(standardize(images).permute(0, 3, 1, 2))
    torch.testing.assert_close(features(tensors, images), expected, rtol=0, atol=1e-4)
    plain = timm_features(tensors, images, num_heads=4)
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("pooling", [{}, {"global_pool": "avg", "pool_include_prefix": True}])
def test_a_folder_that_timm_saved_has_its_logits(timm, tmp_path, pooling):
    import megavis

    options = {**pooling, "fc_norm": False} if pooling else {}
    name = "vit_base_patch16_224"
    network = timm.create_model(name, pretrained=False, num_classes=5, **SIZES, **options).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    names = list("abcde")
    timm.models.save_for_hf(
        network, tmp_path / "vit", model_config={"label_names": names}, safe_serialization=True
    )
    read_folder(tmp_path / "vit").write(tmp_path / "run")
    run, images = megavis.load(tmp_path / "run", device="cpu"), photographs(2, 24)
    assert run.classes == tuple(names)
    mean, deviation = (network.pretrained_cfg[key] for key in ("mean", "std"))
    pixels = (images / 255 - torch.tensor(mean)) / torch.tensor(deviation)
    with torch.no_grad():
        expected = network(pixels.permute(0, 3, 1, 2))
    torch.testing.assert_close(run.outputs(images), expected, rtol=0, atol=1e-4)


def test_timm_builds_the_exported_mlp(timm):
    """timm rounds the product of a width and a ratio down: 448 · (488 / 448) is below 488."""
    sizes = {"hidden_size": 448, "num_hidden_layers": 1, "num_attention_heads": 7}
    sizes |= {"image_size": 24, "patch_size": 8, "layer_norm_eps": 1e-6}
    for inner in (488, 489, 920, 1792):
        arguments = timm_settings({**sizes, "intermediate_size": inner}, [])["model_args"]
        with torch.device("meta"):
            network = timm.models.vision_transformer.VisionTransformer(**arguments)
        assert network.blocks[0].mlp.fc1.out_features == inner


def write_folder(folder, tensors, settings=None):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    if settings is not None:
        (folder / "config.json").write_text(json.dumps(settings))
    return folder


def read_folder(folder, heads=None):
    return read_timm(argparse.Namespace(source=folder, heads=heads))


def test_sizes_are_read_from_the_folder(tmp_path):
    settings = {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3}}
    folder = write_folder(tmp_path / "vit", random_tensors(), settings)
    released = read_folder(folder, heads=4)
    model = released.sections["model"]
    assert (model.num_layers, model.hidden_size, model.mlp_size) == (2, 32, 128)
    assert (released.objective.patch_size, released.image_size) == (8, 24)
    assert (released.sections["finetune"].num_classes, model.num_attention_heads) == (5, 4)
    options = {"num_heads": 4, "statistics": ([0.5] * 3, [0.25] * 3)}
    found = read_table(released.table, released.tensors)
    expected = from_timm(random_tensors(), **options)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.0.ls1.gamma": torch.zeros(32)}, r"has layer scale \(blocks.0.ls1.gamma\); only"),
        ({"blocks.0.ls3.gamma": torch.zeros(32)}, "blocks.0.ls3.gamma does not belong"),
        ({"reg_token": torch.zeros(1, 4, 32)}, r"has register tokens \(reg_token\); only a plain"),
        ({"cls_token": None}, "have no cls_token"),
        ({"blocks.1.mlp.fc2.bias": None}, "have no blocks.1.mlp.fc2.bias"),
        ({"pos_embed": torch.zeros(1, 9, 32)}, "8 positions after that of the class token"),
    ],
)
def test_unsupported_networks_are_refused(tmp_path, change, message):
    tensors = {k: v for k, v in {**random_tensors(), **change}.items() if v is not None}
    folder = write_folder(tmp_path / "vit", tensors)
    with pytest.raises(UserError, match=message):
        read_folder(folder).write(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        ({"model_args": {"num_heads": 4, "embed_dim": 32, "depth": 2}}, 4),
        ({"architecture": "vit_huge_patch14_224"}, 16),
        ({"architecture": "test_vit"}, 2),
        ({}, 1),
    ],
)
def test_heads_are_those_of_the_folder(tmp_path, settings, heads):
    folder = write_folder(tmp_path / "vit", random_tensors(), settings)
    assert read_folder(folder).sections["model"].num_attention_heads == heads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 4}, "--heads 2: .* says 4; leave the option out"),
        ({"num_heads": "4"}, "num_heads is '4', not a positive integer"),
        ({"embed_dim": 64}, "embed_dim is 64, and the weights have 32"),
        ({"depth": 3}, "depth is 3, and the weights have 2"),
        ({"act_layer": "quick_gelu"}, "act_layer is 'quick_gelu'; only 'gelu' can be imported"),
        ({"class_token": False}, "class_token is False; only True"),
        ({"mlp_layer": "swiglu"}, "mlp_layer is 'swiglu'; such a ViT has other layers"),
        ({"global_pool": "avg"}, "global_pool is 'avg' with fc_norm None; only 'token' can be"),
        ({"global_pool": "avg", "fc_norm": False}, "global_pool is 'avg' with fc_norm False"),
        ({"fc_norm": True}, "global_pool is 'token' with fc_norm True"),
        ([], None),
        ({"act_layer": "gelu", "qkv_bias": True, "init_values": None, "drop_rate": 0.1}, None),
    ],
)
def test_arguments_that_change_the_network_are_refused(tmp_path, arguments, message):
    folder = write_folder(tmp_path / "vit", random_tensors(), {"model_args": arguments})
    if message is None:
        assert read_folder(folder, heads=2).sections["model"].num_attention_heads == 2
        return
    with pytest.raises(UserError, match=message):
        read_folder(folder, heads=2)


def test_a_pool_at_the_top_counts_and_classes_have_names(tmp_path):
    settings = {"label_names": list("abcde"), "pretrained_cfg": {"mean": [0.5] * 2}}
    folder = write_folder(tmp_path / "vit", random_tensors(), settings)
    with pytest.raises(UserError, match=r"mean is \[0.5, 0.5\], not three numbers"):
        read_folder(folder)
    del settings["pretrained_cfg"]
    (folder / "config.json").write_text(json.dumps(settings))
    assert read_folder(folder).classes == tuple("abcde")
    (folder / "config.json").write_text(json.dumps({**settings, "global_pool": "max"}))
    with pytest.raises(UserError, match="global_pool is 'max'"):
        read_folder(folder)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="missing; the folder has no files; save the model"):
        read_folder(tmp_path)


def test_heads_must_divide(tmp_path):
    folder = write_folder(tmp_path / "vit", random_tensors())
    with pytest.raises(UserError, match="32 is not divisible by 5 heads"):
        read_folder(folder, heads=5)


@pytest.mark.usefixtures("context")
def test_import_command(tmp_path, capsys):
    import megavis
    from megavis.cli import main

    folder = write_folder(tmp_path / "vit", random_tensors())
    assert main(["import", "timm", str(folder), str(tmp_path / "run"), "--heads", "4"]) == 0
    assert "parameters from" in capsys.readouterr().out
    logits = megavis.load(tmp_path / "run").outputs(photographs(2, 24))
    larger = megavis.load(tmp_path / "run", image_size=48)
    assert larger.outputs(torch.zeros(1, 48, 48, 3, dtype=torch.uint8)).shape == (1, 5)
    tensors = random_tensors()
    tokens = timm_features(tensors, photographs(2, 24), num_heads=4)
    expected = tokens[:, 0] @ tensors["head.weight"].t()
    torch.testing.assert_close(logits, expected + tensors["head.bias"], rtol=0, atol=1e-4)
