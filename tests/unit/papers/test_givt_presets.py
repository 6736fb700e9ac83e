"""GIVT's presets against Tables 5 and 6 and section 4.1 of the paper, and the released code."""

from pathlib import Path

import pytest
import torch
from protocols import load_run

from megavis.config.load import load_config
from megavis.model.parameters import options_of
from megavis.papers import build_objective
from megavis.planning.parameters import by_part, count_parameters
from megavis.tokenizers.label_map_vae import LabelMapShape, LabelMapVAE

pytestmark = pytest.mark.once

FOLDER = Path(__file__).parents[3] / "yaml_configs" / "givt"


def read(name):
    return load_run("givt", name)


# Table 5: image size, d, k, width, depth, MLP width, heads, tokens, dropout, β.
SIZES = {
    "causal_base": (256, 16, 16, 768, 12, 3072, 12, 256, 0.1, 5e-5),
    "causal_default": (256, 16, 16, 1024, 24, 4096, 16, 256, 0.2, 5e-5),
    "causal_large": (256, 16, 16, 1536, 48, 8192, 16, 256, 0.3, 1e-5),
    "causal_large_512": (512, 32, 32, 1536, 48, 8192, 16, 512, 0.1, 1e-5),
    "maskgit": (256, 16, 16, 1024, 24, 4096, 16, 256, 0.4, 5e-5),
    "maskgit_512": (512, 16, 16, 1024, 24, 4096, 16, 1024, 0.4, 5e-5),
}
SIZES |= {
    "causal_unconditional": SIZES["causal_default"],
    "causal_large_adapter": SIZES["causal_large"],
    "causal_large_512_adapter": SIZES["causal_large_512"],
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_match_table_5(name):
    config = read(name)
    model, paper = config.model, config.objective
    latents = (config.data.image_size // paper.downsampling) ** 2
    assert SIZES[name] == (
        config.data.image_size,
        paper.latent_channels * paper.stacked_latents,
        paper.num_components,
        model.hidden_size,
        model.num_layers,
        model.mlp_size,
        model.num_attention_heads,
        latents // paper.stacked_latents,
        model.mlp_dropout,
        paper.tokenizer_beta,
    )
    assert model.attention_dropout == model.attention_output_dropout == model.mlp_dropout


@pytest.mark.parametrize("name", SIZES)
def test_training_matches_section_4_1(name):
    """Adam at 1e-3, cosine over 500 epochs with 50 of warm-up, weight decay 1e-4, batch 8192.

    The released code applies the decay after the learning rate, clips gradients at 1, and trains
    MaskGIT without decay.
    """
    config = read(name)
    batch, images = 8192, 1_281_167
    assert config.training.batch_size == batch
    assert config.training.steps == pytest.approx(500 * images / batch, rel=1e-4)
    assert config.schedule.decay == "cosine"
    assert config.schedule.warmup_steps == pytest.approx(50 * images / batch, rel=3e-3)
    optimizer = config.optimizer
    assert (optimizer.algorithm, optimizer.betas[1]) == ("adam", 0.95)
    assert (optimizer.learning_rate, optimizer.gradient_clipping) == (1e-3, 1.0)
    decay = 0.0 if name.startswith("maskgit") else 1e-4
    assert optimizer.weight_decay * optimizer.learning_rate == pytest.approx(decay)
    assert (config.data.flip, config.model.activation) == (True, "gelu_tanh")


@pytest.mark.parametrize("name", SIZES)
def test_classes_and_adapters_match_section_4_1(name):
    paper = read(name).objective
    free = name == "causal_unconditional"
    assert (paper.num_classes, paper.label_dropout) == ((0, 0.0) if free else (1000, 0.1))
    # "8 bijective iRevNet blocks" of 4 d hidden channels; 8 d in the released code at 512².
    adapted = name.endswith("adapter")
    assert paper.adapter_blocks == (8 if adapted else 0)
    assert paper.adapter_bottleneck == (8 * 32 if "512" in name and adapted else None)


@pytest.mark.parametrize("name", ["vae", "vae_large"])
def test_vae_matches_the_released_code(name):
    """Table 6 is an image; the numbers are in givt_imagenet2012.py: config.vae.model."""
    paper = read(name).objective
    assert (paper.latent_channels, paper.filters, paper.blocks_per_level) == (16, 128, 2)
    assert paper.multipliers == (1, 1, 2, 2, 4)
    assert paper.beta == {"vae": 5e-5, "vae_large": 1e-5}[name]
    assert read(name).data.image_size == 256


@pytest.mark.parametrize(
    ("name", "words", "millions"),
    [
        ("causal_base", [], "86.385"),
        ("causal_default", [], "304.010"),
        ("causal_default", ["objective.adapter_blocks=8"], "304.121"),
        ("causal_unconditional", [], "302.986"),
        ("causal_large", [], "1664.330"),
        ("causal_large_512", [], "1667.133"),
        ("maskgit", [], "304.014"),
        ("maskgit_512", [], "304.800"),
    ],
)
def test_parameter_counts(context, name, words, millions):
    config = load_config(FOLDER / f"{name}.yaml", words).config if words else read(name)
    total = sum(by_part(count_parameters(build_objective(config, context))).values())
    assert f"{total / 1e6:.3f}" == millions


# Table 5: preset, β of its VAE, the VAE's preset, image size.
VAES = [
    ("causal_default", 5e-5, "vae", 256),
    ("causal_large", 1e-5, "vae_large", 256),
    ("causal_large_512", 1e-5, "vae_large", 512),
    ("causal_large_4x8_h100", 1e-5, "vae_large", 256),
    ("maskgit", 5e-5, "vae", 256),
    ("maskgit_512", 5e-5, "vae", 512),
]


@pytest.mark.parametrize(("name", "beta", "vae", "size"), VAES)
def test_presets_use_the_vae_of_table_5(name, beta, vae, size):
    config = read(name)
    assert config.objective.tokenizer_beta == beta == read(vae).objective.beta
    assert config.objective.tokenizer == str(read(vae).folder)
    assert config.data.image_size == size


@pytest.mark.parametrize("name", ["vae", "vae_large", *SIZES, "causal_large_4x8_h100"])
def test_every_epoch_crops_as_the_released_code(name):
    """Appendix C.2; givt_imagenet2012.py: area_min=80, area_max=100, ratio_min=ratio_max=1.0.

    Stored latents would be of one crop, or of a few.
    """
    data = read(name).data
    assert (data.crop, data.scale, data.aspect) == ("inception", (0.8, 1.0), (1, 1))
    assert data.flip
    assert (data.train, data.validation) == (
        "shards/imagenet_jpeg/train",
        "shards/imagenet_jpeg/validation",
    )


@pytest.mark.parametrize("name", ["vae", "encoder_decoder"])
@pytest.mark.parametrize("task", ["coco_panoptic", "nyu_depth"])
def test_crops_of_label_maps_match_the_released_code(name, task):
    """vae_coco_panoptic.py and givt_coco_panoptic.py: inception_box, with UViM's defaults."""
    data = read(f"{name}_{task}").data
    assert (data.crop, data.scale, data.aspect) == ("inception", (0.05, 1.0), (0.75, 1.33))


def test_vae_uses_ema():
    """givt_imagenet2012.py: config.vae.model_load.use_ema_params = True."""
    assert read("vae").optimizer.ema_decay == read("vae_large").optimizer.ema_decay == 0.9999


def test_encoder_decoder_matches_section_4_2():
    """Section 4.2, and givt_coco_panoptic.py of the released code."""
    config = read("encoder_decoder")
    model, paper = config.model, config.objective
    assert (model.num_layers, paper.encoder_layers, paper.encoder_patch_size) == (24, 24, 16)
    assert (paper.latent_channels, paper.num_components) == (16, 1)
    assert (config.data.image_size // paper.downsampling) ** 2 == 256
    assert not model.has_dropout
    assert config.training.steps == round(200 * (118_287 - 4096) / 512)
    assert (config.training.batch_size, config.schedule.warmup_steps) == (512, 4000)
    assert config.optimizer.weight_decay == pytest.approx(1e-6 / 1e-3)
    targets = read("vae_targets")
    assert targets.objective.beta == 2.5e-4
    assert 2 ** (len(targets.objective.multipliers) - 1) == paper.downsampling
    assert str(targets.folder) == paper.tokenizer


@pytest.mark.parametrize(
    ("name", "steps", "warmup"),
    [
        ("encoder_decoder_coco_panoptic", 200 * 114_191 // 512, 4000),
        ("encoder_decoder_nyu_depth", 50 * 47_584 // 512, 50 * 47_584 // 512 // 10),
    ],
)
def test_dense_prediction_matches_the_released_code(name, steps, warmup):
    config = read(name)
    optimizer, paper, vae = config.optimizer, config.objective, read(f"vae_{name[16:]}")
    assert abs(config.training.steps - steps) <= 1
    assert config.schedule.warmup_steps == warmup
    assert (optimizer.algorithm, optimizer.betas, optimizer.learning_rate) == (
        "adafactor",
        (0.9, 0.95),
        1e-3,
    )
    assert optimizer.weight_decay * optimizer.learning_rate == pytest.approx(1e-6)
    assert (paper.encoder_learning_rate_scale, paper.encoder_layers) == (0.1, 24)
    assert (paper.num_components, paper.grammar(config).reads.grid(config.data)) == (1, (16, 16))
    assert paper.tokenizer == str(vae.folder)
    assert (vae.objective.latent_channels, vae.objective.downsampling) == (16, 32)


def test_encoder_learning_rate_scale(context):
    path = FOLDER / "encoder_decoder_coco_panoptic.yaml"
    words = ["model.num_layers=1", "objective.encoder_layers=1", "model.hidden_size=64"]
    config = load_config(path, words).config
    objective = build_objective(config, context)
    for plan in objective.layer_plans():
        for name, parameter in plan.build().named_parameters():
            is_encoder = f"{plan.name}.{name}".startswith("embedding.encoder.")
            expected = 0.1 if is_encoder else 1.0
            assert options_of(parameter).learning_rate_scale == expected, f"{plan.name}.{name}"


@pytest.mark.parametrize(("name", "channels"), [("vae_coco_panoptic", 234), ("vae_nyu_depth", 256)])
def test_label_map_vae_parameter_count(context, name, channels):
    config = read(name)
    counted = sum(by_part(count_parameters(build_objective(config, context))).values())
    with torch.device("meta"):
        network = LabelMapVAE(LabelMapShape.from_config(config.model_dump()))
    assert counted == sum(parameter.numel() for parameter in network.parameters())
    width, latent, patch = 768, 16, 16 * 16 * channels
    block = 4 * width * width + 4 * width + 2 * width * 3072 + 3072 + width + 4 * width
    maps = (patch + 1) * width + (width + 1) * patch
    between = (width + 1) * 2 * latent + (latent + 1) * width
    assert counted == 18 * block + maps + between + 2 * 1024 * width + 2 * 2 * width
