"""DARL presets against Tables 8 to 10, 12 and 13 of the paper."""

import functools

import pytest
from protocols import load_run

pytestmark = pytest.mark.once

IMAGES = 1_281_167
SIZES = {"vit_b16": (12, 768, 12, 16), "vit_l16": (24, 1024, 16, 16), "vit_h14": (32, 1280, 16, 14)}
SPATIAL = {"crop": "random_resized", "flip": True, "rand_augment": None}
STRONG = {**SPATIAL, "rand_augment": (9, 0.5)}
# Epochs (Figure 4 and Table 5; sections 4 and 4.1; Table 1).
PRE_TRAINING = {
    **{f"{size}_{loss}": 800 for size in SIZES for loss in ("mse", "diff")},
    "vit_l16_mse_100": 100,
    "vit_l16_diff_100": 100,
    "vit_l16_mse_400": 400,
    "vit_l16_ids": 100,
}
# Epochs, learning rate, drop path (Table 9) and the pre-trained preset.
FINE_TUNING = {
    **{f"vit_b16_{loss}_finetune": (90, 1e-3, 0.0, f"vit_b16_{loss}") for loss in ("mse", "diff")},
    **{f"vit_l16_{loss}_finetune": (90, 1e-3, 0.1, f"vit_l16_{loss}") for loss in ("mse", "diff")},
    **{f"vit_h14_{loss}_finetune": (90, 3e-3, 0.2, f"vit_h14_{loss}") for loss in ("mse", "diff")},
    "vit_l16_mse_finetune_50": (50, 1e-3, 0.0, "vit_l16_mse_100"),
    "vit_l16_diff_finetune_50": (50, 1e-3, 0.0, "vit_l16_diff_100"),
    "vit_l16_ids_finetune_50": (50, 1e-3, 0.0, "vit_l16_ids"),
    "vit_l16_mse_400_finetune": (50, 1e-3, 0.0, "vit_l16_mse_400"),
    "vit_l16_mse_finetune_384": (50, 1e-3, 0.0, "vit_l16_mse_400"),
}
LINEAR = {f"{size}_diff_linear": size for size in SIZES}


@pytest.fixture(scope="module")
def load():
    return functools.partial(load_run, "darl")


