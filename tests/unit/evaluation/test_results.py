"""Results of evaluations: files keep their bytes, and another form is refused by file and key.

`tests/data/results` was written before each result was a class, by the commands of that time.
"""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from megavis.checkpoint.format.folder import early_stopped_step, finetuned_step
from megavis.commands.options.shared import _OPTIONS
from megavis.config.errors import UserError
from megavis.data.format.files import from_json, to_json
from megavis.evaluation import results
from megavis.evaluation.figures import write_table
from megavis.evaluation.images import results as of_images
from megavis.evaluation.result_files import Row
from megavis.evaluation.results import FORMS, WatchedCheckpoint
from megavis.model.autoencoder_losses import BACKBONES

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "results"
OTHERS = {
    "early_stopping.json": results.EarlyStoppingResult,
    "ensemble.json": results.EnsembleResult,
    "moments.json": of_images.MomentsResult,
    "reconstruction_and_distance.json": of_images.ReconstructionResult,
    "sweep.json": results.SweepScore,
}
ALL = {**FORMS, **OTHERS}
FILES = sorted(DATA.iterdir())
OBJECTS = [path for path in FILES if path.read_text().startswith("{") and path.suffix == ".json"]


def ids(path):
    return path.name


def rewritten(path, folder):
    """Read a file, write what was read, and return the new file."""
    form, new = ALL[path.name], folder / path.name
    found = form.read(path)
    if not issubclass(form, Row):
        found.write(new)
    elif path.suffix == ".json":
        form.write(new, found)
    elif path.suffix == ".csv":
        write_table(new, [row.record() for row in found])
    else:
        for line in found:
            line.append(new)
    return new


def refusal(path):
    """Return what is said of a file; it is one sentence that names the file."""
    with pytest.raises(UserError) as refused:
        ALL[path.name].read(path)
    text = str(refused.value)
    assert text.startswith(f"{path} is not a result of `")
    assert "\n" not in text
    return text.removeprefix(f"{path} is not a result of ")


def test_every_form_has_a_file():
    assert {path.name for path in FILES} == ALL.keys() - {"finetune_selection.json"}


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_bytes_are_kept(path, tmp_path):
    assert rewritten(path, tmp_path).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("path", OBJECTS, ids=ids)
def test_every_key_is_needed_and_no_other_known(path, tmp_path):
    content, new = from_json(path.read_text()), tmp_path / path.name
    optional = ("temperature", "beams", "fans", "reconstructions", "sfid", "precision", "recall")
    optional += ("inception_score", "inception_score_std", "training_difference")
    optional += ("lpips_alexnet", "distance", "fid", "identical")
    for key in content.keys() - set(optional):
        new.write_text(to_json({k: v for k, v in content.items() if k != key}))
        assert f"`{key}` is missing" in refusal(new)
    for key in ("beauty", "options", "accuracy"):
        new.write_text(to_json({**content, key: {}}))
        assert f"`{key}` is unknown" in refusal(new) or key in content
    for key in content:
        wrong = 3 if isinstance(content[key], str | None) else "three"
        new.write_text(to_json({**content, key: wrong}))
        assert f"`{key}` should be" in refusal(new)


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("probe.json", '"step": 40', '"step": "40"', "`step` should be a valid integer, not '40'"),
        ("probe.json", '"penalty": 0.1,', "", "`trained.0.penalty` is missing"),
        ("probe.json", '"layer": 1', '"layer": true', "`best_layer.layer` should be a valid int"),
        ("samples.json", '"num_manifold": 64', '"n": 64', "`samples.num_manifold` is missing"),
        ("samples.json", '"fid": 12.3456', '"fid": true', "`fid` should be a valid number"),
        ("finetune_test.json", '"part": "test"', '"part": "all"', "`part` should be 'selection'"),
        ("finetune_test.json", '"top1": 0.9', '"top1": "0.9"', "top1` should be a valid number"),
        ("panoptic.json", '"beams": 2', '"beams": 2.5', "beams` should be a valid integer"),
        ("likelihood.json", '"run"', '"run', "it is not JSON ("),
        ("label_map_baselines.json", '"SQ": 75.0,', "", "row 1: `Quality.SQ` is missing"),
        ("watch.jsonl", '"seconds"', '"secs"', "row 1: `seconds` is missing"),
        ("groups.csv", "psnr_of_images", "psnr_all", "row 1: `psnr_of_images` is missing"),
        ("groups.csv", "17.412345", "high", "psnr` should be a valid number, unable to parse"),
        ("positions.csv", "of_masked", "of_others", "row 1: `of_masked` is missing"),
        ("transfer.csv", "a,trained,2", "a,trained,", "row 1: `step` should be a valid integer"),
    ],
)
def test_drift_is_named(name, old, new, words, tmp_path):
    text = (DATA / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new, 1))
    assert words in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("probe.json", None, "`megavis probe`: No such file or directory"),
        ("probe.json", "[]", "`megavis probe`: it should hold JSON objects, not '[]'"),
        ("probe.json", '{"a', "`megavis probe`: it is not JSON"),
        ("likelihood.json", "\xff", "`megavis likelihood`: it is not JSON"),
        ("likelihood.json", '{"not_finite": 3}', "likelihood`: `not_finite` names no number"),
        ("samples.json", '{"a": null, "not_finite": {"b": "nan"}}', "`not_finite` names no"),
        ("positions.csv", "mask_ratio,accuracy\n", "`megavis figure positions`: it has no rows"),
        ("panoptic.json", '{"options": {}}', "`megavis evaluate panoptic`: `step` is missing"),
        ("groups.csv", "groups,psnr,psnr_of_images\n1,2,3,4\n", "row 1: "),
        ("groups.csv", "groups,psnr,psnr_of_images\n1,2\n", "`psnr_of_images` should be a valid"),
        ("groups.csv", 'groups,psnr\n1,"2', "`megavis figure groups`: unexpected end of data"),
        ("label_map_baselines.json", "3", "label_map_baselines`: it should hold a JSON list"),
    ],
)
def test_other_files_are_refused(name, text, words, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="latin-1")
    assert words in refusal(tmp_path / name)


