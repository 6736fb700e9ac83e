"""Commands on models of every kind: each result is right, or one sentence says what is missing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_configs import SMALL, config_writer

from megavis.cli import read_arguments
from megavis.commands.figure import complete, figures_of, plot_of
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.papers import paper_figures
from megavis.notebook import Run
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import read_launch
from megavis.weights.own_folder import PlainForm

pytestmark = pytest.mark.once

# Label maps have files of their own; these decode without them.
NAMES = [name for name, small in SMALL.items() if small.data != "label_maps"]
NEED_MEGAVIS = {"igpt": "hide tokens that are drawn"}
NEED_MEGAVIS |= dict.fromkeys(
    ["givt", "givt_encoder_decoder", "compose_adapter", "compose_memory"], "adapter or an encoder"
)
NEED_MEGAVIS |= dict.fromkeys(
    ["rar", "compose_modulated", "compose_modulated_queries"], "modulated by the class"
)
NEED_MEGAVIS |= dict.fromkeys(
    ["randar", "compose_instruct", "compose_denoised_modulated"], "stand between its tokens"
)
NEED_MEGAVIS |= dict.fromkeys(["mar", "compose_rounds_by_order"], "normalised before")
NEED_MEGAVIS["givt_maskgit"] = "half of a token's embedding"
NEED_MEGAVIS["mp3_relative"] = "relative positions"
NEED_MEGAVIS["compose_features"] = "a condition besides"


@pytest.fixture(scope="module")
def context():
    yield open_context(read_launch({}), device="cpu")
    close_context()


@pytest.fixture(scope="module")
def write_config(shards, image_shards, tmp_path_factory):
    return config_writer(shards, image_shards, tmp_path_factory.mktemp("figures"))


def held_out_of(config):
    """Return shards in the form of the run's training data."""
    train = Path(config.data.train_sources[0].path)
    return config.data.validation or str(train.with_name("validation"))


@pytest.fixture
def opened(name, context, write_config, shards):
    """The run of a small model, with its initial weights."""
    config = load_config(write_config(name)).config
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if SMALL[name].data == "palette":
        shutil.copy(shards / "palette.npy", folder)
    return Run(config, folder=folder, checkpoint=None, context=context)


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_figure_is_drawn(name, opened):
    listed = figures_of(opened)
    declared = {spec.name: spec for spec in paper_figures()}
    images = ["--images", held_out_of(opened.config), "--num-images", "2"]
    for figure in {"completions", *declared} & {*listed}:
        words = ["figure", figure, str(opened.folder), *images]
        if figure == "completions":
            words += ["--draws", "1", "--completions", "1"]
            words += ["--sampling-steps", "2"] * ("diffusion" in SMALL[name].objective)
            complete(opened, read_arguments(words))
        else:
            plot_of(opened, read_arguments(words))
        assert (opened.folder / "evaluation" / f"{figure}.png").exists()


@pytest.mark.parametrize("name", NAMES)
def test_labels_of_a_loss_are_checked(name, opened):
    images = opened.objective.backbone.blank_batch(2, torch.device("cpu")).inputs
    with pytest.raises(UserError, match=r"labels must be in 0\.\.|not conditioned on labels"):
        opened.loss(images, labels=[0, 99])


@pytest.mark.parametrize("name", NAMES)
def test_form_that_opens_without_megavis(name, opened, tmp_path):
    """What the loader that `megavis export --to huggingface` writes reads; it gives the same."""
    if name in NEED_MEGAVIS:
        with pytest.raises(UserError, match=NEED_MEGAVIS[name]):
            PlainForm(opened)
    else:
        form = PlainForm(opened)
        weights = {key: each.detach() for key, each in opened.inference.layers.named_parameters()}
        save_file({**weights, **form.tensors}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"plain": form.settings}))
        assert form.check(tmp_path) <= 1e-4
        assert form.expected.isfinite().all()
