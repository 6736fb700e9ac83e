"""MP3 presets against Tables 1, 3 and 4 and section 4.2 of the paper, and DeiT's recipe."""

from pathlib import Path

import pytest
from protocols import load_run

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[3] / "yaml_configs/mp3"

# Width, layers, side, patch, positions, η, batch, epochs, training images.
PUBLISHED = {
    "vit_s_cifar100": (384, 12, 32, 4, 64, 0.5, 256, 2000, 50_000),
    "vit_b_tiny_imagenet": (768, 12, 64, 8, 64, 0.8, 512, 2000, 100_000),
    "vit_b_imagenet": (768, 12, 224, 16, 196, 0.75, 2048, 100, 1_281_167),
    "vit_l_imagenet": (1024, 24, 224, 16, 196, 0.75, 2048, 150, 1_281_167),
    # Appendix B
    "vit_b_imagenet_150": (768, 12, 224, 16, 196, 0.75, 2048, 150, 1_281_167),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_pretraining_matches_the_paper(name):
    width, layers, side, patch, positions, ratio, batch, epochs, images = PUBLISHED[name]
    config = load_run("mp3", name)
    model, paper, training = config.model, config.objective, config.training
    assert (model.hidden_size, model.num_layers, model.head_size) == (width, layers, 64)
    assert (config.data.image_size, paper.patch_size, paper.mask_ratio) == (side, patch, ratio)
    assert (side // patch) ** 2 == positions
    assert (training.batch_size, training.steps) == (batch, -(-epochs * images // batch))
    assert (config.optimizer.weight_decay, model.drop_path) == (0.05, 0.1)
    assert config.optimizer.learning_rate == pytest.approx(5e-4 * batch / 512)
    assert config.schedule.warmup_steps == -(-5 * images // batch)
    assert config.schedule.min_rate == 1e-5
    # "In the pretraining phase, we do not use CutMix, MixUp, Random Erasing, Repeated Augmentation
    # and label smoothing": RandAugment stays.
    data = config.data
    assert (data.rand_augment, data.random_erasing, data.repeats) == ((9, 0.5), 0.0, 1)
    assert data.flip
    if side == 32:  # DeiT's code: RandomCrop(32, padding=4), and no resize
        assert (data.crop, data.border) == ("shifted", "zeros")
    else:
        assert (data.crop, data.scale) == ("random_resized", (0.08, 1.0))
        assert data.short_side == int(side / (224 / 256))


# Epochs, positions, pre-trained preset, classes (tables 3 and 4).
FINE_TUNING = {
    "vit_b_imagenet_finetune": (150, "learned", "vit_b_imagenet", 1000),
    "vit_b_imagenet_finetune_none": (300, "none", "vit_b_imagenet", 1000),
    "vit_b_imagenet_scratch": (300, "learned", None, 1000),
    "vit_l_imagenet_finetune": (150, "learned", "vit_l_imagenet", 1000),
    "vit_s_cifar100_finetune": (400, "learned", "vit_s_cifar100", 100),
    "vit_s_cifar100_scratch": (400, "learned", None, 100),
    "vit_b_tiny_imagenet_finetune": (400, "learned", "vit_b_tiny_imagenet", 200),
    "vit_b_tiny_imagenet_scratch": (400, "learned", None, 200),
}


@pytest.mark.parametrize("name", FINE_TUNING)
def test_finetuning_matches_deit(name):
    epochs, positions, start, classes = FINE_TUNING[name]
    config = load_run("mp3", name)
    before = name.split("_finetune")[0].split("_scratch")[0]
    base, images = load_run("mp3", before), PUBLISHED[before][-1]
    batch, tuning, data = config.training.batch_size, config.finetune, config.data
    assert batch == base.training.batch_size
    assert (config.optimizer, config.schedule) == (base.optimizer, base.schedule)
    assert config.training.steps == -(-epochs * images // batch)
    assert config.model.positions == positions
    assert tuning.from_run == (start and f"runs/mp3_{start}")
    assert (tuning.num_classes, tuning.read_out, tuning.layer_decay) == (classes, "first", 1.0)
    # DeiT's defaults: --mixup 0.8 --cutmix 1.0 --smoothing 0.1 --reprob 0.25 --repeated-aug
    assert (tuning.mixup, tuning.cutmix, tuning.label_smoothing) == (0.8, 1.0, 0.1)
    # "--batch-size 64" a process, which shares the draws of both; timm's ViT: trunc_normal_(0.02).
    assert (tuning.mixing, tuning.mixing_batch, tuning.classifier_std) == ("batch", 64, 0.02)
    assert (data.random_erasing, data.repeats, data.rand_augment) == (0.25, 3, (9, 0.5))
    assert (data.crop, data.short_side) == (base.data.crop, base.data.short_side)
    assert (config.drop_path, config.optimizer.weight_decay) == (0.1, 0.05)


@pytest.mark.parametrize(
    ("name", "classes", "images"), [("cifar10", 10, 45_000), ("cars", 196, 8144 - 814)]
)
def test_transfer_starts_from_150_epoch_pretraining(name, classes, images):
    """Appendix B: "50K training examples in 10 classes and 8144 training examples in 196"."""
    config = load_run("mp3", f"vit_b_imagenet_finetune_{name}")
    before = load_run("mp3", "vit_b_imagenet_150")
    assert (config.objective, config.data.image_size) == (before.objective, 224)
    assert config.finetune.from_run == str(before.folder)
    assert config.finetune.num_classes == classes
    # A tenth of the training images is held out for model selection.
    epochs = config.training.steps * config.training.batch_size / images
    assert epochs == pytest.approx({"cifar10": 400, "cars": 1000}[name], rel=1e-3)
    assert config.optimizer.learning_rate == 5e-4 * config.training.batch_size / 512


def test_speech_presets_match_the_paper(build_paper):
    path = PRESETS / "speech_commands.yaml"
    objective, inference = build_paper(path.read_text())
    config = objective.config
    model, training = config.model, config.training
    assert (model.num_layers, model.hidden_size, model.mlp_size) == (8, 32, 64)
    assert (model.hidden_dropout, model.positions) == (0.1, "sincos")
    schedule = objective.schedule
    assert (config.data.frames, schedule.num_placed, schedule.mask_ratio) == ((100, 40), 5, 0.0)
    assert (training.batch_size, config.optimizer.learning_rate) == (256, 1e-3)
    assert (config.data.time_shift, bool(config.data.background_noise)) == (0.1, True)
    assert (config.schedule.warmup_steps, config.schedule.halve_every) == (500, 10_000)
    assert config.schedule.warmup_rate == 1e-4
    # "Early stopping is done based on validation accuracy", of pre-training too; TC-ResNet, whose
    # preparation is kept, normalises nothing (section 4.1).
    assert (training.patience, config.data.normalize_frames) == (10, False)
    assert training.validation_images == 2_577 + 2 * 258
    # "Around 70K parameters": with a head of 12 classes instead of one of 100 positions.
    count = sum(parameter.numel() for _, parameter in inference.layers.named_parameters())
    assert count - 33 * 100 + 33 * 12 == pytest.approx(70_000, rel=0.01)
    tuning = load_run("mp3", "speech_commands_finetune")
    assert (tuning.training.steps, tuning.finetune.label_smoothing) == (30_000, 0.1)
    assert (tuning.schedule, tuning.data) == (config.schedule, config.data)
    assert (tuning.training.batch_size, tuning.optimizer) == (256, config.optimizer)
    assert (tuning.finetune.patience, tuning.finetune.num_classes) == (10, 12)
    assert tuning.finetune.test == "shards/speech_commands/test"
