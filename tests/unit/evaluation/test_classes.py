"""Top-1, top-5 and the confusion matrix of a fine-tuned network against scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, top_k_accuracy_score

from megavis.data.loading.dataset import ShardDataset, Subset
from megavis.evaluation.classes import evaluate_classifier
from megavis.evaluation.figures import plot_confusion

pytestmark = pytest.mark.once

WORDS = (
    "finetune={num_classes: 7}",
    "data.validation=shards/validation",
    "training.validate_every=1",
)


def test_accuracy_and_confusion_match_scikit_learn(build, shard_folders, tmp_path):
    objective, inference = build(tmp_path / "c.yaml", *WORDS)
    whole, order = ShardDataset(shard_folders / "validation"), np.arange(35, 5, -1)
    got = evaluate_classifier(inference, objective, Subset(whole, order), batch_size=8)

    tokens, labels = whole.read(order)
    inputs = objective.inputs_from(torch.from_numpy(tokens.astype(np.int64)))
    logits = inference.predictions(inputs).double()
    everything = range(7)
    assert got.num_images == 30
    assert got.top1 == pytest.approx((logits.argmax(1).numpy() == labels).mean())
    assert got.top5 == pytest.approx(top_k_accuracy_score(labels, logits, k=5, labels=everything))
    expected = confusion_matrix(labels, logits.argmax(1), labels=everything)
    assert got.confusion == tuple(map(tuple, expected))
    assert (got.num_views, got.vote) == (1, got.top1)


def test_bert_prediction_is_the_vote_of_five_masks(build, tmp_path, shard_folders):
    words = (*WORDS, "objective.mode=bert", "finetune.generative_weight=1")
    objective, inference = build(tmp_path / "c.yaml", *words)
    dataset = ShardDataset(shard_folders / "validation")
    got = evaluate_classifier(inference, objective, dataset, num_views=5, batch_size=10)

    tokens, labels = dataset.read(np.arange(36))
    ids = torch.from_numpy(tokens.astype(np.int64))
    answers = []
    for view in range(5):
        inputs = objective.inputs_from(ids, sample_index=torch.arange(36) + view * 36)
        answers.append(inference.predictions(inputs)[-1].argmax(1).tolist())
    assert got.top1 == pytest.approx(np.mean(np.array(answers[0]) == labels))
    right = ties = 0
    for image, label in enumerate(labels):
        votes = [answers[view][image] for view in range(5)]
        most = max(votes.count(vote) for vote in votes)
        winners = {vote for vote in votes if votes.count(vote) == most}
        ties += len(winners) > 1
        right += winners == {label}
    assert right <= round(36 * got.vote) <= right + ties
    assert sum(map(sum, got.confusion)) == 36


def test_confusion_figure_shows_counts_and_shares():
    counts = np.array([[5, 0], [1, 3]])
    (axes,) = plot_confusion(counts, ["cat", "dog"], title="t").axes
    assert sorted(text.get_text() for text in axes.texts) == ["1", "3", "5"]
    shares = axes.images[0].get_array()
    np.testing.assert_allclose(shares, [[1, 0], [0.25, 0.75]])
    (axes,) = plot_confusion(np.eye(30, dtype=int), ["x"] * 30, title="t").axes
    assert not axes.texts
