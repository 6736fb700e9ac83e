"""GVP's presets against the paper's tables."""

import functools

import pytest
from protocols import load_run

from megavis.papers import build_objective
from megavis.planning.parameters import by_part, count_parameters

pytestmark = pytest.mark.once

DEFAULT = {"variant": "p2p", "order": "random", "segmentation": "mixed", "num_groups": 20}

TABLES = {
    "1": {
        "vit_b_p2p": {},
        "vit_b_p2d": {"variant": "p2d"},
        "vit_b_d2d": {"variant": "d2d"},
    },
    "3": {"vit_b_p2p_raster": {"order": "raster"}, "vit_b_p2p": {}},
    "4": {
        **{
            f"vit_b_p2p_fixed_{k}": {"segmentation": "fixed", "num_groups": k}
            for k in (1, 5, 20, 40, 196)
        },
        **{
            f"vit_b_p2p_random_{k}": {"segmentation": "random", "num_groups": k}
            for k in (5, 20, 40)
        },
        **{f"vit_b_p2p_mixed_{k}": {"num_groups": k} for k in (5, 40)},
        "vit_b_p2p": {},
    },
    "7": {"vit_b_p2p": {}, "vit_b_p2p_features": {"condition_size": 256}},
    "10": {
        "vit_b_p2p_masked": {"segmentation": "given", "boundaries": (78,)},
        "vit_b_p2p_one_stream": {"streams": "one", "segmentation": "fixed", "num_groups": 196},
        "vit_b_p2p_fixed_196": {"segmentation": "fixed", "num_groups": 196},
        "vit_b_p2p": {},
    },
    "11": {
        "vit_b_p2d_fixed_20": {"variant": "p2d", "segmentation": "fixed"},
        "vit_b_p2d_random_20": {"variant": "p2d", "segmentation": "random"},
        "vit_b_p2d": {"variant": "p2d"},
    },
}


@pytest.fixture(scope="module")
def load():
    return functools.partial(load_run, "gvp")


@pytest.mark.parametrize("table", TABLES)
def test_presets_match_table_rows(load, table):
    for name, row in TABLES[table].items():
        config = load(name)
        keys = config.objective.model_dump()
        assert {key: keys[key] for key in {**DEFAULT, **row}} == {**DEFAULT, **row}, name
        # Section 5: ViT-B for 200 epochs, batch 4096, 16² or 14² tokens.
        model = config.model
        assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (12, 768, 12)
        assert config.objective.grammar(config).num_tokens(config) == (
            256 if keys["variant"] == "d2d" else 196
        )
        assert config.training.batch_size == 4096
        # 200 epochs: of ImageNet-100 with y_extra (table 7), and of ImageNet in all other rows.
        small = name == "vit_b_p2p_features"
        images = 126_689 if small else 1_281_167
        assert config.training.steps == round(200 * images / 4096)
        assert config.schedule.warmup_steps == pytest.approx(10 * images / 4096, abs=1)
        folder = "shards/imagenet100_jpeg" if small else "shards/imagenet_jpeg"
        assert (config.data.train, config.data.validation) == (
            f"{folder}/train",
            f"{folder}/validation",
        )


def test_the_tokenizer_has_the_parameters_of_table_1(load, context):
    """ "24M + 86M": encoder and codebook of the VQGAN, and ViT-B."""
    matrices = count_parameters(build_objective(load("vqgan"), context))
    encodes = ("vqgan.network.encoder.", "vqgan.network.quantize.")
    found = [m for m in matrices if m.name.startswith(encodes)]
    assert sum(m.parameters for m in found) == pytest.approx(24.04e6, abs=0.005e6)
    # All rows with ids, here and in DARL's table 16, name that run.
    own = [load(name) for name in ("vit_b_p2d", "vit_b_d2d", "vit_b_p2p_features")]
    for config in (*own, load_run("darl", "vit_l16_ids")):
        assert config.objective.tokenizer == f"runs/{load('vqgan').name}"
    blocks = count_parameters(build_objective(load("vit_b_d2d"), context))
    assert sum(by_part(blocks).values()) == pytest.approx(86e6, rel=0.01)


PRE_TRAINED = sorted({name for rows in TABLES.values() for name in rows} - {"vit_b_p2p_features"})


