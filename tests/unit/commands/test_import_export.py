"""Released weights against the ImageGPT of `transformers`, both ways."""

import numpy as np
import pytest
import torch

import megavis
from megavis.cli import main
from megavis.parallel.context import close_context

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def make_folder(folder, *, biased, heads=3, width=24, layers=2, pixels=16, colors=20):
    """Save a random ImageGPT; its biases are zero unless asked for."""
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
def test_imported_logits_are_those_of_transformers(tmp_path, biased, heads, width):
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
    assert main(["export", str(tmp_path / "run"), "--to", "imagegpt", str(tmp_path / "out")]) == 0
    again = transformers.ImageGPTForCausalImageModeling.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(20, (3, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(their_logits(again, ids), their_logits(model, ids))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.usefixtures("leave_job")
def test_palette_of_the_folder_comes_along(tmp_path):
    make_folder(tmp_path / "released", biased=False)
    centers = np.random.default_rng(0).uniform(-1, 1, (20, 3)).astype(np.float32)
    np.save(tmp_path / "kmeans_centers.npy", centers)
    words = ["--palette", str(tmp_path / "kmeans_centers.npy")]
    folders = [str(tmp_path / "released"), str(tmp_path / "run")]
    assert main(["import", "imagegpt", *folders, *words]) == 0
    run = megavis.load(tmp_path / "run", device="cpu")
    assert np.array_equal(run.palette.centers, centers)
    assert run.sample(2, temperature=1.0).shape == (2, 16)


def test_what_is_no_imagegpt_folder_is_refused(tmp_path, capsys):
    (tmp_path / "released").mkdir()
    words = ["import", "imagegpt", str(tmp_path / "released"), str(tmp_path / "run")]
    assert main(words) == 2
    assert "config.json: missing" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
