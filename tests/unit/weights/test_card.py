"""The model card of a run whose folders are far away."""

from types import SimpleNamespace

from tiny import VIT, tiny

from megavis.config.load import load_config
from megavis.data.format.manifest import Manifest
from megavis.weights.card import model_card


def card_of(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    config = load_config(tmp_path / "config.yaml").config
    run = SimpleNamespace(config=config, folder=tmp_path / "run", step=5, checkpoint=None)
    return model_card(run, {}, library="megavis", task="none", use="", limits=())


def test_every_folder_of_mixed_data_is_listed(shards, tmp_path):
    sources = [{"path": str(shards / part), "weight": 1} for part in ("train", "validation")]
    card = card_of(tmp_path, tiny("{name: igpt}", data={"train": sources, "image_size": 4}))
    for part in ("train", "validation"):
        manifest = Manifest.read(shards / part)
        assert f"| shards | `{part}` |\n| source | {manifest.source.description} |" in card
        assert f"{{path: {part}, weight: 1.0," in card


def test_a_card_names_no_place_of_the_machine(tmp_path):
    sources = [{"path": f"/home/me/{part}", "weight": 1} for part in ("one", "two")]
    card = card_of(
        tmp_path,
        tiny(
            "{name: gvp, patch_size: 4, num_groups: 3}",
            model=VIT,
            data={"train": sources, "validation": "/home/me/held_out", "cache": "/home/me/cache"},
            finetune={"num_classes": 3, "from_run": "/home/me/runs/first", "test": "/home/me/test"},
            training={"validate_every": 1},
        ),
    )
    assert "/home/me" not in card
    for name in ("one", "two", "held_out", "cache", "first", "test"):
        assert name in card.partition("## Config")[2]
