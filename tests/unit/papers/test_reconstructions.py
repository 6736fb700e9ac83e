"""Reconstructions of hidden patches by stubs with perfect and constant predictions."""

import pytest
import torch
from small_batches import batch_of, photographs
from tiny import tiny

from megavis.config.errors import UserError
from megavis.papers.mae.reconstructions import reconstruct

pytestmark = pytest.mark.once

DECODER = "{num_layers: 1, hidden_size: 16, num_attention_heads: 2}"
MAE = f"{{name: mae, patch_size: 4, decoder: {DECODER}}}"


class RunnerStub:
    """Returns fixed predictions."""

    def __init__(self, predictions):
        self.fixed = predictions

    def predictions(self, inputs):
        return self.fixed


def cells(images):
    """Cut images `[b, 16, 16, 3]` into patches `[b, 16, 4, 4, 3]`."""
    cut = [
        images[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        for row in range(4)
        for column in range(4)
    ]
    return torch.stack(cut, dim=1)


@pytest.fixture
def paper(build_paper):
    """Build MAE with or without normalised targets."""
    return lambda normalize: build_paper(
        tiny(MAE), f"objective.normalize_targets={str(normalize).lower()}"
    )[0]


@pytest.mark.parametrize("normalize", [True, False])
def test_zero_loss_reconstructs_the_original(paper, normalize, tmp_path):
    objective, batch = paper(normalize), batch_of(photographs(3, 16), first=4)
    [targets] = objective.sequence(batch).targets
    mean, deviation = targets.mean(-1, keepdim=True), targets.std(-1, keepdim=True)
    perfect = (targets - mean) / deviation if normalize else targets
    assert objective.loss(perfect, (targets,)) < 1e-6
    found = reconstruct(RunnerStub(perfect), objective, batch, tmp_path)
    assert torch.equal(found.originals, batch.inputs)
    assert torch.equal(found.made, batch.inputs)
    assert found.hidden.sum(1).tolist() == [12, 12, 12]


def test_visible_patches_stay_and_hidden_are_denormalized(paper, tmp_path):
    objective, batch = paper(True), batch_of(photographs(2, 16))
    order = objective.schedule.draw(batch.sample_index).order
    found = reconstruct(RunnerStub(torch.zeros(2, 12, 48)), objective, batch, tmp_path)
    true, made, flat = (cells(each).float() for each in (batch.inputs, found.made, found.flat))
    # Targets are normalised over all values of a patch, after standardising each channel: a
    # prediction of zero is the patch's mean standardised value.
    centre, scale = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for image in range(2):
        visible = set(order[image, :4].tolist())
        for place in range(16):
            cell = true[image, place]
            assert found.hidden[image, place] == (place not in visible)
            if place in visible:
                assert torch.equal(made[image, place], cell)
                assert torch.equal(flat[image, place], cell)
                continue
            mean = ((cell / 255 - centre) / scale).mean()
            expected = ((mean * scale + centre) * 255).clamp(0, 255).round().expand(4, 4, 3)
            torch.testing.assert_close(made[image, place], expected, rtol=0, atol=1)
            expected = cell.mean((0, 1)).round().expand(4, 4, 3)
            torch.testing.assert_close(flat[image, place], expected, rtol=0, atol=0)


def test_mixture_is_reconstructed_by_its_mean(build_paper, tmp_path):
    section = (
        "{name: compose, reads: {kind: patches, patch_size: 4}, schedule: {kind: context},"
        f" asks: {{kind: visible, decoder: {DECODER}}},"
        " density: {kind: gaussian_mixture, num_components: 2}}"
    )
    objective, _ = build_paper(tiny(section))
    batch = batch_of(photographs(2, 16))
    [targets] = objective.sequence(batch).targets
    # Weights 3/4 and 1/4, with means whose weighted average is the target.
    logits = torch.tensor([3.0, 1.0]).log().expand(*targets.shape[:2], 2)
    scales = torch.zeros_like(targets)
    predictions = [logits, targets - 0.5, scales, targets + 1.5, scales]
    found = reconstruct(RunnerStub(torch.cat(predictions, -1)), objective, batch, tmp_path)
    difference = found.made.int() - batch.inputs.int()
    assert difference.abs().max() <= 1


def test_targets_of_pairs_are_reconstructed(build_paper, tmp_path):
    section = (
        "{name: compose, reads: {kind: patches, patch_size: 4}, asks: {kind: mask},"
        " schedule: {kind: masked, count: exact}, density: {kind: squared_error},"
        " memory: {kind: encoded_image, num_layers: 1, patch_size: 8}}"
    )
    objective, inference = build_paper(tiny(section))
    targets = photographs(2, 16, seed=1)
    batch = batch_of(torch.stack([photographs(2, 16), targets], dim=1))
    found = reconstruct(inference, objective, batch, tmp_path)
    assert torch.equal(found.originals, targets)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{name: darl, patch_size: 4}", "runs of darl predict every token"),
        ("{name: mp3, patch_size: 4}", "runs of mp3 predict every token"),
        (
            "{name: givt_maskgit, latent_channels: 2, downsampling: 4, adapter_blocks: 1}",
            "with objective.adapter_blocks every token depends on the whole image",
        ),
        (
            "{name: compose, reads: {kind: latents, channels: 2, patch_size: 4},"
            " schedule: {kind: rounds}, asks: {kind: mask}, transform: {kind: adapter},"
            " density: {kind: gaussian_mixture}}",
            "with objective.transform every token depends on the whole image",
        ),
        (
            "{name: igpt, vocabulary_size: 16, mode: bert}",
            "predictions of this model cannot be shown as images",
        ),
    ],
)
def test_unsupported_papers_are_refused(build_paper, section, message, tmp_path):
    objective, inference = build_paper(tiny(section))
    batch = objective.blank_batch(1, torch.device("cpu"))
    with pytest.raises(UserError, match=message):
        reconstruct(inference, objective, batch, tmp_path)
