"""Probe features against a layer-by-layer pass, and the full probe on an easy data set."""

import json

import numpy as np
import pytest
import torch

from megavis.commands.opening import read_layers
from megavis.commands.probe import table
from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset
from megavis.evaluation.features import pixel_features
from megavis.evaluation.linear import fit_classifier
from megavis.evaluation.networks import Network, extract
from megavis.evaluation.probe import ProbeData, ProbeSettings, probe
from megavis.tokenizers.palette import Palette

pytestmark = pytest.mark.once


@pytest.fixture
def data(shard_folders):
    return ProbeData(
        ShardDataset(shard_folders / "train"),
        ShardDataset(shard_folders / "validation"),
        Palette.load(shard_folders / "palette.npy"),
    )


def probe_networks(data, network, num_untrained=1, *, step=0, num_views=1, **settings):
    """Probe a network, using its own features for the untrained baselines."""
    features = [data.features(network, num_views=num_views) for _ in range(1 + num_untrained)]
    return probe(features[0], features[1:], data, step=step, settings=ProbeSettings(**settings))


def test_features_are_token_means_of_norm_outputs(build, tmp_path, data):
    objective, inference = build(tmp_path / "c.yaml")

    got = extract(inference, objective, data.train, num_images=10, batch_size=4)

    tokens, labels = data.train.read(np.arange(10))
    embedding, *blocks, head = inference.layers.modules
    hidden = embedding(objective.inputs_from(torch.from_numpy(tokens.astype(np.int64))))
    expected = []
    for layer in [*blocks, head]:
        gain = (layer.norm if layer is head else layer.input_layernorm).weight
        scale = (hidden.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        expected.append((hidden / scale * gain).mean(0))
        hidden = layer(hidden)
    np.testing.assert_allclose(got.layers, torch.stack(expected).detach(), rtol=1e-4, atol=1e-5)
    assert got.labels.tolist() == labels.tolist()


def test_pixel_features_are_the_colours_of_the_tokens(data):
    got = pixel_features(data.train, palette=data.palette, limit=7, batch_size=3)
    tokens = data.train.read(np.arange(7))[0]
    assert got.layers.shape == (1, 7, 48)
    for image in range(7):
        for pixel in range(16):
            colour = data.palette.centers[tokens[image, pixel]]
            assert (got.layers[0, image, 3 * pixel : 3 * pixel + 3] == colour).all()


def test_unlabelled_images_are_skipped(data, monkeypatch):
    labels = data.train.labels  # all records are checked now
    labels[:5] = -1
    records = data.train._index._records.copy()
    records["label"] = labels
    monkeypatch.setattr(data.train._index, "_records", records)
    got = pixel_features(data.train, palette=data.palette, limit=12)
    assert got.layers.shape == (1, 7, 48)
    assert got.labels.tolist() == labels[5:12].tolist()


def test_probe_classifies_by_colour(build, tmp_path, data):
    objective, inference = build(tmp_path / "c.yaml")

    result = probe_networks(
        data, Network(objective, inference.context, lambda: inference), 2, step=3, seed=1
    )

    assert (result.num_fitted, result.num_held_out, result.num_validation) == (96, 24, 36)
    assert result.num_classes == 3
    assert result.pixels.accuracy == 1.0
    assert [score.layer for score in result.trained] == [0, 1, 2]
    assert result.best_layer.accuracy > 0.8
    # The baselines have the same weights, so they must score the same.
    assert result.untrained == (result.trained, result.trained)
    assert result.untrained_accuracy == result.best_layer.accuracy

    result.write(tmp_path / "evaluation" / "probe.json")
    written = json.loads((tmp_path / "evaluation" / "probe.json").read_text())
    assert written["trained"][2]["accuracy"] == result.trained[2].accuracy
    assert written["best_layer"]["layer"] == result.best_layer.layer
    assert (written["step"], written["seed"]) == (3, 1)

    lines = table(result).splitlines()
    assert "<- best" in lines[2 + result.best_layer.layer]
    assert "raw pixels 100.0%" in lines[-1]


def test_selection_set_replaces_the_held_out_split(build, tmp_path, data, shard_folders):
    objective, inference = build(tmp_path / "c.yaml")
    network = Network(objective, inference.context, lambda: inference)
    further = ShardDataset(shard_folders / "selection")
    chosen_by = ProbeData(data.train, data.validation, data.palette, 60, None, further)

    result = probe_networks(chosen_by, network)

    assert (result.num_fitted, result.num_held_out, result.num_validation) == (60, 36, 36)
    held_out, fitted = further.labels, data.train.labels[:60]
    sets = (data.train, further, data.validation)
    train, chosen, judged = (network.features(part).layers[1] for part in sets)
    train = train[:60]
    (score,) = [score for score in result.trained if score.layer == 1]
    classifier = fit_classifier(train, fitted, penalty=score.penalty)
    assert score.selection_accuracy == pytest.approx(classifier.score(chosen, held_out))
    # The final fit uses all images.
    x, y = np.concatenate([train, chosen]), np.concatenate([fitted, held_out])
    both = fit_classifier(x, y, penalty=score.penalty)
    assert score.accuracy == pytest.approx(both.score(judged, data.validation.labels))

    further._index.labels = lambda: np.full(36, -1)
    with pytest.raises(UserError, match="need labels"):
        chosen_by.divide(np.arange(60), ProbeSettings())


def test_selection_may_have_classes_that_are_not_fitted(data, shard_folders):
    """The first 5,000 images of ImageNet lack some classes of the 4 % that are held out."""
    further = ShardDataset(shard_folders / "selection")
    chosen_by = ProbeData(data.train, data.validation, data.palette, 60, None, further)
    assert set(further.labels) == {0, 1, 2}
    parts = chosen_by.divide(np.concatenate([np.arange(60) % 2, further.labels]), ProbeSettings())
    assert (len(parts.fitted), len(parts.held_out)) == (60, 36)
    with pytest.raises(UserError, match="cannot select the layer"):
        chosen_by.divide(np.concatenate([np.full(60, 7), further.labels]), ProbeSettings())


def test_different_class_numbering_raises(data, monkeypatch):
    monkeypatch.setattr(data.validation, "class_names", ("class-0", "class-1"))
    with pytest.raises(UserError, match="classes-from"):
        ProbeData(data.train, data.validation, data.palette)


def test_bert_features_use_training_masks(build, tmp_path, data):
    objective, inference = build(tmp_path / "c.yaml", "objective.mode=bert")
    got = Network(objective, inference.context, lambda: inference).features(
        data.train, limit=6, num_views=2
    )
    again = extract(inference, objective, data.train, num_images=6, batch_size=2)
    np.testing.assert_allclose(got.layers, again.layers, rtol=1e-5, atol=1e-5)

    # The second view masks the same images as one epoch later.
    tokens = torch.from_numpy(data.train.read(np.arange(6))[0].astype(np.int64))
    inputs = objective.inputs_from(tokens, sample_index=torch.arange(6) + len(data.train))
    np.testing.assert_allclose(got.views[1], inference.features(inputs), rtol=1e-5, atol=1e-5)
    assert abs(got.views[1] - got.layers).max() > 0.1


def test_bert_probe_votes_over_five_masks(build, tmp_path, data):
    objective, inference = build(tmp_path / "c.yaml", "objective.mode=bert")
    network = Network(objective, inference.context, lambda: inference)
    result = probe_networks(data, network, num_views=network.num_views)
    assert result.num_views == 5
    assert all(0 <= score.vote_accuracy <= 1 for score in result.trained)
    assert f"({result.best_layer.vote_accuracy:.1%} by the vote of 5 masks)" in table(result)

    single = probe_networks(data, network)
    assert [score.vote_accuracy for score in single.trained] == [None] * 3
    assert [s.accuracy for s in single.trained] == [s.accuracy for s in result.trained]


def test_probe_scores_concatenated_layers_and_low_data(build, tmp_path, data):
    objective, inference = build(tmp_path / "c.yaml")
    asked = {"concatenate": 3, "images_per_class": (2, 10), "draws": 3}

    result = probe_networks(
        data, Network(objective, inference.context, lambda: inference), 2, **asked
    )

    assert [score.features for score in result.concatenated] == ["trained", *["untrained"] * 2]
    assert result.concatenated[0].layers == (0, 1, 2)
    assert result.concatenated[0].num_features == 48
    places = [(score.features, score.images_per_class) for score in result.low_data]
    names = ("pixels", "trained", "untrained")
    assert places == [(name, count) for name in names for count in (2, 10)]
    assert result.low_data[3].layer == result.best_layer.layer
    lines = table(result).splitlines()
    assert any(
        line.startswith("      0-2") and "48 features concatenated" in line for line in lines
    )
    mean, deviation = result.low_data[3].mean, result.low_data[3].deviation
    (row,) = [line for line in lines if line.startswith("       10 ")]
    assert f"{mean:.1%} ± {deviation:.1%}" in row

    for wrong in ({"draws": 1}, {"images_per_class": (1,)}):
        with pytest.raises(UserError, match="must be at least"):
            ProbeSettings(**wrong)


def test_read_layers_parses_indices():
    assert read_layers("all", 4) is None
    assert read_layers("0,4", 4) == [0, 4]
    for wrong in ("5", "-1", "a", ""):
        with pytest.raises(UserError, match="from 0 to 4"):
            read_layers(wrong, 4)
