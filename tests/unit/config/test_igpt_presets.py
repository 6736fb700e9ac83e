"""iGPT presets against sections 3.1 to 4.7, appendix A.1, Figure 3 and Table 5 of the paper."""

import functools
from pathlib import Path

import pytest
from protocols import load_run

pytestmark = pytest.mark.once

FOLDER = Path(__file__).parents[3] / "yaml_configs/igpt"
# Layers, width (section 3.3), side, mode and learning rate (Table 5).
PUBLISHED = {
    "s_32": (24, 512, 32, "autoregressive", 0.003),
    "m_32": (36, 1024, 32, "autoregressive", 0.003),
    "l_32": (48, 1536, 32, "autoregressive", 0.001),
    "l_48": (48, 1536, 48, "autoregressive", 0.01),
    "xl_64": (60, 3072, 64, "autoregressive", 0.0003),
    "s_32_bert": (24, 512, 32, "bert", 0.01),
    "m_32_bert": (36, 1024, 32, "bert", 0.003),
    "l_32_bert": (48, 1536, 32, "bert", 0.001),
}
# Other sizes, with the learning rate of the published model of the same depth.
UNPUBLISHED = {
    "s_48": (24, 512, 48, "autoregressive", 0.003),
    "s_64": (24, 512, 64, "autoregressive", 0.003),
    "m_48": (36, 1024, 48, "autoregressive", 0.003),
    "m_64": (36, 1024, 64, "autoregressive", 0.003),
    "l_64": (48, 1536, 64, "autoregressive", 0.001),
    "xl_32": (60, 3072, 32, "autoregressive", 0.0003),
    "xl_48": (60, 3072, 48, "autoregressive", 0.0003),
}
# The pre-trained preset (section 4.5; 4.6 for BERT).
FINE_TUNED = {
    "l_32_finetune_imagenet": "l_32",
    "l_48_finetune_imagenet": "l_48",
    "l_32_bert_finetune_imagenet": "l_32_bert",
}
# The pre-trained preset and the number of classes (section 4.5, Table 3; section 4.6).
SMALL_IMAGES = {
    "l_32_finetune_cifar10": ("l_32", 10),
    "l_32_finetune_cifar100": ("l_32", 100),
    "l_32_bert_finetune_cifar10": ("l_32_bert", 10),
}


@pytest.fixture(scope="module")
def load():
    return functools.partial(load_run, "igpt")


