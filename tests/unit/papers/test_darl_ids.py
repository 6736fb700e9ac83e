"""DARL with the ids of a frozen tokenizer as inputs or targets (Table 16)."""

from types import SimpleNamespace

import pytest
import torch
from small_batches import batch_of
from small_vqgan import write_untrained_run
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from tiny import tiny
from torch.nn import functional as F

from megavis.composition.model import generator_of
from megavis.config.errors import UserError
from megavis.tokenizers.network_tokenizer import open_tokenizer


def config(run):
    return tiny(f"{{name: darl, patch_size: 4, loss: ids, tokenizer: {run}, vocabulary_size: 12}}")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_untrained_run(tmp_path_factory.mktemp("vqgan"))


@pytest.mark.parametrize("words", [[], ["objective.order=random", "objective.two_streams=true"]])
def test_ids_are_predicted_from_earlier_patches(build_paper, run_folder, words):
    objective, inference = build_paper(config(run_folder), *words)
    images = torch.randint(256, (2, 16, 16, 3), dtype=torch.uint8)
    ids = open_tokenizer(run_folder).encode(images)
    order = objective.schedule.draw(torch.arange(2)).order.expand(2, -1)
    sequence = objective.sequence(batch_of(images))
    predictions = inference.predictions(sequence.inputs)
    logits = objective.outputs(predictions)
    losses = [
        F.cross_entropy(logits[image, place], ids[image, cell])
        for image in range(2)
        for place, cell in enumerate(order[image])
    ]
    loss = objective.loss(predictions, sequence.targets)
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    # All predictions but the first depend on the first patch.
    tokens, *rest = sequence.inputs
    moved = tokens.clone()
    moved[:, 0] += 1.0
    changed = (objective.outputs(inference.predictions((moved, *rest))) != logits).any(-1)
    assert changed.tolist() == [[False] + [True] * 15] * 2


READS_IDS = ["objective.loss=mse", "objective.inputs=ids"]


def test_patches_are_predicted_from_earlier_ids(build_paper, run_folder):
    """Table 16, "dVAE input + MSE"."""
    objective, inference = build_paper(config(run_folder), *READS_IDS)
    images = torch.randint(256, (2, 16, 16, 3), dtype=torch.uint8)
    sequence = objective.sequence(batch_of(images))
    ids, *rest = sequence.inputs
    assert torch.equal(ids, open_tokenizer(run_folder).encode(images)[:, :-1])
    outputs = objective.outputs(inference.predictions(sequence.inputs))
    # Pixels standardised with timm's constants, in patches of 4² in raster order.
    mean, deviation = torch.tensor(IMAGENET_DEFAULT_MEAN), torch.tensor(IMAGENET_DEFAULT_STD)
    pixels = (images / 255 - mean) / deviation
    errors = [
        (outputs[image, 4 * row + column].view(4, 4, 3) - patch).square().mean()
        for image in range(2)
        for row in range(4)
        for column in range(4)
        for patch in [pixels[image, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]]
    ]
    loss = objective.loss(inference.predictions(sequence.inputs), sequence.targets)
    torch.testing.assert_close(loss, torch.stack(errors).mean())
    other = ids.clone()
    other[:, 3] = (other[:, 3] + 1) % 12
    changed = (objective.outputs(inference.predictions((other, *rest))) != outputs).any(-1)
    assert changed.tolist() == [[False] * 4 + [True] * 12] * 2
    with pytest.raises(UserError, match="reads ids and predicts patches cannot continue"):
        generator_of(objective)


def test_ids_from_ids_can_be_generated(build_paper, run_folder):
    objective, _ = build_paper(config(run_folder), "objective.inputs=ids")
    assert objective.predicts is objective.reads
    assert generator_of(objective) is objective


def test_loss_mse_needs_image_shards(build_paper, run_folder):
    objective, _ = build_paper(config(run_folder), *READS_IDS)
    manifest = SimpleNamespace(
        kind="ids",
        num_tokens=16,
        vocabulary_size=12,
        identity=open_tokenizer(run_folder).identity(),
    )
    (error,) = objective.check_data(manifest)
    assert "holds ids; objective.loss is made of images: name jpeg shards" in error


def test_tokenizer_identity(build_paper, run_folder):
    objective, _ = build_paper(config(run_folder))
    assert objective.tokenizer_identity == open_tokenizer(run_folder).identity()
    pixels = ("objective.loss=mse", "objective.tokenizer=null", "objective.vocabulary_size=null")
    assert build_paper(config(run_folder), *pixels)[0].tokenizer_identity is None


def test_identity_is_of_both_tokenizers(build_paper, tmp_path):
    first, second, third = (
        write_untrained_run(tmp_path / str(seed), seed=seed) for seed in range(3)
    )
    ids = "{{kind: ids, patch_size: 4, vocabulary_size: 12, tokenizer: {}}}"

    def identity(read, predicted):
        words = f"reads: {ids.format(read)}, predicts: {ids.format(predicted)},"
        rest = "schedule: {kind: one_by_one}, asks: {kind: shift}, density: {kind: categorical}"
        return build_paper(tiny(f"{{name: compose, {words} {rest}}}"))[0].tokenizer_identity

    of_both = identity(first, second)
    assert of_both == identity(first, second)
    others = {identity(third, second), identity(first, third), identity(second, first)}
    assert len(others | {of_both}) == 4
    assert identity(first, first) == open_tokenizer(first).identity()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.tokenizer=null"], "tokenizer: belongs to loss ids and .*: must be given"),
        (["objective.loss=mse"], "vocabulary_size: belongs to loss ids and .*: leave it out"),
        (["objective.decoder=mlp"], "objective.decoder: mlp predicts pixels"),
        (["objective.normalize_targets=true"], "belongs to loss mse; set it to false for ids"),
        (["parallel.tensor_model_parallel_size=8"], "12 is not divisible by"),
    ],
)
def test_incompatible_keys(build_paper, run_folder, words, message):
    with pytest.raises(UserError, match=message):
        build_paper(config(run_folder), *words)


def test_ids_from_patches_cannot_be_generated(build_paper, run_folder):
    objective, _ = build_paper(config(run_folder))
    with pytest.raises(UserError, match="reads patches and predicts ids cannot continue"):
        generator_of(objective)
