"""`megavis.load` and the sample and probe commands, against values that training logged."""

import json
import math
import os

import numpy as np
import pytest
import torch
from PIL import Image

import megavis
from megavis.cli import main
from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset
from megavis.evaluation.probe import ProbeData
from megavis.parallel.context import num_contexts
from megavis.parallel.launch import read_launch


@pytest.fixture(scope="module")
def trained(tmp_path_factory, train_small):
    """Train a run of three steps and return its folder."""
    words = ["objective.order=random", "model.num_layers=2", "training.steps=3"]
    words += ["training.validate_every=3", "training.validation_images=32", "checkpoint.every=2"]
    return train_small(tmp_path_factory.mktemp("run"), *words)


@pytest.fixture
def run(trained):
    """Load the run; close the job that `load` opened afterwards."""
    from megavis.parallel.context import close_context

    yield megavis.load(trained, device="cpu")
    close_context()


@pytest.fixture
def validation(shard_folders):
    """Return the ids `[32, 16]` of the validation images."""
    tokens = ShardDataset(shard_folders / "validation").read(np.arange(32))[0]
    return torch.from_numpy(tokens.astype(np.int64))


def logged_losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["validation_loss"] for r in records if "validation_loss" in r}


def test_losses_match_the_training_log(run, trained, validation):
    logged = logged_losses(trained)
    assert run.step == 3
    assert run.loss(validation) == pytest.approx(logged[3], rel=1e-5)
    assert run.untrained().loss(validation) == pytest.approx(logged[0], rel=1e-5)
    # The output matrix starts at zero.
    assert logged[0] == pytest.approx(math.log(32), rel=1e-5)


def test_masks_depend_on_sample_index(run, train_small, tmp_path, validation):
    bert = megavis.load(train_small(tmp_path, "objective.mode=bert"), device="cpu")
    numbers = torch.arange(32)
    assert bert.loss(validation) == bert.loss(validation, sample_index=numbers)
    assert bert.loss(validation) != bert.loss(validation, sample_index=numbers + 32)


def order_of(run):
    return run.objective.schedule.orders.shared(run.context.device)[0]


def test_outputs_reproduce_the_loss(run, validation):
    logits = run.outputs(validation)
    order = order_of(run)
    nats = []
    for image, rows in zip(validation.tolist(), logits.tolist(), strict=True):
        for place, row in enumerate(rows):
            total = math.log(sum(math.exp(x) for x in row))
            nats.append(total - row[image[order[place]]])
    assert sum(nats) / len(nats) == pytest.approx(run.loss(validation), rel=1e-5)


def test_features_by_layer(run, validation):
    features = run.features(validation)
    assert features.shape == (3, 32, 16)
    assert torch.equal(run.features(validation, layer=1), features[1])
    assert torch.equal(run.features(validation, layer=-1), features[2])
    with pytest.raises(UserError, match="not one of 0 to 2"):
        run.features(validation, layer=3)


def test_images_and_to_ids_round_trip(run, validation):
    pixels = run.images(validation)
    assert pixels.shape == (32, 4, 4, 3)
    assert pixels.dtype == np.uint8
    assert torch.equal(run.to_ids(pixels), validation)
    assert run.loss(pixels) == run.loss(validation)
    for wrong in (pixels[:, :3], validation[:, :15], validation.float()):
        with pytest.raises(UserError, match="takes ids"):
            run.to_ids(wrong)


def test_read_only_arrays_are_inputs(run, validation, recwarn):
    """As `np.load(..., mmap_mode="r")` and JAX give them."""
    array = np.array(validation)
    array.flags.writeable = False
    assert torch.equal(run.to_ids(array), run.to_ids(array.copy()))
    assert not [each for each in recwarn if "not writable" in str(each.message)]


def test_samples_keep_the_given_pixels(run, validation):
    options = {"originals": validation, "given": 0.5, "seed": 1}
    completed = run.sample(tokens=True, **options)
    assert completed.shape == validation.shape
    same = (completed == validation)[:, order_of(run)]
    assert same[:, :8].all()
    assert not same[:, 8:].all()
    assert torch.equal(run.sample(tokens=True, **options), completed)
    images = run.sample(**options)
    assert images.dtype == torch.uint8
    assert np.array_equal(images.numpy(), run.images(completed))
    assert run.sample(5, temperature=0.0).unique(dim=0).shape == (1, 4, 4, 3)
    with pytest.raises(UserError, match="given share"):
        run.sample(originals=validation, given=1.5)


def test_load_older_step_and_other_dtype(run, trained, validation):
    older = megavis.load(trained, step=2)
    assert older.step == 2
    # The second run shares the first one's job.
    assert older.context.world.group is run.context.world.group
    assert older.loss(validation) != run.loss(validation)
    half = megavis.load(trained, dtype=torch.bfloat16)
    assert half.loss(validation) == pytest.approx(run.loss(validation), rel=1e-2)
    with pytest.raises(UserError, match="no checkpoint of step 7; steps here: 2, 3"):
        megavis.load(trained, step=7)


