"""RandAR: its words, and its presets against the released configs."""

from pathlib import Path

import pytest
import torch
from small_batches import batch_of
from tiny import tiny

from megavis.composition.instruct import Instruct
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.evaluation.token_relations import has_square_features
from megavis.model.stack import LayerStack
from megavis.sampling.sampler import Sampler

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[3] / "yaml_configs" / "randar"
# Blocks, width, heads, and the width of the MLPs, of LlamaGen's sizes, on which RandAR's are
# based. The released configs are of L and XL.
SIZES = {"l": (24, 1024, 16, 2816), "xl": (36, 1280, 20, 3584), "xxl": (48, 1536, 24, 4096)}
# As papers print them, in millions.
PARAMETERS = {"l": 343, "xl": 775, "xxl": 1411}


@pytest.mark.parametrize("size", SIZES)
def test_presets_have_the_released_sizes(size):
    config = load_config(PRESETS / f"{size}.yaml").config
    layers, width, heads, inner = SIZES[size]
    model = config.model
    found = (model.num_layers, model.hidden_size, model.num_attention_heads, model.mlp_size)
    assert found == (layers, width, heads, inner)
    assert model.activation == "swiglu"
    blocks = layers * (4 * width**2 + 3 * width * inner + 2 * width)
    vocabulary = config.objective.vocabulary_size
    total = blocks + 2 * vocabulary * width + (1001 + 2) * width
    assert round(total / 1e6) == PARAMETERS[size]


def test_presets_have_the_released_recipe():
    """`randar_l_0.3b_llamagen.yaml` of the released code."""
    config = load_config(PRESETS / "l.yaml").config
    optimizer, schedule, training = config.optimizer, config.schedule, config.training
    assert (optimizer.learning_rate, optimizer.betas) == (4e-4, (0.9, 0.95))
    assert (optimizer.weight_decay, optimizer.gradient_clipping) == (0.05, 1.0)
    assert (schedule.decay, schedule.warmup_steps) == ("cosine", 50_000)
    assert schedule.min_rate == pytest.approx(0.05 * optimizer.learning_rate)
    assert (training.steps, training.batch_size) == (360_000, 1024)
    assert (training.precision, config.model.hidden_dropout) == ("bf16", 0.1)
    assert (config.objective.label_dropout, config.objective.vocabulary_size) == (0.1, 16_384)


OBJECTIVE = "{name: randar, patch_size: 4, vocabulary_size: 12, num_classes: 3}"
MODEL = {"hidden_size": 16, "num_attention_heads": 2}
CONFIG = tiny(OBJECTIVE, model=MODEL)


def test_first_loss_is_that_of_equal_logits(build_paper):
    """The projection to logits starts with zeros, as in the released code."""
    objective, _ = build_paper(CONFIG)
    layers = LayerStack(objective.layer_plans(), objective.loss)
    ids = torch.randint(12, (3, 16), generator=torch.Generator().manual_seed(0))
    sequence = objective.sequence(batch_of(ids))
    loss = layers(sequence.inputs, sequence.targets)
    torch.testing.assert_close(loss, torch.tensor(12.0).log())
    assert isinstance(objective.asks, Instruct)
    assert objective.grammar.positions == "rope_2d"


def test_embedded_tokens_are_dropped(build_paper):
    """In training: neither the class nor instructions are."""
    objective, _ = build_paper(tiny(OBJECTIVE, model={**MODEL, "embedding_dropout": 0.5}))
    reader = objective.layer_plans()[0].build()
    ids = torch.randint(12, (3, 16), generator=torch.Generator().manual_seed(0))
    inputs = objective.sequence(batch_of(ids)).inputs
    whole, found = (reader.train(is_training)(inputs)[0] for is_training in (False, True))
    assert torch.equal(found[0], whole[0])
    assert torch.equal(found[1::2], whole[1::2])
    tokens, kept = whole[2::2], found[2::2] != 0
    torch.testing.assert_close(found[2::2], 2 * tokens * kept)
    assert 0.4 < kept.float().mean() < 0.6


def test_rounds_complete_an_image(build_paper, tmp_path):
    objective, inference = build_paper(CONFIG, std=0.3)
    sampler = Sampler(inference, objective, tmp_path, {"rounds": 5})
    given = torch.randint(12, (2, 6), generator=torch.Generator().manual_seed(1))
    options = {"given": given, "conditions": {"labels": torch.tensor([0, 2])}}
    tokens = [each.clone() for each in sampler.rounds(torch.arange(2), **options)]
    assert len(tokens) == 5
    assert torch.equal(tokens[-1][:, :6], given)


def test_figures_of_grids_refuse_rows_of_places(build_paper):
    objective, _ = build_paper(
        tiny("{name: randar, patch_size: 4, vocabulary_size: 12, num_classes: 3}")
    )
    with pytest.raises(UserError, match="alternate between places and tokens"):
        has_square_features(objective)