def steps(epochs, batch_size):
    return -(-epochs * IMAGES // batch_size)


def has(section, values):
    assert {key: getattr(section, key) for key in values} == values


@pytest.mark.parametrize("name", [*PRE_TRAINING, *FINE_TUNING, *LINEAR, "vit_l16_supervised"])
def test_presets_have_the_architecture_of_their_size(load, name):
    config = load(name)
    layers, width, heads, patch = SIZES["_".join(name.split("_")[:2])]
    shape = {"num_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    has(config.model, {**shape, "mlp_size": 4 * width, "positions": "rope_2d"})
    assert config.objective.patch_size == patch
    assert config.data.image_size == (384 if name.endswith("384") else 224)
    assert config.model.position_scale == (
        pytest.approx(14 / 24, rel=1e-5) if name.endswith("384") else 1.0
    )


@pytest.mark.parametrize("name", PRE_TRAINING)
def test_pretraining_matches_table_8(load, name):
    config = load(name)
    has(config.data, SPATIAL)
    optimizer = {"algorithm": "adam", "betas": (0.9, 0.95), "weight_decay": 0.05}
    has(config.optimizer, {**optimizer, "gradient_clipping": 0.0})
    assert config.optimizer.learning_rate == pytest.approx(1.5e-4 * 4096 / 256)
    has(config.schedule, {"decay": "cosine", "warmup_steps": steps(40, 4096)})
    has(config.training, {"batch_size": 4096, "steps": steps(PRE_TRAINING[name], 4096)})
    assert config.drop_path == 0.0
    if "diff" in name:
        has(config.objective, {"noise_a": 0.03, "noise_b": 1.0, "predicts": "clean"})
        has(config.objective, {"decoder_kind": "transformer", "decoder_layers": 1})
        assert not config.objective.condition_on_gamma


@pytest.mark.parametrize("name", FINE_TUNING)
def test_finetuning_matches_table_9(load, name):
    config = load(name)
    epochs, rate, drop_path, before = FINE_TUNING[name]
    has(config.data, {**STRONG, "scale": (0.08, 1.0)})
    has(config.optimizer, {"betas": (0.9, 0.95), "weight_decay": 0.05, "learning_rate": rate})
    has(config.schedule, {"decay": "cosine", "warmup_steps": steps(5, 4096)})
    has(config.training, {"batch_size": 4096, "steps": steps(epochs, 4096)})
    finetune = {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "layer_decay": 0.75}
    # Section 4: the last patch, without the causal mask.
    has(config.finetune, {**finetune, "visibility": "full", "read_out": "last"})
    has(config.finetune, {"from_run": f"runs/{load(before).name}", "num_classes": 1000})
    assert config.drop_path == drop_path


def test_supervised_baseline_matches_table_10(load):
    config = load("vit_l16_supervised")
    has(config.data, STRONG)
    has(config.optimizer, {"betas": (0.9, 0.95), "weight_decay": 0.3})
    assert config.optimizer.learning_rate == pytest.approx(1e-4 * 4096 / 256)
    has(config.schedule, {"decay": "cosine", "warmup_steps": steps(20, 4096)})
    has(config.training, {"batch_size": 4096, "steps": steps(200, 4096)})
    has(config.finetune, {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "from_run": None})
    assert config.finetune.read_out == "mean"
    assert config.drop_path == 0.2


@pytest.mark.parametrize("loss", ["mse", "diff"])
def test_transfer_matches_table_12(load, loss):
    config = load(f"vit_l16_{loss}_vtab")
    assert config.finetune.from_run == str(load(f"vit_l16_{loss}").folder)
    assert config.objective == load(f"vit_l16_{loss}").objective
    has(config.optimizer, {"betas": (0.9, 0.95)})
    assert config.optimizer.learning_rate in (1e-3, 1e-2, 1e-1)
    assert config.optimizer.weight_decay in (0.1, 0.3)
    assert config.finetune.layer_decay in (0.7, 0.8, 0.9)
    assert config.drop_path in (0.0, 0.1, 0.2)
    has(config.schedule, {"decay": "cosine", "warmup_steps": 3000})
    has(config.training, {"batch_size": 256, "steps": 20_000})
    has(config.finetune, {"label_smoothing": 0.1, "visibility": "kept"})


@pytest.mark.parametrize(("suffix", "rate"), [("", 0.1), ("_scaled", 0.1 * 16384 / 256)])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_evaluation_matches_table_13(load, name, suffix, rate):
    config = load(name + suffix)
    has(config.data, SPATIAL)
    has(config.optimizer, {"algorithm": "lars", "weight_decay": 0.0})
    assert config.optimizer.betas[0] == 0.9
    assert config.optimizer.learning_rate == pytest.approx(rate)
    has(config.schedule, {"decay": "cosine", "warmup_steps": steps(10, 16384)})
    has(config.training, {"batch_size": 16384, "steps": steps(90, 16384)})
    finetune = {"linear_evaluation": True, "label_smoothing": 0.1, "mixup": 0.0, "cutmix": 0.0}
    has(config.finetune, {**finetune, "visibility": "kept", "read_out": "mean"})
    has(config.finetune, {"from_run": f"runs/darl_{LINEAR[name]}_diff"})
    assert config.drop_path == 0.0


@pytest.mark.parametrize("name", [*FINE_TUNING, *LINEAR, "vit_l16_supervised"])
def test_accuracy_is_measured_on_the_imagenet_validation_set(load, name):
    config = load(name)
    assert config.finetune.test == "shards/imagenet_jpeg/validation"
    assert config.data.validation == "shards/imagenet_jpeg/selection"