def test_commands_run_beside_an_open_run(run, trained, validation, train_small, tmp_path, capsys):
    """In a notebook, `main` runs in the process in which `megavis.load` has opened a job."""
    before = run.loss(validation)
    environment = {name: os.environ[name] for name in read_launch({}).environment()}
    again = train_small(tmp_path, "objective.order=random", "training.steps=2")
    assert main(["sample", str(trained), "--num-images", "2"]) == 0
    assert main(["params", str(again / "config.yaml")]) == 0
    assert num_contexts() == 1
    assert {name: os.environ[name] for name in environment} == environment
    assert run.loss(validation) == before
    with pytest.raises(UserError, match="runs/nowhere"):
        megavis.load("runs/nowhere", device="cpu")
    capsys.readouterr()
    for words in (["plan", str(again / "config.yaml")], ["train", str(again / "config.yaml")]):
        assert main([*words, *(["--gpus", "2"] if words[0] == "plan" else ["--dry-run"])]) == 2
        assert "in another process, in a notebook with ! before it" in capsys.readouterr().err
    assert run.loss(validation) == before


def test_folder_without_a_run_raises(tmp_path, trained):
    with pytest.raises(UserError, match="not a run folder"):
        megavis.load(tmp_path)
    (tmp_path / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    with pytest.raises(UserError, match="no checkpoint yet"):
        megavis.load(tmp_path)


def test_sample_command_writes_image_grids(trained, capsys, tmp_path):
    assert main(["sample", str(trained), "--num-images", "3", "--seed", "1"]) == 0
    path = trained / "samples" / "samples-00000003.png"
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    assert Image.open(path).size == (3 * 130 + 2, 132)

    out = tmp_path / "completed.png"
    words = ["--prefix", "half", "--num-images", "4", "--completions", "2", "--out", str(out)]
    assert main(["sample", str(trained), *words, "--top-k", "5"]) == 0
    assert Image.open(out).size == (4 * 130 + 2, 4 * 130 + 2)


def test_round_robin_by_class(shard_folders):
    from megavis.data.loading.loader import round_robin_by_class

    dataset = ShardDataset(shard_folders / "validation")
    indices = round_robin_by_class(dataset, 7)
    assert dataset.labels[indices].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert len(set(indices.tolist())) == 7


def test_probe_command_writes_results(trained, capsys):
    assert main(["probe", str(trained), "--layers", "0,2", "--train-images", "60"]) == 0
    printed = capsys.readouterr().out
    result = json.loads((trained / "evaluation" / "probe.json").read_text())
    assert [score["layer"] for score in result["trained"]] == [0, 2]
    assert result["num_fitted"] + result["num_held_out"] == 60
    assert f"raw pixels {result['pixels']['accuracy']:.1%}" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "RUN", "--top-p", "2"], "top-p must lie in"),
        (["sample", "RUN", "--num-images", "0"], "at least 1"),
        (["sample", "RUN", "--prefix", "half", "--completions", "0"], "at least 1"),
        (["sample", "RUN", "--out", "x.jpg"], "--out x.jpg: the name of the file must end in .png"),
        (["sample", "RUN", "--npz", "x.np"], "--npz x.np: the name of the file must end in .npz"),
        (["sample", "RUN", "--tensor-parallel", "2"], "2 does not divide the job's 1 process"),
        (
            ["sample", "RUN", "--probability", "0.4", "--rounds", "1"],
            "--probability, --rounds do not apply to this run of igpt, which takes --temperature,",
        ),
        (["sample", "RUN", "--classes", "1"], "--classes does not apply to this run"),
        (["sample", "RUN", "--sampling-steps", "3"], "--sampling-steps does not apply to this run"),
        (["sample", "RUN", "--completions", "2"], "--completions does not apply without --prefix"),
        (["probe", "RUN", "--masks", "3"], "--masks does not apply to igpt, whose inputs are not"),
        (["sample", "RUN", "--prefix", "half", "--images", "nowhere"], "nowhere"),
        (["probe", "RUN", "--layers", "9"], "from 0 to 2"),
        (["probe", "RUN", "--validation", "nowhere"], "nowhere"),
        (["probe", "nowhere"], "nowhere does not exist; give a run folder"),
    ],
)
def test_invalid_commands_are_refused(trained, capsys, words, message):
    assert main([str(trained) if word == "RUN" else word for word in words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["probe", "RUN", "--concatenate", "20"], "the network has features of 3 layers"),
        (["probe", "RUN", "--images-per-class", "2,999"], "--images-per-class 999: class 0 has"),
        (
            ["transfer", "RUN", "--data-sets", "a:SETS", "--images-per-class", "999"],
            "--images-per-class 999: class 0 has",
        ),
    ],
)
def test_too_much_is_refused_before_features_are_computed(
    trained, shard_folders, tmp_path, monkeypatch, capsys, words, message
):
    for part, source in (("train", "train"), ("test", "validation")):
        (tmp_path / part).symlink_to(shard_folders / source)
    monkeypatch.delattr(ProbeData, "features")
    chosen = [word.replace("SETS", str(tmp_path)).replace("RUN", str(trained)) for word in words]
    assert main([*chosen, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_prefix_is_a_name_or_a_share(capsys):
    from megavis.commands.options.images import prefix_share

    assert [prefix_share(text) for text in ("none", "half", "0.25")] == [0.0, 0.5, 0.25]
    assert main(["sample", "runs/x", "--prefix", "most"]) == 2
    assert "'most' is not none, half" in capsys.readouterr().err