def test_unfinished_line_of_a_watch_is_replaced(tmp_path):
    path = tmp_path / "watch.jsonl"
    first, second, *_ = WatchedCheckpoint.read(DATA / "watch.jsonl")
    first.append(path)
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    assert WatchedCheckpoint.read(path) == [first]
    second.append(path)
    assert WatchedCheckpoint.read(path) == [first, second]
    path.write_text(whole[:40] + "\n" + whole)
    assert "it is not JSON" in refusal(path)


def test_measures_are_the_numbers_of_a_watch():
    first, *_, last = WatchedCheckpoint.read(DATA / "watch.jsonl")
    measures = ["validation_loss", "probe_accuracy", "probe_layer"]
    measures += ["neighbors_accuracy", "neighbors_layer", "seconds"]
    assert [*first.numbers] == measures
    assert [*last.numbers] == ["frechet_distance", "seconds"]


def test_names_agree_with_options_and_networks():
    kinds = {float: "float | None", int: "int | None", str: "str | None"}
    options = {each.name: each.type for each in fields(of_images.SamplingOptions)}
    assert options == {name: kinds[kind] for name, (kind, _) in _OPTIONS.items()}
    networks = [network.name.lower().replace("-", "") for network in BACKBONES]
    distances = {f"{kind}_{name}" for kind in ("perceptual", "lpips") for name in networks}
    for form in (of_images.FillingScores, of_images.ReconstructionResult):
        names = {each.name for each in fields(form)}
        assert distances == {name for name in names if name.startswith(("perceptual", "lpips"))}


def test_import_is_light():
    code = "import sys, megavis.evaluation.results; print({'torch', 'numpy'} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert process.stdout == "set()\n", process.stderr


@pytest.mark.parametrize(
    ("read", "name"),
    [(finetuned_step, "finetune_test.json"), (early_stopped_step, "early_stopping.json")],
)
def test_step_that_a_result_names_is_checked(read, name, tmp_path):
    path = tmp_path / "evaluation" / name
    assert read(tmp_path) is None
    path.parent.mkdir()
    path.write_bytes((DATA / name).read_bytes())
    assert read(tmp_path) == ALL[name].read(path).step
    for text in ('{"step": "4"}', "{}", "[]", '{"st'):
        path.write_text(text)
        with pytest.raises(UserError, match=str(path)):
            read(tmp_path)