@pytest.mark.parametrize("name", [*PUBLISHED, *UNPUBLISHED])
def test_pretraining_matches_the_paper(load, name):
    config, (layers, width, side, mode, rate) = load(name), (PUBLISHED | UNPUBLISHED)[name]
    model, optimizer, data = config.model, config.optimizer, config.data
    assert (model.num_layers, model.hidden_size, data.image_size) == (layers, width, side)
    assert (config.objective.mode, config.objective.mask_ratio) == (mode, 0.15)
    assert (optimizer.learning_rate, optimizer.betas) == (rate, (0.9, 0.95))
    assert (optimizer.weight_decay, model.has_dropout) == (0.0, False)
    batch, steps = (64, 2_000_000) if name.startswith("xl") else (128, 1_000_000)
    assert (config.training.batch_size, config.training.steps) == (batch, steps)
    # One epoch of the 96 % of images that are not held out.
    assert config.schedule.warmup_steps == -(-1_229_920 // batch)
    assert config.schedule.decay == "cosine"


@pytest.mark.parametrize("name", PUBLISHED)
def test_augmentation_matches_section_3_1(load, name):
    data = load(name).data
    assert (data.crop, data.short_sides, data.crop_size) == ("scaled", (256, 384), 224)
    assert (data.palette, data.flip) == ("palette.npy", False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_checkpoints_of_figure_3_are_kept(load, name):
    config = load(name)
    points = [65_536 * 2**i for i in range(6) if 65_536 * 2**i < config.training.steps]
    assert list(config.checkpoint.keep_at) == points


@pytest.mark.parametrize("name", FINE_TUNED)
def test_imagenet_finetuning_matches_section_3_4(load, name):
    config, before = load(name), load(FINE_TUNED[name])
    assert (config.objective, config.model, config.data) == (
        before.objective,
        before.model,
        before.data,
    )
    assert config.optimizer.learning_rate == pytest.approx(before.optimizer.learning_rate / 10)
    assert config.optimizer.betas == (0.9, 0.95)
    assert (config.training.batch_size, config.schedule.decay) == (128, "constant")
    assert (config.finetune.generative_weight, config.model.has_dropout) == (1.0, False)
    assert config.finetune.patience > 0
    assert config.finetune.from_run == f"runs/{before.name}"


@pytest.mark.parametrize("name", SMALL_IMAGES)
def test_cifar_finetuning_matches_sections_3_1_and_3_4(load, name):
    before, classes = SMALL_IMAGES[name]
    config, source = load(name), load(before)
    assert (config.objective, config.model) == (source.objective, source.model)
    # "4 pixels are reflection padded on each side, and a 32 × 32 crop is randomly sampled from the
    # padded image or its horizontal flip".
    data = config.data
    assert (data.crop, data.border, data.flip, data.image_size) == ("shifted", "reflect", True, 32)
    # "The same batch size and Adam hyperparameters", no cosine, early stopping, no dropout.
    assert (config.training.batch_size, config.schedule.decay) == (128, "constant")
    optimizer = config.optimizer
    assert (optimizer.betas, optimizer.weight_decay) == ((0.9, 0.95), 0.0)
    assert optimizer.learning_rate == pytest.approx(source.optimizer.learning_rate / 10)
    tuning = config.finetune
    assert (tuning.generative_weight, tuning.read_out, tuning.visibility) == (1.0, "mean", "kept")
    assert (tuning.from_run, tuning.num_classes) == (str(source.folder), classes)
    assert tuning.patience > 0
    assert not config.model.has_dropout


def test_baseline_from_scratch_has_dropout(load):
    config = load("l_48_scratch_imagenet")
    assert config.model.has_dropout
    assert (config.finetune.from_run, config.finetune.generative_weight) == (None, 0.0)
    assert config.training.steps == -(-18 * 1_229_920 // 128)


@pytest.mark.parametrize("name", ["s_32", "m_32", "l_32", "l_48", "xl_64", "l_32_bert"])
def test_linear_probe_matches_section_3_4(load, name):
    config, before = load(f"{name}_linear"), load(name)
    optimizer, finetune = config.optimizer, config.finetune
    assert (config.objective, config.model) == (before.objective, before.model)
    # XL's web images have no labels.
    imagenet = before.data.train_sources[0].path
    assert config.data == before.data.model_copy(update={"train": imagenet})
    assert (optimizer.algorithm, optimizer.learning_rate) == ("sgd", 30)
    assert (optimizer.betas[0], optimizer.weight_decay) == (0.9, 0.0)
    assert (config.schedule.decay, config.schedule.warmup_steps) == ("cosine", 0)
    assert config.training.steps == 10_000_000
    assert (finetune.linear_evaluation, finetune.standardize, finetune.read_out) == (
        True,
        False,
        "mean",
    )
    # "Zero initializing the matrices producing token and class logits. We applied these settings to
    # all models." (appendix A.1)
    assert finetune.classifier_std == 0.0
    assert (finetune.from_run, finetune.num_classes) == (f"runs/{before.name}", 1000)
    # The 4 % select, ImageNet's validation set is tested (section 3.1).
    assert config.data.validation == "shards/imagenet_96/validation"
    assert finetune.test == "shards/imagenet_jpeg/validation"


def test_forty_labels_match_sections_3_4_and_4_7(load):
    """ "The same batch size"; "we do not make use of pseudo-labeling or data augmentation"."""
    config = load("l_32_finetune_cifar10_40")
    data = config.data
    assert (data.images_per_class, data.crop, data.flip) == (4, "none", False)
    assert (config.training.batch_size, config.finetune.num_classes) == (128, 10)
    assert config.finetune.test == load("l_32_finetune_cifar10").finetune.test


@pytest.mark.parametrize("name", ["xl_64", "xl_64_4x8_h100"])
def test_web_images_of_xl_are_not_augmented(load, name):
    """Section 3.1; 96 % of ImageNet and 100 million web images, each image equally often."""
    imagenet, web = load(name).data.train_sources
    assert load(name).data.training_crops == ("scaled", "center")
    assert imagenet.weight / web.weight == pytest.approx(0.96 * 1_281_167 / 100e6, rel=1e-3)


def test_xl_concatenates_15360_features(load):
    """Table 2."""
    config = load("xl_64_linear_5")
    assert config.finetune.concatenate * config.model.hidden_size == 15_360
    assert config.finetune.layer == load("xl_64_linear").finetune.layer


def test_mnist_is_the_network_of_transformers_are_rnns(load):
    """Section 4.2.1 there: 8 layers, 8 heads of 32, 1e-4, 250 epochs; 10 images a step."""
    config = load("mnist")
    model, data = config.model, config.data
    assert (model.num_layers, model.num_attention_heads, model.hidden_size) == (8, 8, 256)
    assert (data.image_size, config.objective.vocabulary_size) == (28, 256)
    assert (config.optimizer.learning_rate, config.schedule.decay) == (1e-4, "constant")
    assert (config.training.batch_size, config.training.steps) == (10, 250 * 6_000)
    assert list(config.checkpoint.keep_at) == [epoch * 6_000 for epoch in (10, 50, 100, 150, 200)]
