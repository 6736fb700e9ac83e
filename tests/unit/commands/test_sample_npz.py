"""`megavis sample --npz` of runs that draw ids or patches: the images that they draw anyway."""

from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megavis.commands.sample_npz import write_samples
from megavis.config.errors import UserError
from megavis.sampling.batches import sample_ids
from megavis.sampling.patchwise import sample_patches
from megavis.sampling.pictures import to_pixels
from megavis.tokenizers.palette import Palette

pytestmark = pytest.mark.once

DARL = """\
name: small
objective: {name: darl, patch_size: 4, loss: diffusion, order: random, two_streams: true,
  noise_a: 1}
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2}
data: {train: shards/train, image_size: 8}
optimizer: {learning_rate: 1e-2}
training: {steps: 3, batch_size: 8}
"""
OPTIONS = {"temperature": 0.9, "top_k": 5, "top_p": None, "sampling_steps": 2, "seed": 3}


@pytest.fixture
def write(context, tmp_path):
    """Write five images of a model in batches of two; returns them."""

    def write(objective, runner, *, palette=None, prefix=0.0):
        opened = SimpleNamespace(
            objective=objective,
            runner=runner,
            palette=palette,
            context=context,
            config=objective.config,
            step=1,
        )
        path = tmp_path / "images.npz"
        sizes = {"num_images": 5, "batch_size": 2, "prefix": prefix}
        write_samples(opened, Namespace(npz=path, **sizes, **OPTIONS))
        return np.load(path)["arr_0"]

    return write


def test_images_drawn_id_by_id(build, write):
    objective, runner = build(None, "objective.order=random")
    palette = Palette(np.random.default_rng(0).uniform(-1, 1, (32, 3)).astype(np.float32))
    ids = sample_ids(runner, objective, num_images=5, temperature=0.9, top_k=5, seed=3)
    assert np.array_equal(write(objective, runner, palette=palette), to_pixels(ids, palette))


def test_images_drawn_patch_by_patch(build_paper, write):
    objective, runner = build_paper(DARL)
    images = sample_patches(runner, objective, num_images=5, num_steps=2, temperature=0.9, seed=3)
    assert torch.equal(torch.from_numpy(write(objective, runner)), images)


def test_what_draws_nothing_is_refused(build_gvp, build, write):
    with pytest.raises(UserError, match="runs of gvp draw no images from nothing"):
        write(*build_gvp())
    with pytest.raises(UserError, match="leave --prefix out"):
        write(*build(None), prefix=0.5)
