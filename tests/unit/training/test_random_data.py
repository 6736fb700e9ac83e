"""Random batches have the format of a config's shards."""

import pytest
from tiny import tiny

from megavis.training.bench import random_batch


@pytest.mark.parametrize(
    "objective",
    [
        "{name: igpt, vocabulary_size: 5}",
        "{name: compose, reads: {kind: colors, vocabulary_size: 5}, schedule: {kind: one_by_one},"
        " asks: {kind: shift}, density: {kind: categorical}}",
    ],
)
def test_random_ids_cover_the_vocabulary(build_paper, objective):
    paper, _ = build_paper(tiny(objective))
    ids = random_batch(paper, 4, seed=1).inputs
    assert ids.flatten().unique().tolist() == [0, 1, 2, 3, 4]
