"""Fine-tuning and loading a run at an image size other than that of training."""

import math

import numpy as np
import pytest
import torch

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.cli import main
from megavis.config.errors import UserError
from megavis.data.codecs.transforms import evaluation_transform
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import read_batch
from megavis.model.positions import resize_table
from megavis.notebook import Run, at_image_size
from megavis.parallel.context import close_context

pytestmark = pytest.mark.once

CONFIG = """\
name: {positions}
output: {folder}
objective: {{name: darl, patch_size: 4}}
model: {{num_layers: 1, hidden_size: 16, num_attention_heads: 2, positions: {positions}}}
data: {{train: {shards}/train, image_size: 16, crop: random_resized, short_side: 18}}
parallel: {{zero_stage: 0}}
optimizer: {{learning_rate: 1e-2}}
training: {{steps: 1, batch_size: 8}}
"""


def cubic(distance):
    """Evaluate the cubic convolution kernel with a = -0.75 (Keys, 1981)."""
    x, a = abs(distance), -0.75
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


def resized_by_loops(grid, side):
    """Resize `[n, n]` with the kernel, replicating the edge, in plain loops."""
    count = len(grid)
    last = count - 1

    def weights(place):
        center = (place + 0.5) * count / side - 0.5
        first = math.floor(center) - 1
        return [(min(max(i, 0), last), cubic(center - i)) for i in range(first, first + 4)]

    return [
        [
            sum(u * v * grid[i][j] for i, u in weights(row) for j, v in weights(column))
            for column in range(side)
        ]
        for row in range(side)
    ]


@pytest.mark.parametrize("side", [3, 7, 12])
def test_learned_positions_are_resized_bicubically(side):
    table = torch.randn(49, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    resized = resize_table(table, side**2)
    assert resized.shape == (side**2, 2)
    for channel in range(2):
        expected = resized_by_loops(table[:, channel].view(7, 7).tolist(), side)
        torch.testing.assert_close(
            resized[:, channel].view(side, side), torch.tensor(expected, dtype=torch.float64)
        )


def test_non_square_grids_raise():
    with pytest.raises(ValueError, match="not both square"):
        resize_table(torch.zeros(9, 2), 8)


FINETUNING = """\
based_on: c.yaml
name: tuned
data: {{validation: {shards}/validation, image_size: 24, short_side: 24}}
training: {{validate_every: 1, validation_images: 8}}
finetune: {{from_run: {folder}/{positions}, num_classes: 10}}
"""


# 16² pixels are 4 × 4 patches, and 24² pixels 6 × 6: sides of 2/3, sequences of 16/36.
FACTORS = {"sincos": "0.666667", "rope_2d": "0.666667", "rope_1d": "0.444444"}


@pytest.mark.parametrize("positions", ["learned", *FACTORS])
def test_finetuning_at_another_size(image_shards, tmp_path, capsys, positions):
    names = {"positions": positions, "folder": tmp_path, "shards": image_shards}
    (tmp_path / "c.yaml").write_text(CONFIG.format(**names))
    (tmp_path / "f.yaml").write_text(FINETUNING.format(**names))
    assert main(["train", str(tmp_path / "c.yaml"), "--device", "cpu"]) == 0
    command = ["finetune", str(tmp_path / "f.yaml"), "--device", "cpu"]
    if positions in FACTORS:
        assert main(command) == 2
        message = capsys.readouterr().err
        assert "was trained on 16² pixels, and this config has 24²" in message
        assert f"set model.position_scale to {FACTORS[positions]}" in message
        command.append(f"model.position_scale={FACTORS[positions]}")
    assert main([*command, "optimizer.learning_rate=1e-12", "finetune.classifier_std=1"]) == 0
    before, after = (
        read_weights(latest_checkpoint(tmp_path / name)) for name in (positions, "tuned")
    )
    for name, value in before.items():
        if name == "embedding.positions.weight":
            value = resize_table(value, 36)
        if not name.startswith("head."):
            torch.testing.assert_close(after[name], value)
    check_ensemble_at_training_size(tmp_path / "tuned", image_shards / "validation", capsys)


def check_ensemble_at_training_size(run_folder, shards, capsys):
    """Check `ensemble --image-size` against class logits of single images."""
    capsys.readouterr()
    words = ["--images", str(shards), "--image-size", "16", "--device", "cpu"]
    assert main(["ensemble", str(run_folder), *words]) == 0
    printed = capsys.readouterr().out
    try:
        opened = Run.open(run_folder, step=1, device="cpu", image_size=16)
        images = ShardDataset(shards, evaluation_transform(opened.config.data))
        batch = read_batch(images, np.arange(len(images)), np.arange(len(images)))
        named = [opened.outputs(each[None]).argmax().item() for each in batch.inputs]
    finally:
        close_context()
    right = sum(a == b for a, b in zip(named, batch.labels.tolist(), strict=True))
    assert f"top-1 {right / len(named):.1%}" in printed


@pytest.mark.parametrize("positions", ["learned", *FACTORS])
def test_run_opens_at_another_size(image_shards, tmp_path, positions):
    (tmp_path / "c.yaml").write_text(
        CONFIG.format(positions=positions, folder=tmp_path, shards=image_shards)
    )
    assert main(["train", str(tmp_path / "c.yaml"), "--device", "cpu"]) == 0
    try:
        trained = Run.open(tmp_path / positions, device="cpu")
        larger = Run.open(tmp_path / positions, device="cpu", image_size=32)
        assert larger.config.model.position_scale == (0.25 if positions == "rope_1d" else 0.5)
        assert (larger.config.data.image_size, larger.config.data.short_side) == (32, 36)
        assert larger.features(torch.zeros(2, 32, 32, 3, dtype=torch.uint8)).shape == (2, 2, 16)
        drawn = larger.sample(originals=torch.zeros(2, 32, 32, 3, dtype=torch.uint8), given=0.5)
        assert (drawn.dtype, drawn.shape) == (torch.uint8, (2, 32, 32, 3))
        assert not drawn[:, :16].any()
        three, two = (larger.sample(count, seed=1).int() for count in (3, 2))
        # Another batch size may use another kernel and round to the next level.
        torch.testing.assert_close(three[:2], two, rtol=0, atol=1)
        with pytest.raises(UserError, match="top_k does not apply to this run of darl"):
            larger.sample(2, top_k=3)
        with pytest.raises(UserError, match=r"18.*do not fit: objective.patch_size"):
            at_image_size(trained.config, 18)
        if positions == "learned":
            before, after = (
                dict(run.inference.layers.named_parameters())["embedding.positions.weight"]
                for run in (trained, larger)
            )
            assert torch.equal(after, resize_table(before.detach(), 64))
    finally:
        close_context()
