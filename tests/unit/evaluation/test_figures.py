"""Figures of probe results, and the validation loss they plot."""

import numpy as np
import pytest
import torch
from tiny import BLOCK_OBJECTIVES, tiny

from megavis.cli import main
from megavis.data.loading.dataset import ShardDataset
from megavis.evaluation.figures import depth_rows, plot_depth, plot_likelihood
from megavis.evaluation.likelihood import mean_loss
from megavis.evaluation.probe import CheckpointScore
from megavis.evaluation.results import LayerScore, ProbeResult

pytestmark = pytest.mark.once


def make_result(**changes):
    """Return a probe result of three layers and two untrained networks."""
    untrained = ([0.5, 0.4, 0.3], [0.3, 0.4, 0.6])
    content = {
        "best_layer": LayerScore(1, 0.1, 0.25, 0.9, 0.7, None),
        "untrained_accuracy": 0.4,
        "step": 12,
        "trained": tuple(
            LayerScore(i, 0.1, i * (2 - i) / 4, 0.9, 0.6 + i / 10, None) for i in range(3)
        ),
        "untrained": tuple(
            tuple(LayerScore(i, 0.1, 0.5, 1.0, share, None) for i, share in enumerate(shares))
            for shares in untrained
        ),
        "pixels": LayerScore(0, 0.1, 0.4, 1.1, 0.35, None),
        "num_fitted": 80,
        "num_held_out": 20,
        "num_validation": 40,
        "num_classes": 3,
        "num_views": 1,
        "seed": 0,
        "classifier": "standardized",
        "splits": {"train": "train", "validation": "validation"},
        "num_equal": None,
        "concatenated": (),
        "low_data": (),
    }
    return ProbeResult(**{**content, **changes})


def write_config(folder):
    """Write the config of a run with two blocks; return the run folder."""
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(tiny(BLOCK_OBJECTIVES["gvp"]))
    return folder / "run"


def curves(figure):
    """Return the points of each line of a figure by label."""
    (axes,) = figure.axes
    return {str(line.get_label()): np.array(line.get_data()).tolist() for line in axes.lines}


def test_depth_figure_shows_trained_untrained_and_pixels():
    result = make_result()
    drawn = curves(plot_depth(result, name="run"))
    assert drawn["step 12"] == [[0, 1, 2], pytest.approx([60, 70, 80])]
    assert drawn["untrained, mean and range of 2"] == [[0, 1, 2], pytest.approx([40, 40, 45])]
    assert drawn["raw pixels"][1] == pytest.approx([35, 35])
    last = depth_rows(result)[2]
    assert (last["untrained_lowest"], last["untrained_highest"]) == (0.3, 0.6)


def test_depth_figure_shows_vote_accuracy():
    trained = tuple(LayerScore(i, 0.1, 0.9, 0.5, 0.6, 0.7) for i in range(3))
    drawn = curves(plot_depth(make_result(trained=trained, num_views=5), name="run"))
    assert drawn["step 12, vote of 5 masks"][1] == pytest.approx([70, 70, 70])


def test_likelihood_figure_has_one_line_per_run_and_reversed_axis():
    points = [("small", 5, 3.0, 0.5), ("small", 10, 2.5, 0.6), ("large", 10, 2.0, 0.8)]
    probe = {"layer": 1, "penalty": 0.1, "num_train": 100, "num_validation": 50, "seed": 0}
    probe |= {"classifier": "plain", "loss_images": "shards", "num_loss_images": 70}
    scores = [
        CheckpointScore(run=run, step=step, validation_loss=loss, accuracy=share, **probe)
        for run, step, loss, share in points
    ]
    figure = plot_likelihood(scores, pixels=0.4)
    drawn = curves(figure)
    assert drawn["small"] == [[3.0, 2.5], pytest.approx([50, 60])]
    assert drawn["large"] == [[2.0], pytest.approx([80])]
    left, right = figure.axes[0].get_xlim()
    assert left > right
    assert [text.get_text() for text in figure.axes[0].texts] == ["5", "10", "10"]


def test_probe_result_round_trips(tmp_path):
    result = make_result()
    result.write(tmp_path / "probe.json")
    assert ProbeResult.read(tmp_path / "probe.json") == result


def test_mean_loss_weights_images_equally(build, tmp_path, shard_folders):
    objective, inference = build(tmp_path / "c.yaml", "objective.mode=bert")
    dataset = ShardDataset(shard_folders / "validation")
    got = mean_loss(inference, objective, dataset, limit=10, batch_size=4)

    tokens = torch.from_numpy(dataset.read(np.arange(10))[0].astype(np.int64))
    mask = objective.inputs_from(tokens, sample_index=torch.arange(10))[2]
    logits = objective.outputs(inference.predictions(objective.inputs_from(tokens, mask=mask)))
    total = 0.0
    for image in range(10):
        places = mask[image].nonzero()[:, 0].tolist()
        nats = [-float(logits[image, p].log_softmax(0)[tokens[image, p]]) for p in places]
        total += sum(nats) / max(1, len(nats))
    assert got == pytest.approx(total / 10, rel=1e-5)


def test_depth_figure_from_a_probe_file(tmp_path, capsys):
    run = write_config(tmp_path)
    make_result(run="tiny").write(tmp_path / "probe.json")
    words = ["figure", "depth", str(run), "--probe"]
    assert main([*words, str(tmp_path / "probe.json")]) == 0
    assert (run / "evaluation" / "depth.png").exists()

    (tmp_path / "other.json").write_text('{"step": 3}')
    capsys.readouterr()
    for wrong in ("other.json", "none.json"):
        assert main([*words, str(tmp_path / wrong)]) == 2
        assert "is not a result of `megavis probe`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "other"}, "this is a probe of other, not of tiny"),
        ({"trained": (LayerScore(9, 0.1, 0.5, 0.9, 0.6, None),)}, "it has a layer 9; tiny has 2"),
    ],
)
def test_probe_of_another_run_is_refused(tmp_path, capsys, changes, message):
    run = write_config(tmp_path)
    make_result(**changes).write(tmp_path / "probe.json")
    words = ["--probe", str(tmp_path / "probe.json")]
    assert main(["figure", "depth", str(run), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (run / "evaluation" / "depth.png").exists()
