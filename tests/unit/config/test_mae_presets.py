"""MAE presets against Tables 8 to 10 of the paper and the authors' FINETUNE.md."""

from pathlib import Path

import pytest

from megavis.config.load import load_config

pytestmark = pytest.mark.once

FOLDER = Path(__file__).parents[3] / "yaml_configs/mae"
IMAGES = 1_281_167

# Layers, width, heads and patch of the encoder; epochs of pre-training (tables 1 and 3).
SIZES = {
    "vit_b16": (12, 768, 12, 16, 1600),
    "vit_l16": (24, 1024, 16, 16, 800),
    "vit_h14": (32, 1280, 16, 14, 1600),
}
# Epochs, base rate, layer decay, drop path (FINETUNE.md).
FINE_TUNING = {
    "vit_b16": (100, 5e-4, 0.65, 0.1),
    "vit_l16": (50, 1e-3, 0.75, 0.2),
    "vit_h14": (50, 1e-3, 0.75, 0.3),
}
PUBLISHED = [
    *SIZES,
    *(f"{size}_finetune" for size in FINE_TUNING),
    "vit_b16_linear",
    "vit_l16_linear",
]


@pytest.fixture(scope="module")
def load():
    return lambda name: load_config(FOLDER / f"{name}.yaml").config


def steps(epochs, batch_size):
    """Return the number of steps in the given epochs of ImageNet."""
    return round(epochs * IMAGES / batch_size)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_architecture_of_their_size(load, name):
    config = load(name)
    layers, width, heads, patch, _ = SIZES["_".join(name.split("_")[:2])]
    model, paper = config.model, config.objective
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (
        layers,
        width,
        heads,
    )
    assert model.mlp_size == 4 * width
    assert (model.normalization, model.norm_epsilon) == ("layer_norm", 1e-6)
    assert (model.activation, model.add_bias) == ("gelu", True)
    assert (config.data.image_size, paper.patch_size, paper.mask_ratio) == (224, patch, 0.75)
    assert paper.normalize_targets
    assert paper.class_token
    decoder = paper.decoder
    assert (decoder.num_layers, decoder.hidden_size, decoder.num_attention_heads) == (8, 512, 16)


@pytest.mark.parametrize("name", SIZES)
def test_pretraining_matches_table_8(load, name):
    config, epochs = load(name), SIZES[name][-1]
    optimizer, schedule, training = config.optimizer, config.schedule, config.training
    assert (optimizer.algorithm, optimizer.betas) == ("adam", (0.9, 0.95))
    assert optimizer.learning_rate == pytest.approx(1.5e-4 * 4096 / 256)
    assert (optimizer.weight_decay, optimizer.gradient_clipping) == (0.05, 0.0)
    assert (schedule.decay, schedule.warmup_steps) == ("cosine", steps(40, 4096))
    assert (training.batch_size, training.steps) == (4096, steps(epochs, 4096))
    # Random crops of 20 to 100 % and flips, no other augmentation (section 4.1).
    data = config.data
    assert (data.crop, data.scale, data.flip, data.rand_augment) == (
        "random_resized",
        (0.2, 1.0),
        True,
        None,
    )
    assert config.model.drop_path == 0.0


@pytest.mark.parametrize("name", FINE_TUNING)
def test_finetuning_matches_table_9(load, name):
    config = load(f"{name}_finetune")
    epochs, rate, decay, drop_path = FINE_TUNING[name]
    optimizer, training, finetune = config.optimizer, config.training, config.finetune
    assert (optimizer.algorithm, optimizer.betas) == ("adam", (0.9, 0.999))
    assert optimizer.learning_rate == pytest.approx(rate * 1024 / 256)
    assert (optimizer.weight_decay, optimizer.gradient_clipping) == (0.05, 0.0)
    assert (config.schedule.decay, config.schedule.warmup_steps) == ("cosine", steps(5, 1024))
    assert (training.batch_size, training.steps) == (1024, steps(epochs, 1024))
    data = config.data
    assert (data.rand_augment, data.scale, data.flip) == ((9, 0.5), (0.08, 1.0), True)
    assert (finetune.layer_decay, config.drop_path) == (decay, drop_path)
    assert (finetune.label_smoothing, finetune.mixup, finetune.cutmix) == (0.1, 0.8, 1.0)
    assert (finetune.read_out, finetune.num_classes) == ("first", 1000)
    assert finetune.from_run == f"runs/{load(name).name}"


@pytest.mark.parametrize("name", ["vit_b16", "vit_l16"])
def test_linear_probing_matches_table_10(load, name):
    config = load(f"{name}_linear")
    optimizer, training, finetune = config.optimizer, config.training, config.finetune
    assert (optimizer.algorithm, optimizer.betas[0], optimizer.weight_decay) == ("lars", 0.9, 0.0)
    assert optimizer.learning_rate == pytest.approx(0.1 * 16384 / 256)
    assert (config.schedule.decay, config.schedule.warmup_steps) == ("cosine", steps(10, 16384))
    assert (training.batch_size, training.steps) == (16384, steps(90, 16384))
    data = config.data
    assert (data.crop, data.scale, data.flip, data.rand_augment) == (
        "random_resized",
        (0.08, 1.0),
        True,
        None,
    )
    assert finetune.linear_evaluation
    assert (finetune.label_smoothing, finetune.mixup, finetune.cutmix) == (0.0, 0.0, 0.0)
    assert (config.drop_path, finetune.layer_decay) == (0.0, 1.0)
    assert (finetune.read_out, finetune.num_classes) == ("first", 1000)
    assert finetune.from_run == f"runs/{load(name).name}"
