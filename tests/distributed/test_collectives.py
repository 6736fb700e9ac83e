"""What a block exchanges with its tensor group in a step."""

from collections import Counter

import pytest
from step_jobs import collectives

BASE = [
    "parallel.tensor_model_parallel_size=2",
    "model.add_bias=true",
    "training.micro_batch_size=8",
]
SPLIT = "parallel.sequence_parallel=true"
# Two of attention and two of the MLP, in each pass.
REDUCED = Counter({"allreduce": 4})
# The same as a gather and a scatter each; and inputs that are kept split are gathered again.
GATHERED = Counter({"allgather_base": 6, "reduce_scatter_base": 4})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], REDUCED),
        ([SPLIT], GATHERED),
        ([SPLIT, "model.normalization=layer_norm", "model.norm_bias=all"], GATHERED),
        ([SPLIT, "parallel.zero_stage=1"], GATHERED),
        ([SPLIT, "parallel.zero_stage=2"], GATHERED),
        ([SPLIT, "parallel.zero_stage=3"], GATHERED),
    ],
)
def test_a_block_exchanges_hidden_states_only(run_job, tiny_config, words, expected):
    """By models of two depths; no gradient of a norm or bias has a collective of its own."""

    def count(depth):
        depths = f"model.num_layers={depth}"
        found, _ = run_job(collectives, 2, str(tiny_config), [*BASE, *words, depths])
        return found

    shallow, deep = count(2), count(4)
    per_block = deep.big - shallow.big
    assert {name: calls / 2 for name, calls in per_block.items()} == dict(expected)
    assert deep.tiny == shallow.tiny
