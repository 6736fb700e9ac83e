"""The presets have the sizes of the released code."""

from pathlib import Path

import pytest

from megavis.config.load import load_config
from megavis.papers import build_objective
from megavis.planning.parameters import by_part, count_parameters

FOLDER = Path(__file__).parents[3] / "yaml_configs" / "givt"


@pytest.mark.parametrize(
    ("name", "words", "millions"),
    [
        ("causal_base", [], "86.385"),
        ("causal_default", [], "304.010"),
        ("causal_default", ["objective.adapter_blocks=8"], "304.121"),
        ("causal_large", [], "1664.330"),
        ("causal_large_512", [], "1667.133"),
        ("maskgit", [], "304.014"),
        ("maskgit_512", [], "304.800"),
    ],
)
def test_presets_have_the_published_parameters(context, name, words, millions):
    path = FOLDER / f"{name}.yaml"
    config = load_config(path, words).config
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


def read(name):
    return load_config(FOLDER / f"{name}.yaml").config


@pytest.mark.parametrize(("name", "beta", "vae", "size"), VAES)
def test_presets_take_the_vae_of_table_5(name, beta, vae, size):
    config = read(name)
    assert config.objective.tokenizer_beta == beta == read(vae).objective.beta
    assert config.objective.tokenizer == read(vae).folder
    assert config.data.image_size == size


def test_latents_of_another_vae_or_size_lie_in_another_folder():
    folders = {}
    for name, _, vae, size in VAES:
        folders.setdefault(read(name).data.train, set()).add((vae, size))
    assert len(folders) == 4
    assert all(len(made_by) == 1 for made_by in folders.values())


@pytest.mark.parametrize("name", ["vae", "vae_large", "causal_default_crops"])
def test_images_are_cut_as_the_released_code_does(name):
    """Appendix C.2; givt_imagenet2012.py: area_min=80, area_max=100, ratio_min=ratio_max=1.0."""
    data = read(name).data
    assert (data.crop, data.scale, data.aspect) == ("random_resized", (0.8, 1.0), (1, 1))
    assert data.flip


def test_the_vae_keeps_an_average_of_its_weights():
    """givt_imagenet2012.py: config.vae.model_load.use_ema_params = True."""
    assert read("vae").optimizer.ema_decay == read("vae_large").optimizer.ema_decay == 0.9999


def test_the_encoder_decoder_is_that_of_section_4_2():
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
    assert targets.folder == paper.tokenizer
