"""The worked example of docs/add-a-paper.md runs as it is printed, in several layouts."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/add-a-paper.md"
STEPS = 6


def blocks(language):
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def printed(tmp_path_factory, shards):
    """The printed files on disk: the paper's two and the YAML, and where the data is."""
    folder = tmp_path_factory.mktemp("paper")
    keys, model = blocks("python")
    (folder / "restoration_config.py").write_text(keys, encoding="utf-8")
    (folder / "restoration.py").write_text(model, encoding="utf-8")
    (folder / "tiny.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    return folder, f"data.train={shards}/train"


def train_printed(launch, folder, words):
    """Train the printed paper on this process's part; runs in a worker."""
    from megavis import objectives
    from megavis.config.load import load_config
    from megavis.training.parity import train_briefly

    # As if the two files lay in `megavis/objectives`.
    objectives.__path__.append(str(folder))
    config = load_config(
        folder / "tiny.yaml", words, objectives=objectives.objective_configs()
    ).config
    return train_briefly(launch, config, STEPS)


def test_the_printed_paper_trains_alike_in_every_layout(run_job, printed):
    folder, data = printed
    layouts = ["tensor_model_parallel_size=2", "pipeline_model_parallel_size=2", "zero_stage=3"]
    alone = run_job(train_printed, 1, folder, [data])[0]
    split = [run_job(train_printed, 2, folder, [data, f"parallel.{w}"]) for w in layouts]
    assert alone[-1][0] < alone[0][0], "the loss falls"
    for curves in split:
        for curve in curves:
            for step, expected in zip(curve, alone, strict=True):
                assert step == pytest.approx(expected, rel=1e-5)
