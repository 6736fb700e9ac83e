"""Figures of errors by patch, completions and reconstructions."""

import csv
import math

import numpy as np
import pytest
import torch
from compositions import CLASSES, CONTENT, MIXTURE, ONE_BY_ONE, PATCHES
from PIL import Image
from tiny import tiny

from megavis.config.errors import UserError
from megavis.evaluation.images.pair_metrics import (
    repeat_last_row,
    score_completions,
    signal_to_noise,
)
from megavis.papers.darl import patch_errors
from megavis.papers.darl.patch_errors import PatchErrors, patch_rows, plot_patch_errors
from megavis.papers.givt import deviation_figure

pytestmark = pytest.mark.once


def config(folder, shards, objective="{name: darl, patch_size: 4, order: nested_raster}"):
    return tiny(
        objective,
        shards=shards,
        validates=True,
        name="tiny_darl",
        output=str(folder),
        model={"num_layers": 1},
        training={"steps": 2},
    )


@pytest.fixture(scope="module")
def run_folder(image_shards, tmp_path_factory):
    """A run of two steps."""
    from megavis.cli import main

    folder = tmp_path_factory.mktemp("runs")
    path = folder / "c.yaml"
    path.write_text(config(folder, image_shards))
    assert main(["train", str(path), "--device", "cpu"]) == 0
    return folder / "tiny_darl"


def test_signal_to_noise():
    true = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    made = true.clone()
    made[0] = 255
    made[1] = 51
    assert signal_to_noise(made, true).tolist() == pytest.approx([0.0, 20 * math.log10(5)])


def test_repeat_last_row():
    images = torch.arange(4 * 4 * 3, dtype=torch.uint8).view(1, 4, 4, 3)
    repeated = repeat_last_row(images, 2)
    assert torch.equal(repeated[:, :2], images[:, :2])
    assert torch.equal(repeated[:, 2], images[:, 1])
    assert torch.equal(repeated[:, 3], images[:, 1])


def test_completions_need_whole_rows():
    images = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    given = torch.eye(4, dtype=torch.bool)[None]
    with pytest.raises(UserError, match="does not start with whole rows"):
        score_completions(images, images[None], given)


def test_completions_and_their_mean_are_scored_separately():
    originals = torch.full((2, 4, 4, 3), 100, dtype=torch.uint8)
    originals[:, 1] = 90
    above, below = originals.clone(), originals.clone()
    above[:, 2:] += 20
    below[:, 2:] -= 10
    given = (torch.arange(4) < 2)[None, :, None].expand(2, 4, 4)
    scores = score_completions(originals, torch.stack([above, below]), given)

    def decibels(error):
        return pytest.approx(10 * math.log10(255**2 / error))

    assert scores.completed == decibels((20**2 + 10**2) / 2)
    assert scores.mean == decibels(5**2)
    assert scores.repeated == decibels(10**2)
    assert scores.rows[1].psnr_mean_of_completions == decibels(5**2)


def test_errors_by_patch(run_folder, capsys):
    from megavis.cli import main
    from megavis.notebook import Run
    from megavis.parallel.context import close_context

    assert main(["figure", "patches", str(run_folder), "--num-images", "20"]) == 0
    assert "patches.png" in capsys.readouterr().out
    with (run_folder / "evaluation" / "patches.csv").open() as file:
        rows = list(csv.DictReader(file))
    # The order of blocks of 2 x 2 on a grid of 4 x 4.
    order = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    by_cell = [float(row["cell_error"]) for row in rows]
    assert [float(row["error"]) for row in rows] == pytest.approx([by_cell[i] for i in order])
    assert [float(row["cell_mean_place"]) for row in rows] == [order.index(i) for i in range(16)]
    opened = Run.open(run_folder, device="cpu")
    try:
        images = held_out(opened, 20)
        loss = opened.loss(images)
    finally:
        close_context()
    assert sum(by_cell) / 16 == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(("prefix", "applies"), [("", True), (", prefix: 3", False)])
def test_tokens_of_a_prefix_have_no_figures_of_predictions(build_composition, prefix, applies):
    """Its rows attend to the tokens that they would predict."""
    schedule = ONE_BY_ONE.replace("}", f"{prefix}}}")
    objective, _ = build_composition(PATCHES, schedule, CONTENT, MIXTURE, CLASSES)
    assert patch_errors.applies(objective) == applies
    assert deviation_figure.applies(objective) == applies


def test_errors_on_a_grid_that_is_not_square():
    """Eight tokens of two latents each: four rows of two."""
    errors = PatchErrors([*range(8)], [*range(8)], [*range(8)], columns=2)
    cells = [(row["cell_row"], row["cell_column"]) for row in patch_rows(errors)]
    assert cells == [(i // 2, i % 2) for i in range(8)]
    line, order, shown, *_ = plot_patch_errors(errors, name="stacked").axes
    assert line.get_ylabel() == "mean loss"
    for axes in (order, shown):
        assert axes.images[0].get_array().tolist() == [[2 * i, 2 * i + 1] for i in range(4)]


def held_out(opened, count):
    from megavis.data.loading.dataset import ShardDataset
    from megavis.data.loading.loader import read_batch

    places = np.arange(count)
    return read_batch(ShardDataset(opened.config.data.validation), places, places).inputs


def test_completions(run_folder, capsys):
    from megavis.cli import main

    command = ["figure", "completions", str(run_folder), "--num-images", "9", "--completions", "1"]
    assert main([*command, "--draws", "2"]) == 0
    assert "mean of 2 completions" in capsys.readouterr().out
    with (run_folder / "evaluation" / "completions.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 9
    assert (run_folder / "evaluation" / "completions.png").exists()


def test_reconstructions(image_shards, tmp_path, capsys):
    from megavis.cli import main

    objective = (
        "{name: mae, patch_size: 4,"
        " decoder: {num_layers: 1, hidden_size: 16, num_attention_heads: 2}}"
    )
    path = tmp_path / "c.yaml"
    path.write_text(config(tmp_path, image_shards, objective))
    assert main(["train", str(path), "--device", "cpu"]) == 0
    folder = tmp_path / "tiny_darl"
    assert main(["figure", "reconstructions", str(folder), "--num-images", "9"]) == 0
    assert "PSNR of the hidden patches of 9 images: predicted" in capsys.readouterr().out
    with (folder / "evaluation" / "reconstructions.csv").open() as file:
        rows = {row["hidden"]: float(row["psnr"]) for row in csv.DictReader(file)}
    assert rows["predicted"] < rows["mean colours"]
    # Eight rows of three images of 128² pixels, with lines of two between them.
    pixels = np.asarray(Image.open(folder / "evaluation" / "reconstructions.png"))
    assert pixels.shape == (8 * 130 + 2, 3 * 130 + 2, 3)