@pytest.mark.parametrize("name", [*PRE_TRAINED, "vit_b_p2p_800_epochs", "vit_b_p2d_800_epochs"])
def test_pre_training_matches_section_5(load, name):
    config = load(name)
    data, optimizer = config.data, config.optimizer
    assert (data.crop, data.scale, data.flip) == ("random_resized", (0.2, 1.0), True)
    assert (data.image_size, data.rand_augment) == (256 if "d2d" in name else 224, None)
    assert (optimizer.algorithm, config.training.batch_size) == ("adam", 4096)
    assert optimizer.learning_rate == pytest.approx(1.5e-4 * 4096 / 256)
    # Appendix C: 800 epochs, 40 of them warm-up.
    epochs, warmup = (800, 40) if name.endswith("800_epochs") else (200, 10)
    assert config.training.steps == round(epochs * 1_281_167 / 4096)
    assert config.schedule.warmup_steps == pytest.approx(warmup * 1_281_167 / 4096, abs=1)
    assert config.schedule.decay == "cosine"
    # "We just replace the y_extra with a class token"; MAE's decay, betas and no clipping.
    assert (config.objective.num_condition_tokens, config.objective.condition_size) == (1, None)
    assert (optimizer.betas, optimizer.weight_decay) == ((0.9, 0.95), 0.05)
    assert (optimizer.gradient_clipping, config.model.drop_path) == (0.0, 0.0)


def test_table_10_row_1_is_simmim(load):
    config = load("vit_b_p2p_masked_one_stream")
    words = config.objective
    assert (words.reads.kind, words.density.kind) == ("patches", "squared_error")
    # The row cites SimMIM, whose mask ratio is 0.6; masked patches are input rows too.
    assert (words.schedule.kind, words.schedule.mask_ratio, words.asks.kind) == (
        "masked",
        0.6,
        "mask",
    )
    other = load("vit_b_p2p")
    assert (config.optimizer, config.training, config.data) == (
        other.optimizer,
        other.training,
        other.data,
    )


EVALUATED = {
    "p2p": "vit_b_p2p",
    "p2d": "vit_b_p2d",
    "d2d": "vit_b_d2d",
    "p2p_masked_one_stream": "vit_b_p2p_masked_one_stream",
}


@pytest.mark.parametrize("name", EVALUATED)
def test_fine_tuning_uses_maes_recipe_without_mask(load, name):
    """MAE's Table 9; learning rate and layer decay of ViT-B are from the authors' FINETUNE.md."""
    config, before = load(f"vit_b_{name}_finetune"), load(EVALUATED[name])
    assert config.objective == before.objective
    assert config.finetune.visibility == "full"
    assert config.finetune.from_run == f"runs/{before.name}"
    assert config.optimizer.learning_rate == pytest.approx(5e-4 * 1024 / 256)
    assert (config.optimizer.betas, config.optimizer.weight_decay) == ((0.9, 0.999), 0.05)
    assert config.training.steps == -(-100 * 1_281_167 // 1024)
    assert config.schedule.warmup_steps == -(-5 * 1_281_167 // 1024)
    data, tuning = config.data, config.finetune
    assert (data.rand_augment, data.scale, data.flip) == ((9, 0.5), (0.08, 1.0), True)
    assert (tuning.mixup, tuning.cutmix, tuning.label_smoothing) == (0.8, 1.0, 0.1)
    assert (tuning.layer_decay, config.drop_path) == (0.65, 0.1)


@pytest.mark.parametrize("name", EVALUATED)
def test_linear_probing_uses_maes_recipe_with_mask(load, name):
    """MAE's Table 10; "for linear probing, we keep the causal mask" (section 5)."""
    config, before = load(f"vit_b_{name}_linear"), load(EVALUATED[name])
    assert config.objective == before.objective
    assert (config.finetune.visibility, config.finetune.linear_evaluation) == ("kept", True)
    assert config.finetune.from_run == f"runs/{before.name}"
    assert (config.optimizer.algorithm, config.optimizer.weight_decay) == ("lars", 0.0)
    assert config.optimizer.learning_rate == pytest.approx(0.1 * 16384 / 256)
    assert config.training.steps == -(-90 * 1_281_167 // 16384)
    assert config.schedule.warmup_steps == -(-10 * 1_281_167 // 16384)
    assert (config.data.scale, config.data.rand_augment) == ((0.08, 1.0), None)


def test_table_7_probes_imagenet_100(load):
    config = load("vit_b_p2p_features_linear")
    assert config.objective == load("vit_b_p2p_features").objective
    assert config.finetune.num_classes == 100
    assert config.training.steps == -(-90 * 126_689 // 16384)


@pytest.mark.parametrize("name", ["vit_b_p2p_scratch", "vit_b_d2d_scratch"])
def test_scratch_has_no_source_run(load, name):
    assert load(name).finetune.from_run is None
