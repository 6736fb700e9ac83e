"""MAE presets against Tables 8 to 10 of the paper and the authors' FINETUNE.md."""

import functools

import pytest
from protocols import load_run

from megavis.papers import build_objective
from megavis.planning.parameters import by_part, count_parameters, trained_only

pytestmark = pytest.mark.once

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
    "vit_h14_linear",
]
SELECTION, TEST = "shards/imagenet_jpeg/selection", "shards/imagenet_jpeg/validation"


@pytest.fixture(scope="module")
def load():
    return functools.partial(load_run, "mae")


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
    assert config.objective.normalize_targets
    assert (finetune.layer_decay, config.drop_path) == (decay, drop_path)
    assert (finetune.label_smoothing, finetune.mixup, finetune.cutmix) == (0.1, 0.8, 1.0)
    assert (finetune.read_out, finetune.num_classes) == ("first", 1000)
    assert finetune.from_run == f"runs/{load(name).name}"
    # All 50,000 validation images are reported, and none of them chooses the step.
    assert (data.validation, finetune.test) == (SELECTION, TEST)
    # main_finetune.py: min_lr, trainable pos_embed, head of the classifier; Mixup of a batch.
    assert (config.schedule.min_rate, config.model.positions) == (1e-6, "learned_sincos")
    assert (finetune.classifier_std, finetune.mixing) == (2e-5, "batch")


@pytest.fixture
def parameter_count(context, load):
    """Count the trainable parameters of a preset on the meta device."""

    def count(name):
        matrices = trained_only(count_parameters(build_objective(load(name), context)))
        return sum(by_part(matrices).values())

    return count


@pytest.mark.parametrize("name", SIZES)
def test_parameters_match_the_released_models(parameter_count, name):
    """ViT-B fine-tunes 86,567,656 with a position of the class token, which is zero here."""
    layers, width, _, patch, _ = SIZES[name]
    blocks = layers * (12 * width**2 + 13 * width)
    cells, pixels = (224 // patch) ** 2, 3 * patch**2
    assert parameter_count(name) == (
        (pixels + 1) * width + width + blocks
        + 2 * width + (width + 1) * 512 + 512 + 8 * (12 * 512**2 + 13 * 512)
        + 2 * 512 + 513 * pixels
    )  # fmt: skip
    tuned = parameter_count(f"{name}_finetune")
    assert tuned == (pixels + 1 + cells + 1) * width + blocks + 2 * width + (width + 1) * 1000
    if name == "vit_b16":
        assert tuned + 768 == 86_567_656
    probed = parameter_count(f"{name}_linear")
    assert probed == (width + 1) * 1000


@pytest.mark.parametrize("name", SIZES)
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
    assert (data.validation, finetune.test) == (SELECTION, TEST)
    assert config.schedule.min_rate == 0.0
    assert (finetune.read_out, finetune.num_classes) == ("first", 1000)
    assert finetune.from_run == f"runs/{load(name).name}"


def test_rows_of_table_1_have_unnormalised_pixels(load):
    """Its default: ViT-L, 800 epochs, and for fine-tuning drop path 0.1 of table 9."""
    source = load("vit_l16_pixels")
    assert not source.objective.normalize_targets
    assert source.training == load("vit_l16").training
    tuned, probed = load("vit_l16_pixels_finetune"), load("vit_l16_pixels_linear")
    for config in (tuned, probed):
        assert config.objective == source.objective
        assert config.finetune.from_run == f"runs/{source.name}"
    assert (tuned.drop_path, tuned.finetune.layer_decay, tuned.training.steps) == (
        0.1,
        0.75,
        steps(50, 1024),
    )
    assert tuned.optimizer.learning_rate == pytest.approx(1e-3 * 1024 / 256)
    assert probed.training == load("vit_l16_linear").training


@pytest.mark.parametrize("name", SIZES)
def test_training_from_scratch_matches_table_11(load, name):
    config = load(f"{name}_scratch")
    small = name == "vit_b16"
    optimizer, finetune = config.optimizer, config.finetune
    assert (optimizer.algorithm, optimizer.betas) == ("adam", (0.9, 0.95))
    assert optimizer.learning_rate == pytest.approx(1e-4 * 4096 / 256)
    assert (optimizer.weight_decay, optimizer.ema_decay) == (0.3, 0.9999)
    assert (config.schedule.decay, config.schedule.warmup_steps) == ("cosine", steps(20, 4096))
    assert config.training.batch_size == 4096
    assert config.training.steps == pytest.approx(steps(300 if small else 200, 4096), abs=1)
    assert (config.data.rand_augment, config.drop_path) == ((9, 0.5), 0.1 if small else 0.2)
    assert (finetune.label_smoothing, finetune.mixup, finetune.cutmix) == (0.1, 0.8, 1.0)
    assert (finetune.from_run, finetune.layer_decay, config.model.positions) == (
        None,
        1.0,
        "sincos",
    )
    assert (config.data.validation, finetune.test) == (SELECTION, TEST)
