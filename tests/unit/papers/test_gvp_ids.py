"""GVP on ids: losses, inputs and checks of the tokenizer."""

from dataclasses import replace

import pytest
import torch
from small_batches import batch_of
from small_vqgan import write_untrained_run
from torch.nn import functional as F

from megavis.config.errors import UserError
from megavis.tokenizers.network_tokenizer import open_tokenizer

IDS = ["objective.vocabulary_size=12", "model.positions=none"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_untrained_run(tmp_path_factory.mktemp("vqgan"))


def cross_entropies(objective, inference, ids, index):
    """Return the cross-entropy of each predicted id, in a list for each image."""
    batch = replace(batch_of(ids), sample_index=index)
    sequence = objective.training_sequence(batch)
    predictions = inference.predictions(sequence.inputs)
    logits, plan = objective.outputs(predictions), objective.schedule.draw(index)
    found = []
    for image, (order, groups) in enumerate(zip(plan.order, plan.groups, strict=True)):
        asked = [place for place in range(9) if groups[place] > 0]
        found.append([F.cross_entropy(logits[image, p], ids[image, order[p]]) for p in asked])
    return found, objective.loss(predictions, sequence.targets)


def test_d2d_loss_is_the_cross_entropy_of_predicted_ids(build_gvp):
    """All predicted tokens of a step weigh the same (equation 6), in micro-batches too."""
    objective, inference = build_gvp("objective.variant=d2d", "training.batch_size=6", *IDS)
    ids, index = torch.randint(12, (6, 9)), torch.arange(12, 18)
    found, loss = cross_entropies(objective, inference, ids, index)
    assert len({len(image) for image in found}) > 1, "the images differ in their first group"
    mean = torch.stack([each for image in found for each in image]).mean()
    torch.testing.assert_close(loss, mean)
    parts = [
        cross_entropies(objective, inference, ids[some], index[some])[1]
        for some in torch.arange(6).split(2)
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), mean)


def test_ids_out_of_range(build_gvp):
    objective, _ = build_gvp("objective.variant=d2d", *IDS)
    with pytest.raises(UserError, match="range from 3 to 12; .* 12 allows 0 to 11"):
        objective.inputs_from(torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 12]]))


def test_p2d_reads_patches_and_predicts_ids(build_gvp, run_folder):
    words = ["objective.variant=p2d", f"objective.tokenizer={run_folder}", "data.image_size=16"]
    objective, inference = build_gvp(*words, *IDS)
    images = torch.randint(256, (2, 16, 16, 3), dtype=torch.uint8)
    sequence = objective.sequence(batch_of(images))
    ids = open_tokenizer(run_folder).encode(images)
    order = objective.schedule.draw(torch.arange(2)).order
    assert torch.equal(sequence.targets[0], ids.gather(1, order))
    assert sequence.inputs[0].shape == (2, 16, 48)
    assert inference.predictions(sequence.inputs).shape == (16, 2, 12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.vocabulary_size=16"], "has 12 ids; objective.vocabulary_size is 16"),
        (["objective.patch_size=8", "objective.num_groups=2"], "as 16 ids"),
    ],
)
def test_tokenizer_is_checked(build_gvp, run_folder, words, message):
    fixed = ["objective.variant=d2d", f"objective.tokenizer={run_folder}", "data.image_size=16"]
    objective, _ = build_gvp(*fixed, *IDS, *words)
    images = torch.zeros(1, 16, 16, 3, dtype=torch.uint8)
    with pytest.raises(UserError, match=message):
        objective.sequence(batch_of(images))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.variant=d2d"], "objective.vocabulary_size: must be given for d2d"),
        (["objective.variant=p2d", *IDS], "objective.tokenizer: must name the run folder"),
        (IDS, "objective.vocabulary_size: belongs to the variants p2d and d2d"),
    ],
)
def test_incompatible_keys(build_gvp, words, message):
    with pytest.raises(UserError, match=message):
        build_gvp(*words)
