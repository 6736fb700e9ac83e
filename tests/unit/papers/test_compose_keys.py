"""Messages about a composition's tensors and shards name keys of its config, not of a paper's."""

import pytest
import torch
from compositions import (
    ADAPTER,
    CATEGORICAL,
    CLASSES,
    IDS,
    LATENTS,
    MIXTURE,
    ONE_BY_ONE,
    PALETTE,
    PATCHES,
    SHIFT,
)

from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest

NORMALIZED = "density: {kind: squared_error, normalize: true}"
ALONE = "{kind: ids, vocabulary_size: 12, patch_size: 4}"


def test_guidance_names_the_dropout_of_the_condition(build_composition):
    never = CLASSES.replace("}", ", dropout: 0}")
    objective, _ = build_composition(PATCHES, ONE_BY_ONE, SHIFT, MIXTURE, never)
    with pytest.raises(UserError, match=r"trained with objective\.condition\.dropout"):
        objective.condition.null((torch.zeros(2),))
    objective, _ = build_composition(PATCHES, ONE_BY_ONE, SHIFT, MIXTURE)
    with pytest.raises(UserError, match="this one has no classes"):
        objective.condition.null(())


def test_transform_names_its_key(build_composition):
    objective, _ = build_composition(LATENTS, ONE_BY_ONE, SHIFT, MIXTURE, ADAPTER)
    with pytest.raises(UserError, match=r"with objective\.transform every token"):
        objective.given(torch.zeros(1, 4, 4, 4))


def test_tokens_name_the_section_that_they_come_from(build_composition):
    objective, _ = build_composition(PATCHES, f"predicts: {IDS}", ONE_BY_ONE, SHIFT, CATEGORICAL)
    with pytest.raises(UserError, match=r"objective\.predicts\.vocabulary_size 12 allows"):
        objective.predicts.check_values(torch.tensor([[12]]))
    objective, _ = build_composition(PALETTE, ONE_BY_ONE, SHIFT, CATEGORICAL)
    with pytest.raises(UserError, match=r"objective\.reads\.vocabulary_size 32 allows"):
        objective.reads.check_values(torch.tensor([[32]]))
    objective, _ = build_composition(f"reads: {ALONE}", ONE_BY_ONE, SHIFT, CATEGORICAL)
    with pytest.raises(UserError, match=r"name it in objective\.reads\.tokenizer"):
        objective.reads.to_images(torch.zeros(1, 16, dtype=torch.int64))
    objective, _ = build_composition(LATENTS, ONE_BY_ONE, SHIFT, MIXTURE)
    with pytest.raises(UserError, match=r"run folder in objective\.reads\.tokenizer"):
        objective.reads.to_images(torch.zeros(1, 4, 4, 4))
    manifest = Manifest.model_construct(kind="latents", latent_shape=(5, 4, 4))
    (text,) = objective.reads.check(manifest, "compose")
    assert "(objective.reads.channels, data.image_size / objective.reads.patch_size)" in text
