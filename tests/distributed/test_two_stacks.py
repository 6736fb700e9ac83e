"""A paper with a second stack behind a bridge matches one process in every layout."""

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
    """Train the paper of tests/two_stacks; runs in a worker."""
    from megavis import papers
    from megavis.config.load import load_config
    from megavis.training.parity import train_briefly

    # Make the folder a subpackage of `megavis.papers`.
    if str(FOLDER) not in papers.__path__:
        papers.__path__.append(str(FOLDER))
    words = ["objective.name=two_stacks", "parallel.zero_stage=0", *words]
    config = load_config(path, words).config
    return train_briefly(launch, config, STEPS)


@pytest.fixture(scope="module")
def alone(run_job, tiny_config):
    [curve] = run_job(train_two_stacks, 1, str(tiny_config), [])
    assert curve[-1][0] < curve[0][0], "the loss does not fall"
    return curve


@pytest.mark.parametrize(("num_processes", "layout"), LAYOUTS)
def test_layouts_match_one_process(run_job, tiny_config, alone, num_processes, layout):
    words = [f"parallel.{word}" for word in layout]
    for curve in run_job(train_two_stacks, num_processes, str(tiny_config), words):
        for step, expected in zip(curve, alone, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)
