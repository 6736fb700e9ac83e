"""The worked example of docs/add-a-paper.md matches the checkout and trains as printed."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/add-a-paper.md"
PAPERS = ["megavis/papers/igpt/config.py", "megavis/papers/mae/config.py"]
STEPS = 6


def blocks(language):
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_printed_files_match_the_checkout():
    printed = [*blocks("python"), blocks("yaml")[0]]
    for name, block in zip([*PAPERS, "yaml_configs/mae/tiny.yaml"], printed, strict=True):
        assert block == (ROOT / name).read_text(encoding="utf-8"), name


def test_papers_have_at_most_110_lines():
    assert max(len(block.splitlines()) for block in blocks("python")) <= 110


def train_printed(launch, path, words):
    """Train the printed paper; runs in a worker."""
    from megavis.config.load import load_config
    from megavis.training.parity import train_briefly

    config = load_config(path, words).config
    return train_briefly(launch, config, STEPS)


NEXT_TOKEN = ["objective={name: igpt, vocabulary_size: 64, order: round_robin}", "data.crop=none"]


@pytest.mark.parametrize("name", ["mae", "igpt"])
def test_printed_papers_in_layouts_match_one_process(name, run_job, shards, image_shards, tmp_path):
    path, data = tmp_path / "tiny.yaml", [f"data.train={image_shards}/train"]
    if name == "igpt":
        data = [f"data.train={shards}/train", "data.image_size=8", *NEXT_TOKEN]
    path.write_text(blocks("yaml")[0], encoding="utf-8")
    layouts = ["tensor_model_parallel_size=2", "pipeline_model_parallel_size=2", "zero_stage=3"]
    alone = run_job(train_printed, 1, path, data)[0]
    split = [run_job(train_printed, 2, path, [*data, f"parallel.{w}"]) for w in layouts]
    assert alone[-1][0] < alone[0][0], "the loss does not fall"
    for curves in split:
        for curve in curves:
            for step, expected in zip(curve, alone, strict=True):
                assert step == pytest.approx(expected, rel=1e-5)
