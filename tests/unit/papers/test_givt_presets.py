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
