"""Compiled blocks in layouts of several processes, against the same layout with plain operators."""

import pytest
from compiled_jobs import compiled_curve
from layout_curves import TOLERANCE, largest_difference, make_config, with_layout

from megavis.training.parity import train_briefly

STEPS = 2
TENSOR = {"tensor_model_parallel_size": 2, "zero_stage": 1}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
OF_PARTS = {"attention_dropout": 0.1, "mlp_dropout": 0.2}
OF_TOKENS = {**OF_PARTS, "hidden_dropout": 0.2}


def curves(run_job, path, layout, dropout):
    config = with_layout(make_config(path, "training.batch_size=4"), **layout)
    config = config.model_copy(update={"model": config.model.model_copy(update=dropout)})
    plain = run_job(train_briefly, 2, config, STEPS, "cpu")
    found = run_job(compiled_curve, 2, config, STEPS, "aot_eager")
    return plain, found


@pytest.mark.parametrize(
    ("layout", "dropout"),
    [
        (TENSOR, OF_PARTS),
        (SEQUENCE, OF_TOKENS),
        pytest.param({**SEQUENCE, "activation_checkpointing": "full"}, {}, marks=pytest.mark.once),
        pytest.param({"zero_stage": 2}, OF_TOKENS, marks=pytest.mark.once),
        pytest.param({"zero_stage": 3}, {}, marks=pytest.mark.once),
    ],
)
def test_each_block_is_one_graph_with_the_numbers_of_plain_operators(
    run_job, tiny_config, layout, dropout
):
    plain, found = curves(run_job, tiny_config, layout, dropout)
    for _, taken in found:
        assert taken.failure is None
        assert taken.graphs >= 1
    assert largest_difference([curve for curve, _ in found], plain[0]) <= TOLERANCE


def test_draws_for_whole_and_for_split_tokens_are_not_compiled(run_job, tiny_config):
    """A graph cannot change generators between what must agree and what must differ."""
    plain, found = curves(run_job, tiny_config, TENSOR, OF_TOKENS)
    assert [taken.graphs for _, taken in found] == [0, 0]
    assert [curve for curve, _ in found] == plain
