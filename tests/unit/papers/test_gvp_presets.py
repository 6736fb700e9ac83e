"""A preset for every row of the paper's tables that is a model of its own."""

from pathlib import Path

import pytest

from megavis.config.load import load_config

FOLDER = Path(__file__).parents[3] / "yaml_configs/gvp"
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
    return lambda name: load_config(FOLDER / f"{name}.yaml").config


@pytest.mark.parametrize("table", TABLES)
def test_rows_of_the_tables(load, table):
    for name, row in TABLES[table].items():
        config = load(name)
        said = config.objective.model_dump()
        assert {key: said[key] for key in {**DEFAULT, **row}} == {**DEFAULT, **row}, name
        # Section 5: ViT-B for 200 epochs, batch 4096, 16² or 14² tokens.
        model = config.model
        assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (12, 768, 12)
        assert config.objective.num_patches(config) == (256 if said["variant"] == "d2d" else 196)
        assert config.training.batch_size == 4096
        if table != "7":
            assert config.training.steps == round(200 * 1_281_167 / 4096)


@pytest.mark.parametrize("variant", ["p2p", "p2d", "d2d"])
def test_fine_tuning_drops_the_mask(load, variant):
    config = load(f"vit_b_{variant}_finetune")
    assert config.objective.variant == variant
    assert config.finetune.visibility == "full"
    assert config.finetune.from_run == f"runs/{load(f'vit_b_{variant}').name}"


@pytest.mark.parametrize("name", ["vit_b_p2p_scratch", "vit_b_d2d_scratch"])
def test_scratch_starts_from_nothing(load, name):
    assert load(name).finetune.from_run is None
