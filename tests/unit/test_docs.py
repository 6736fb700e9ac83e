"""The worked example of docs/add-a-paper.md runs as it is printed, in several layouts."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
STEPS = 6


def blocks(language):
    text = (DOCS / "add-a-paper.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def printed(tmp_path_factory, shards):
    """The printed files on disk: the objective and the YAML, and where the data is."""
    folder = tmp_path_factory.mktemp("paper")
    (folder / "restoration.py").write_text(blocks("python")[0], encoding="utf-8")
    (folder / "tiny.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    return folder, f"data.train={shards}/train"


def train_printed(launch, folder, words):
    """Train the printed paper on this process's part; runs in a worker."""
    from megavis.config.load import load_config
    from megavis.objectives import OBJECTIVES, objective_configs
    from megavis.training.parity import train_briefly

    spec = importlib.util.spec_from_file_location("restoration", folder / "restoration.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["restoration"] = module
    spec.loader.exec_module(module)
    OBJECTIVES["restoration"] = module.Restoration
    config = load_config(folder / "tiny.yaml", words, objectives=objective_configs()).config
    return train_briefly(launch, config, STEPS)


def test_the_printed_paper_trains_alike_in_every_layout(printed):
    from megavis.parallel.workers import WorkerPool

    folder, data = printed
    layouts = ["tensor_model_parallel_size=2", "pipeline_model_parallel_size=2", "zero_stage=3"]
    with WorkerPool(2) as pool:
        alone = pool.run(train_printed, 1, folder, [data])[0]
        split = [pool.run(train_printed, 2, folder, [data, f"parallel.{w}"]) for w in layouts]
    assert alone[-1][0] < alone[0][0], "the loss falls"
    for curves in split:
        for curve in curves:
            for step, expected in zip(curve, alone, strict=True):
                assert step == pytest.approx(expected, rel=1e-5)


def test_the_printed_line_is_the_code_s_own_list():
    source = (DOCS.parent / "megavis/objectives/__init__.py").read_text(encoding="utf-8")
    line = blocks("python")[1].replace('    "restoration": Restoration,\n', "")
    assert line.strip() in source


@pytest.mark.parametrize("path", sorted([*DOCS.glob("*.md"), *DOCS.parent.glob("*.md")]), ids=str)
def test_links_and_named_files_exist(path):
    """Whatever a document points at inside the checkout is there."""
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    missing = [target for target in targets if not (path.parent / target).exists()]
    named = re.findall(
        r"`((?:megavis|docs|launch|tests|yaml_configs|data_tools)/[\w./-]+\.\w+)`", text
    )
    missing += [name for name in named if not (DOCS.parent / name).exists()]
    assert not set(missing) - {"megavis/objectives/restoration.py"}
