"""A second stack behind a bridge trains alike in every layout, cut into stages by work."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "two_stacks"
STEPS = 5
LAYOUTS = [
    (2, ["tensor_model_parallel_size=2"]),
    (2, ["tensor_model_parallel_size=2", "sequence_parallel=true", "zero_stage=1"]),
    (2, ["pipeline_model_parallel_size=2"]),
    pytest.param(2, ["zero_stage=3"], marks=pytest.mark.once),
    (
        4,
        [
            "tensor_model_parallel_size=2",
            "pipeline_model_parallel_size=2",
            "sequence_parallel=true",
        ],
    ),
]


def train_two_stacks(launch, path, words):
    """Train on this process's part; runs in a worker."""
    from megavis import papers
    from megavis.config.load import load_config
    from megavis.training.parity import train_briefly

    # As if the folder lay in `megavis/papers`.
    if str(FOLDER) not in papers.__path__:
        papers.__path__.append(str(FOLDER))
    words = ["objective.name=two_stacks", "parallel.zero_stage=0", *words]
    config = load_config(path, words).config
    return train_briefly(launch, config, STEPS)


@pytest.fixture(scope="module")
def alone(run_job, tiny_config):
    [curve] = run_job(train_two_stacks, 1, str(tiny_config), [])
    assert curve[-1][0] < curve[0][0], "the loss falls"
    return curve


@pytest.mark.parametrize(("num_processes", "layout"), LAYOUTS)
def test_two_stacks_train_alike_in_every_layout(run_job, tiny_config, alone, num_processes, layout):
    words = [f"parallel.{word}" for word in layout]
    for curve in run_job(train_two_stacks, num_processes, str(tiny_config), words):
        for step, expected in zip(curve, alone, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)
