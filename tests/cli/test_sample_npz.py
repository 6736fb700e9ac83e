"""`megavis sample --npz` writes the sampler's images, for ids and for patches."""

from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny

from megavis.commands.options.shared import spelled
from megavis.commands.sample import write_samples
from megavis.config.errors import UserError
from megavis.data.format.manifest import PALETTE_NAME
from megavis.sampling.sampler import Sampler
from megavis.tokenizers.palette import Palette

pytestmark = pytest.mark.once

DARL = tiny(
    "{name: darl, patch_size: 4, loss: diffusion, order: random, two_streams: true, noise_a: 1}",
    data={"image_size": 8},
    model={"num_layers": 1},
)
NONE = dict.fromkeys(
    (
        "probability", "guidance", "guidance_power", "guidance_schedule", "beams", "fans",
        "rounds", "choice_temperature", "groups",
    )
)  # fmt: skip
OF_IDS = {"temperature": 0.9, "top_k": 5, "top_p": None, "sampling_steps": None}
OF_PATCHES = {"temperature": 0.9, "top_k": None, "top_p": None, "sampling_steps": 2}


@pytest.fixture
def write(context, tmp_path):
    """Write five samples in batches of two; return them and samples of a single batch."""

    def write(objective, inference, options, *, prefix=0.0):
        def sampler(*, seed, spell=str, **chosen):
            return Sampler(inference, objective, tmp_path, chosen, seed=seed, spell=spell)

        opened = SimpleNamespace(
            folder=tmp_path,
            context=context,
            config=objective.config,
            checkpoint=None,
            dtype=torch.float32,
            objective=objective,
            step=1,
            sampler=sampler,
        )
        path = tmp_path / "images.npz"
        sizes = {"num_images": 5, "batch_size": 2, "prefix": prefix, "seed": 3}
        write_samples(opened, Namespace(npz=path, **sizes, **{**NONE, **options}))
        drawing = partial(sampler, seed=3, spell=spelled)(**options)
        return np.load(path)["arr_0"], drawing.to_images(drawing.sample(5)).numpy()

    return write


def test_npz_of_ids(build, write, tmp_path):
    palette = Palette(np.random.default_rng(0).uniform(-1, 1, (32, 3)).astype(np.float32))
    palette.save(tmp_path / PALETTE_NAME)
    written, drawn = write(*build(None, "objective.order=random"), OF_IDS)
    assert np.array_equal(written, drawn)
    assert written.shape == (5, 4, 4, 3)


def test_npz_of_patches(build_paper, write):
    written, drawn = write(*build_paper(DARL), OF_PATCHES)
    assert np.array_equal(written, drawn)


def test_errors(build_gvp, build, write, tmp_path):
    with pytest.raises(UserError, match="runs of gvp cannot generate images without given tokens"):
        write(*build_gvp(), NONE | dict.fromkeys(OF_IDS))
    with pytest.raises(UserError, match="omit --prefix"):
        write(*build(None), OF_IDS, prefix=0.5)
    with pytest.raises(UserError, match="--top-k does not apply to this run of gvp"):
        write(*build_gvp(), OF_IDS | {"temperature": None})
    with pytest.raises(UserError, match="palette"):
        write(*build(None), OF_IDS)
