"""An encoder that starts from a pretrained Vision Transformer gives its features."""

import pytest
import torch
import torch.nn.functional as F
from plain_vit import embedded, of, run_block
from small_batches import photographs
from tiny import VIT, tiny

import megavis
from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.config.errors import UserError, blame
from megavis.config.load import load_config
from megavis.model.core import MEMORY
from megavis.model.encoder import EncoderOutput
from megavis.model.positions import resize_table
from megavis.weights.released import write_run
from megavis.weights.vits import from_timm

DECODER = "decoder: {num_layers: 1, hidden_size: 8, num_attention_heads: 2}"
WIDE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
VIT_RUN = tiny(
    "{name: darl, patch_size: 8}",
    model={**VIT, **WIDE, "positions": "learned"},
    data={"image_size": 24, "validation": "shards/validation"},
    finetune={"num_classes": 2, "visibility": "full", "read_out": "first"},
    training={"validate_every": 1},
)
MAE_RUN = tiny(
    f"{{name: mae, patch_size: 8, class_token: false, {DECODER}}}",
    model={**VIT, **WIDE},
    data={"image_size": 32},
)
ENCODER = (
    "{name: givt_encoder_decoder, latent_channels: 4, downsampling: 8, encoder_layers: 2,"
    " encoder_patch_size: 8, encoder_hidden_size: 32, encoder_num_attention_heads: 4,"
    " encoder_activation: gelu}"
)


def tuned(words, **keys):
    """Return a run of compose that is fine-tuned with full attention."""
    keys = {"num_classes": 2, "visibility": "full", **keys}
    return tiny(
        f"{{name: compose, {PATCHES}, density: {{kind: squared_error}}, {words}}}",
        model={**VIT, **WIDE, "positions": "learned"},
        data={"image_size": 32, "validation": "shards/validation"},
        finetune=keys,
        training={"validate_every": 1},
    )


PATCHES = "reads: {kind: patches, patch_size: 8}"
UNLIKE = (
    # Rows are normalised, hold the place of another patch or marks, or alternate with others.
    f"schedule: {{kind: context}}, asks: {{kind: visible, norm: true, {DECODER}}}",
    "schedule: {kind: one_by_one}, asks: {kind: shift}",
    "schedule: {kind: masked}, asks: {kind: mask, marks: true}",
    "schedule: {kind: one_by_one}, asks: {kind: instruct}",
    # Blocks are modulated, or attend to a memory.
    "schedule: {kind: masked}, asks: {kind: mask}, condition: {kind: labels, num_classes: 3,"
    " modulation: class}",
    "schedule: {kind: masked}, asks: {kind: mask}, memory: {kind: encoded_image, num_layers: 1}",
)
STATISTICS = ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
KEYS = {"normalization": "layer_norm", "norm_epsilon": 1e-6, "activation": "gelu_tanh"}


def random_vit():
    """Return a ViT for 24² pixels in patches of 8²."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return 0.2 * torch.randn(shape, generator=generator)

    tensors = {
        "cls_token": draw(1, 1, 32),
        "pos_embed": draw(1, 10, 32),
        "patch_embed.proj.weight": draw(32, 3, 8, 8),
    }
    shapes = {"attn.qkv": (96, 32), "attn.proj": (32, 32)}
    shapes |= {"mlp.fc1": (128, 32), "mlp.fc2": (32, 128)}
    layers = {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": draw(*shape) for name, shape in layers.items()}
    tensors |= {f"{name}.bias": draw(shape[0]) for name, shape in layers.items()}
    norms = ["norm", *(f"blocks.{i}.norm{j}" for i in range(2) for j in (1, 2))]
    tensors |= {f"{name}.weight": 1 + draw(32) for name in norms}
    tensors |= {f"{name}.bias": draw(32) for name in [*norms, "patch_embed.proj"]}
    return tensors


def plain_features(vit, images):
    """Return the network's patches without its class token, by formulas."""
    x = embedded(vit, images, STATISTICS)
    x = x + resize_table(vit["pos_embed"][0, 1:], x.shape[1])
    for layer in range(2):
        x = run_block(x, vit, f"blocks.{layer}.", num_heads=4)
    return F.layer_norm(x, (32,), *of(vit, "norm"), 1e-6)


