"""The figures that a message calls those of a run: each can be drawn, for every kind of model."""

import shutil
from pathlib import Path

import pytest
from small_configs import SMALL, config_writer

from megavis.cli import read_arguments
from megavis.commands.figure import complete, figures_of, plot_of
from megavis.config.load import load_config
from megavis.config.papers import paper_figures
from megavis.notebook import Run
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import read_launch

pytestmark = pytest.mark.once

# Label maps have files of their own; these decode without them.
NAMES = [name for name, small in SMALL.items() if small.data != "label_maps"]


@pytest.fixture(scope="module")
def context():
    yield open_context(read_launch({}), device="cpu")
    close_context()


@pytest.fixture(scope="module")
def write_config(shards, image_shards, tmp_path_factory):
    return config_writer(shards, image_shards, tmp_path_factory.mktemp("figures"))


def held_out_of(config):
    """Return shards in the form of the run's, which need not be held out where it is untrained."""
    return config.data.validation or config.data.train_sources[0].path


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_figure_is_drawn(name, context, write_config, shards):
    config = load_config(write_config(name)).config
    folder = Path(config.folder)
    folder.mkdir(parents=True)
    if SMALL[name].data == "palette":
        shutil.copy(shards / "palette.npy", folder)
    opened = Run(config, folder=folder, checkpoint=None, context=context)
    listed = figures_of(opened)
    declared = {spec.name: spec for spec in paper_figures()}
    images = ["--images", held_out_of(config), "--num-images", "2"]
    for figure in {"completions", *declared} & {*listed}:
        words = ["figure", figure, str(folder), *images]
        if figure == "completions":
            complete(opened, read_arguments([*words, "--draws", "1", "--completions", "1"]))
        else:
            plot_of(opened, read_arguments(words))
        assert (folder / "evaluation" / f"{figure}.png").exists()
