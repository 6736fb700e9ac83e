"""Config shorthand: model presets and lengths in epochs, their expansion and errors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig, dump_config, load_config
from megavis.config.shorthand import PRESETS, PresetName

Load = Callable[..., LoadedConfig]

TEXT = """\
name: short
objective: {name: igpt}
model: {preset: igpt_s}
data: {train: shards, image_size: 32, num_images: 1000}
optimizer: {learning_rate: 1e-3}
schedule: {warmup_epochs: 0.5}
training: {epochs: 3, batch_size: 64}
checkpoint: {every_epochs: 1, keep_every_epochs: 2}
"""


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load the config with overrides."""

    def loaded(*words: str, text: str = TEXT, **options: object) -> LoadedConfig:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return load_config(path, words, **options)  # type: ignore[arg-type]

    return loaded


def test_epochs_are_rounded_to_steps(load: Load) -> None:
    config = load().config
    # 3000 / 64 = 46.9, 500 / 64 = 7.8, 1000 / 64 = 15.6, 2000 / 64 = 31.3.
    assert config.training.steps == 47
    assert config.schedule.warmup_steps == 8
    assert (config.checkpoint.every, config.checkpoint.keep_every) == (16, 32)
    # In binary arithmetic 1.1 × 50000 is a little above 55000.
    words = "training.epochs=1.1", "training.batch_size=100", "data.num_images=50000"
    assert load(*words).config.training.steps == 550


def test_resolved_config_has_no_shorthand(load: Load, tmp_path: Path) -> None:
    text = dump_config(load().config)
    tree = yaml.safe_load(text)
    assert tree["training"]["steps"] == 47
    assert tree["model"]["hidden_size"] == 512
    assert "preset" not in tree["model"]
    assert "num_images" not in tree["data"]
    assert load(text=text).config == load(text=TEXT).config


@pytest.mark.parametrize(
    ("name", "size"),
    [
        # "An Image is Worth 16x16 Words", table 1; "Training data-efficient image transformers",
        # table 1.
        ("vit_s", (12, 384, 6)),
        ("vit_b", (12, 768, 12)),
        ("vit_l", (24, 1024, 16)),
        ("vit_h", (32, 1280, 16)),
        ("igpt_s", (24, 512, 8)),
        ("igpt_m", (36, 1024, 8)),
        ("igpt_l", (48, 1536, 16)),
        ("igpt_xl", (60, 3072, 24)),
    ],
)
def test_model_presets_match_the_papers(load: Load, name: str, size: tuple[int, ...]) -> None:
    model = load(f"model.preset={name}").config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == size
    assert model.add_bias == name.startswith("vit")
    assert model.normalization == ("layer_norm" if name.startswith("vit") else "rms_norm")


def test_preset_names_match_presets() -> None:
    assert set(PRESETS) == set(PresetName.__args__)  # type: ignore[attr-defined]


def test_explicit_keys_override_the_preset(load: Load) -> None:
    text = TEXT.replace("preset: igpt_s", "num_layers: 3, preset: vit_s")
    model = load(text=text).config.model
    assert (model.num_layers, model.hidden_size) == (3, 384)
    assert load("model.num_layers=2").config.model.num_layers == 2


def test_later_setting_overrides_shorthand(load: Load, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(TEXT)
    above = "based_on: base.yaml\n{}\n"
    sized = load(text=above.format("model: {preset: vit_b}\ntraining: {steps: 50}")).config
    assert (sized.model.hidden_size, sized.training.steps) == (768, 50)
    assert load("training.steps=70").config.training.steps == 70
    assert load("training.steps=70", "training.epochs=1").config.training.steps == 16


def test_epoch_length_comes_from_the_shards(load: Load) -> None:
    text = TEXT.replace(", num_images: 1000", "")
    assert load(text=text, count_images={"shards": 128}.get).config.training.steps == 6
    assert load(text=TEXT, count_images={"shards": 128}.get).config.training.steps == 6
    with pytest.raises(UserError, match=r"c.yaml:\d: training.epochs: .*shards holds no shards"):
        load(text=text, count_images={}.get)
    assert load(count_images={}.get).config.training.steps == 47


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.preset=vit_x", r"model.preset: .*'vit_x'; did you mean 'vit_"),
        ("model.preset=[1]", r"model.preset: .*not \[1\]"),
        ("training.epochs=ten", r"training.epochs: .*not 'ten'"),
        ("training.epochs=0", r"training.epochs: .*greater than 0, not 0"),
        ("data=3", r"training.epochs: .*is unknown, since data.train is missing"),
        ("data.train=null", r"training.epochs: .*is unknown, since data.train is missing"),
        ("training.epoch=3", r"training.epoch: unknown key; did you mean 'epochs'"),
        (
            "data.train=[{path: a, weight: 1}]",
            r"training.epochs: .*several folders are mixed: set data.num_images",
        ),
    ],
)
def test_invalid_shorthand_raises(load: Load, word: str, message: str) -> None:
    text = TEXT.replace(", num_images: 1000", "")
    with pytest.raises(UserError, match=message):
        load(word, text=text, count_images={"shards": 1000}.get)


def test_steps_and_epochs_in_one_file_raise(load: Load) -> None:
    text = TEXT.replace("epochs: 3,", "epochs: 3, steps: 9,")
    with pytest.raises(UserError, match=r"c.yaml:7: training.epochs: .*training.steps.*keep one"):
        load(text=text)
