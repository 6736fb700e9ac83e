"""Import and export of ImageGPT weights against `transformers`."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import megavis
from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import read_manifest, write_manifest
from megavis.cli import main
from megavis.parallel.context import close_context

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def make_folder(folder, *, biased, heads=3, width=24, layers=2, pixels=16, colors=20):
    """Save an ImageGPT with random weights, and random biases if `biased`."""
    torch.manual_seed(0)
    settings = transformers.ImageGPTConfig(
        vocab_size=colors + 1, n_positions=pixels, n_embd=width, n_layer=layers, n_head=heads
    )
    model = transformers.ImageGPTForCausalImageModeling(settings).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("bias") or biased:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder, safe_serialization=True)
    return model


def their_logits(model, ids):
    start = torch.full((len(ids), 1), model.config.vocab_size - 1)
    with torch.no_grad():
        return model(input_ids=torch.cat([start, ids[:, :-1]], dim=1)).logits


@pytest.fixture
def leave_job():
    yield
    close_context()


@pytest.mark.usefixtures("leave_job")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(3, 24), (1, 7), (4, 64)])
def test_imported_logits_match_transformers(tmp_path, biased, heads, width):
    model = make_folder(tmp_path / "released", biased=biased, heads=heads, width=width)
    assert main(["import", "imagegpt", str(tmp_path / "released"), str(tmp_path / "run")]) == 0
    run = megavis.load(tmp_path / "run", device="cpu")
    assert run.config.model.add_bias == biased
    ids = torch.randint(20, (3, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(run.outputs(ids), their_logits(model, ids), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("leave_job")
@pytest.mark.parametrize("biased", [False, True])
def test_exported_folder_opens_in_transformers(tmp_path, biased):
    model = make_folder(tmp_path / "released", biased=biased)
    assert main(["import", "imagegpt", str(tmp_path / "released"), str(tmp_path / "run")]) == 0
    assert (
        main(["export", str(tmp_path / "run"), "--to", "huggingface", str(tmp_path / "out")]) == 0
    )
    again = transformers.ImageGPTForCausalImageModeling.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(20, (3, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(their_logits(again, ids), their_logits(model, ids))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.usefixtures("leave_job")
def test_import_copies_the_palette(tmp_path):
    make_folder(tmp_path / "released", biased=False)
    centers = np.random.default_rng(0).uniform(-1, 1, (20, 3)).astype(np.float32)
    np.save(tmp_path / "kmeans_centers.npy", centers)
    words = ["--palette", str(tmp_path / "kmeans_centers.npy")]
    folders = [str(tmp_path / "released"), str(tmp_path / "run")]
    assert main(["import", "imagegpt", *folders, *words]) == 0
    run = megavis.load(tmp_path / "run", device="cpu")
    assert np.array_equal(run.palette.centers, centers)
    assert run.sample(2, temperature=1.0).shape == (2, 4, 4, 3)
    assert run.sample(2, tokens=True).shape == (2, 16)


@pytest.mark.usefixtures("leave_job")
def test_palette_round_trip(tmp_path):
    make_folder(tmp_path / "released", biased=False)
    # Integer levels in 0..255 avoid ties between nearest colours.
    levels = np.random.default_rng(0).choice(64, (20, 3)) * 4
    centers = (levels / 127.5 - 1).astype(np.float32)
    np.save(tmp_path / "released" / "kmeans_centers.npy", centers)
    run, out = str(tmp_path / "run"), tmp_path / "out"
    assert main(["import", "imagegpt", str(tmp_path / "released"), run]) == 0
    assert main(["export", run, "--to", "huggingface", str(out)]) == 0

    assert np.array_equal(np.load(out / "kmeans_centers.npy"), centers)
    processor = transformers.AutoImageProcessor.from_pretrained(out)
    images = np.random.default_rng(1).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    # Sides of 4 pixels would be ambiguous with channels.
    options = {"return_tensors": "pt", "input_data_format": "channels_last"}
    theirs = processor(list(images), **options).input_ids
    assert torch.equal(theirs, megavis.load(run, device="cpu").to_ids(images))

    (out / "kmeans_centers.npy").unlink()
    assert main(["import", "imagegpt", str(out), str(tmp_path / "again")]) == 0
    assert np.array_equal(np.load(tmp_path / "again" / "palette.npy"), centers)


def spoil(folder, what):
    """Damage a folder in one way."""
    settings = json.loads((folder / "config.json").read_text())
    weights = folder / "model.safetensors"
    if what == "torn weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "torn config":
        (folder / "config.json").write_text("{")
    elif what == "a tensor missing":
        tensors = load_file(weights)
        del tensors["transformer.h.1.mlp.c_fc.weight"]
        save_file(tensors, weights)
    elif what == "wrong colours":
        (folder / "preprocessor_config.json").write_text('{"clusters": [[0, 300, 0]]}')
    elif what == "too many colours":
        np.save(folder / "kmeans_centers.npy", np.zeros((21, 3), np.float32))
    else:
        settings.update(what)
        (folder / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("torn weights", "not a whole safetensors file"),
        ("torn config", "config.json: not a JSON file"),
        ("a tensor missing", "no transformer.h.1.mlp.c_fc.weight"),
        ("wrong colours", "preprocessor_config.json: clusters"),
        ("too many colours", "21 colours, more than the 20"),
        ({"vocab_size": 513}, r"wte.weight has shape \[21, 24\]; config.json implies \[513"),
        (
            {"n_layer": 1},
            "h.1.* does not belong to ImageGPT.*; config.json implies no such",
        ),
        ({"n_head": 5}, "is not divisible"),
        ({"n_embd": None}, "n_embd is None"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, capsys, what, message):
    folder = tmp_path / "released"
    make_folder(folder, biased=False)
    spoil(folder, what)
    assert main(["import", "imagegpt", str(folder), str(tmp_path / "run")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_missing_config_is_an_error(tmp_path, capsys):
    (tmp_path / "released").mkdir()
    words = ["import", "imagegpt", str(tmp_path / "released"), str(tmp_path / "run")]
    assert main(words) == 2
    assert "config.json: missing" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_the_origin_of_the_weights_that_it_trains_further(train_small, tmp_path):
    folder = train_small(tmp_path, "training.steps=1")
    checkpoint = latest_checkpoint(folder)
    imported = read_manifest(checkpoint).model_copy(update={"origin": "a released file"})
    write_manifest(checkpoint, imported)
    train_small(tmp_path, "training.steps=2")
    newest = read_manifest(latest_checkpoint(folder))
    assert (newest.step, newest.origin) == (2, "a released file")
    out = tmp_path / "out"
    assert main(["export", str(folder), "--to", "huggingface", str(out)]) == 0
    expected = "Its training began with released weights, which came from a released file."
    assert expected in (out / "README.md").read_text()