def config_of(folder, *, size=32, model=None):
    """Return the text of an encoder-decoder that starts from `folder`."""
    objective = ENCODER.replace("}", f", encoder_from_run: {folder}}}")
    return tiny(objective, model={**KEYS, **(model or {})}, data={"image_size": size})


def write_source(folder, text, weights):
    """Write a run of the config `text`."""
    path = folder.with_suffix(".yaml")
    path.write_text(text)
    write_run(folder, load_config(path).config, weights)
    return folder


def memory_of(build_paper, text, images):
    """Return what the encoder of a config gives the decoder, `[b, c, h]`."""
    objective, inference = build_paper(text)
    pretrained = objective.pretrained()
    started = set()
    with CheckpointReader(pretrained.checkpoint) as reader:
        for name, parameter in inference.layers.named_parameters():
            value = pretrained.tensor(reader, name)
            if value is not None:
                parameter.data.copy_(value)
                started.add(name)
    encoder = {
        n for n, _ in inference.layers.named_parameters() if n.startswith("embedding.encoder.")
    }
    outside = {f"embedding.encoder.linear.{kind}" for kind in ("weight", "bias")}
    assert started == encoder - outside
    kept = []
    output = next(m for m in inference.layers.modules if isinstance(m, EncoderOutput))
    output.norm.register_forward_hook(lambda module, given, out: kept.append(out))
    assert MEMORY in objective.core.carried_names
    latents = torch.zeros(len(images), 4, images.shape[1] // 8, images.shape[1] // 8)
    inference.predictions(objective.inputs_from(latents, image=images))
    return kept[0].transpose(0, 1)


@pytest.mark.parametrize("size", [24, 32])
def test_the_encoder_gives_a_vision_transformer_s_features(build_paper, tmp_path, size):
    vit, images = random_vit(), photographs(2, size)
    folder = write_source(
        tmp_path / "vit", VIT_RUN, from_timm(vit, num_heads=4, statistics=STATISTICS)
    )
    found = memory_of(build_paper, config_of(folder, size=size), images)
    torch.testing.assert_close(found, plain_features(vit, images), rtol=0, atol=1e-5)


def test_the_encoder_gives_the_features_of_mae(build_paper, tmp_path):
    _, inference = build_paper(MAE_RUN, std=0.2)
    weights = {name: p.detach().clone() for name, p in inference.layers.named_parameters()}
    folder, images = write_source(tmp_path / "mae", MAE_RUN, weights), photographs(2, 32)
    found = memory_of(build_paper, config_of(folder), images)
    expected = megavis.load(folder, device="cpu").features(images, layer=2)
    torch.testing.assert_close(found.mean(1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        (MAE_RUN, {"norm_epsilon": 1e-5}, "has norm_epsilon 1e-06, and the encoder 1e-05"),
        (MAE_RUN.replace("patch_size: 8", "patch_size: 4"), {}, "has patches of 4 pixels"),
        (MAE_RUN.replace("num_layers: 2", "num_layers: 3"), {}, r"3, and the encoder 2 \(obj"),
        (tiny("{name: mp3, patch_size: 8}"), {}, "is a run of mp3; an encoder starts from"),
        (tiny("{name: darl, patch_size: 8}"), {}, "is a run of darl; an encoder starts from"),
        (MAE_RUN.replace("model:", "model:\n  qk_norm: true"), {}, "has qk_norm True, and the enc"),
        *((tuned(words), {}, "is a run of compose; an encoder starts from") for words in UNLIKE),
    ],
)
def test_another_architecture_is_refused(build_paper, tmp_path, source, change, message):
    folder = write_source(tmp_path / "source", source, {"head.norm.weight": torch.ones(1)})
    objective, _ = build_paper(config_of(folder, model=change))
    with (
        pytest.raises(UserError, match=message) as caught,
        blame("objective.encoder_from_run"),
    ):
        objective.pretrained()
    assert str(caught.value).startswith(f"objective.encoder_from_run: {folder} ")
    assert latest_checkpoint(folder) is not None


def test_a_missing_run_is_refused(build_paper, tmp_path):
    objective, _ = build_paper(config_of(tmp_path / "none"))
    match = "^objective.encoder_from_run: .*none"
    with pytest.raises(UserError, match=match), blame("objective.encoder_from_run"):
        objective.pretrained()
