"""MP3's presets against tables 1 and 4 and section 4.2 of the paper, and DeiT's recipe."""

from pathlib import Path

import pytest

from megavis.config.load import load_config

PRESETS = Path(__file__).parents[3] / "yaml_configs/mp3"

# Width, layers, side, patch, positions, η, batch, epochs, training images.
PUBLISHED = {
    "vit_s_cifar100": (384, 12, 32, 4, 64, 0.5, 256, 2000, 50_000),
    "vit_b_tiny_imagenet": (768, 12, 64, 8, 64, 0.8, 512, 2000, 100_000),
    "vit_b_imagenet": (768, 12, 224, 16, 196, 0.75, 2048, 100, 1_281_167),
    "vit_l_imagenet": (1024, 24, 224, 16, 196, 0.75, 2048, 150, 1_281_167),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_preset_trains_as_the_paper_says(name):
    width, layers, side, patch, positions, ratio, batch, epochs, images = PUBLISHED[name]
    config = load_config(PRESETS / f"{name}.yaml").config
    model, paper, training = config.model, config.objective, config.training
    assert (model.hidden_size, model.num_layers, model.head_size) == (width, layers, 64)
    assert (config.data.image_size, paper.patch_size, paper.mask_ratio) == (side, patch, ratio)
    assert (side // patch) ** 2 == positions
    assert (training.batch_size, training.steps) == (batch, round(epochs * images / batch))
    assert (config.optimizer.weight_decay, model.drop_path) == (0.05, 0.1)
    assert config.optimizer.learning_rate == pytest.approx(5e-4 * batch / 512)
    assert config.schedule.warmup_steps == round(5 * images / batch)


def test_speech_is_trained_as_the_paper_says(build_paper):
    path = PRESETS / "speech_commands.yaml"
    objective, runner = build_paper(path.read_text())
    config = objective.config
    model, training = config.model, config.training
    assert (model.num_layers, model.hidden_size, model.mlp_size) == (8, 32, 64)
    assert (model.hidden_dropout, model.positions) == (0.1, "sincos")
    schedule = objective.schedule
    assert (config.data.frames, schedule.num_placed, schedule.mask_ratio) == ((100, 40), 5, 0.0)
    assert (training.batch_size, config.optimizer.learning_rate) == (256, 1e-3)
    assert (config.schedule.warmup_steps, config.schedule.halve_every) == (500, 10_000)
    # "Around 70K parameters", of which a head of 100 places goes and one of 12 classes comes.
    count = sum(parameter.numel() for _, parameter in runner.layers.named_parameters())
    assert count - 33 * 100 + 33 * 12 == pytest.approx(70_000, rel=0.01)
    tuning = load_config(PRESETS / "speech_commands_finetune.yaml").config
    assert (tuning.training.steps, tuning.finetune.label_smoothing) == (30_000, 0.1)
