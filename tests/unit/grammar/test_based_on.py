"""A config that is based on another may choose other kinds: their keys replace the old ones."""

import pytest
from tiny import tiny

from megavis.config.errors import UserError
from megavis.config.load import load_config

pytestmark = pytest.mark.once
WORDS = (
    "{name: compose, reads: {kind: colors, vocabulary_size: 32},"
    " schedule: {kind: one_by_one, prefix: 8}, asks: {kind: shift, place: content},"
    " density: {kind: categorical, head_std: 0.0}}"
)


@pytest.fixture
def read(tmp_path):
    def read(base, own):
        (tmp_path / "base.yaml").write_text(tiny(base))
        path = tmp_path / "own.yaml"
        path.write_text(f"based_on: base.yaml\nname: own\nobjective: {own}\n")
        return load_config(path).config.objective

    return read


def test_another_kind_replaces_a_word(read):
    objective = read(WORDS, "{schedule: {kind: rounds}, asks: {kind: mask}}")
    assert (objective.schedule.kind, objective.asks.kind) == ("rounds", "mask")
    assert (objective.reads.vocabulary_size, objective.density.head_std) == (32, 0.0)


def test_the_same_kind_keeps_its_keys(read):
    objective = read(WORDS, "{schedule: {order: nested_raster}, asks: {kind: shift}}")
    assert (objective.schedule.prefix, objective.schedule.order) == (8, "nested_raster")
    assert objective.asks.place == "content"


def test_another_paper_replaces_the_objective(read):
    objective = read("{name: igpt, vocabulary_size: 32, order: random}", WORDS)
    assert (objective.name, objective.schedule.order) == ("compose", "raster")
    other = read("{name: igpt, order: random}", "{name: mae, patch_size: 4}")
    assert (other.name, other.patch_size) == ("mae", 4)
    form = read("{name: givt, latent_channels: 4, downsampling: 4}", "{name: givt_maskgit}")
    assert (form.name, form.latent_channels) == ("givt_maskgit", 4)
    kept = read("{name: igpt, vocabulary_size: 32}", "{name: igpt, mode: bert}")
    assert (kept.vocabulary_size, kept.mode) == (32, "bert")


def test_keys_of_the_other_kind_are_refused(read):
    with pytest.raises(UserError, match=r"objective\.schedule\.prefix: unknown key"):
        read(WORDS, "{schedule: {kind: rounds, prefix: 8}, asks: {kind: mask}}")
