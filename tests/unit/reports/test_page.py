"""Content of the report of one or several runs; test_page_in_browser.py tests its layout."""

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from megavis.cli import main
from megavis.evaluation.figures import markdown_table as markdown_lines
from megavis.reports import run_record
from megavis.reports.blocks import markdown_table
from megavis.reports.page import render
from megavis.reports.run_record import RunRecord

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[3]


class Words(HTMLParser):
    """Collect the text of a page, without style sheets."""

    def __init__(self):
        super().__init__()
        self.words, self.skipped = [], False

    def handle_starttag(self, tag, attributes):
        self.skipped = tag == "style"

    def handle_data(self, data):
        if not self.skipped:
            self.words += data.split()


def words_of(page):
    reader = Words()
    reader.feed(page)
    return " ".join(reader.words)


@pytest.fixture(scope="module")
def text(run_folder):
    return words_of(render([RunRecord.read(run_folder)]))


@pytest.mark.parametrize(
    "expected",
    [
        "Generative Pretraining from Pixels",
        "2 layers, 32 wide, 4 heads",
        "40 of 40",
        "16 images/s, 1024 tokens/s",
        "6.2383 → 2.0794",
        # 4 intervals of 80 images at 16 a second.
        "20 s",
        "2 steps skipped: gradients not finite",
        "1 checkpoint could not be written so far",
        "30 1 step with a spike of the loss",
        "20 rolled back here from step 25: steps 22 to 25 were bad, rollback 1 of the run; 12",
        "24 ended 2026-01-01 03:05 UTC with exit code 71: blocks.1.mlp.weight differs between rank",
        "spikes of the loss, 8 deviations above the median; copies of weights and losses that",
        "Held-out images mean of -log p nats per dimension 2.0895 bits per dimension 3.0145",
        "A dimension is a token, 256 per image. 64 images of demo/validation; step 40, float32.",
        "first likelihood, step 40 64 of demo/validation 2.0895 nats per dimension (a token)",
        "resumed 2026-01-01 00:00 UTC on 2 × cpu",
        # The probe and its data.
        "step 40, layer 1 75.7 %",
        "100 validation images of demo/validation, 3 classes; fitted on 200, seed 0.",
        "trained 55.0 ± 7.0",
        "top-1 90.4 %",
        "30 images of demo/validation, held out; step 20, seed 3.",
        "FID 12.35 precision 0.5",
        "64 images of a.npz; reference b.npz fedcba98 (N 50 000); network Inception 01234567,"
        " resize bilinear. Compare only with the same N.",
        "first FID 64 against b.npz 12.35",
        "set top-1, % cifar10 62.5 Linear probes",
        "first linear probe on cifar10, layer 1 80 of test_batch.bin 62.5 %",
        "Other files file bytes watch.log 7",
        # Unknown files are shown too.
        "New thing",
        "num images 12 345",
        "0.1235",
        "17.41",
        # Compared with the paper.
        "first linear probe, layer 1, step 40 100 of demo/validation 75.7 %",
        "4 labels per class, 2 draws 100 of demo/validation 45.0 ± 7.0 % error",
        "iGPT-XL 64² · 3 6801 15360 72.0",
        "megavis train small.yaml seed=3",
        "torch 2.11.0",
    ],
)
def test_page_contains(text, expected):
    assert expected in text


def test_samples_and_probe_come_before_the_curves(run_folder):
    """Completions take precedence over samples; nothing is shown twice."""
    folder = run_folder / "samples"
    shutil.copy(folder / "samples-00000040.png", folder / "completions-00000040.png")
    page = render([RunRecord.read(run_folder)])
    (folder / "completions-00000040.png").unlink()
    glance = page[page.index('<section id="glance">') : page.index('<section id="runs">')]
    named = ("completions-00000040.png", "classes, test images", "Accuracy by depth", "Best layer")
    assert [name for name in named if name in glance] == list(named)
    assert sorted(named, key=glance.index) == list(named)
    assert "17.41" in glance
    assert "samples-00000040.png" not in glance
    assert [page.count(f"<h4>{name}</h4>") for name in ("Accuracy by depth", "Best layer")] == [
        1,
        1,
    ]
    rest = page[page.index('<section id="runs">') :]
    assert "samples-00000040.png" in rest
    assert rest.index("<h4>Loss</h4>") < rest.index("samples-00000040.png")


def test_runs_share_one_loss_figure(page_of_two):
    page = page_of_two
    assert "<h1>2 runs</h1>" in page
    loss = page[page.index("<h4>Loss</h4>") :]
    loss = loss[: loss.index("</figure>")]
    for color in (0, 1):
        assert f"stroke: var(--series-{color})" in loss
    assert "&lt;b&gt;second&lt;/b&gt;" in loss
    assert "<b>" not in page


def test_runs_of_one_name_are_told_apart(run_folder, tmp_path):
    """They are called by their folders, in legends, columns and events."""
    folders = [run_folder, Path(shutil.copytree(run_folder, tmp_path / "again"))]
    page = render([RunRecord.read(folder) for folder in folders])
    loss = page[page.index("<h4>Loss</h4>") :]
    legend = re.search(r'<ul class="legend">(.*?)</ul>', loss)[1]
    assert re.findall(r"<li [^>]*>(.*?)</li>", legend) == list(map(str, folders))
    assert f"megavis train {tmp_path}/again/config.yaml name=first_again" in page


def test_page_is_self_contained(page_of_two):
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page_of_two)
    assert "url(" not in re.sub(r"url\(#\w+\)", "", page_of_two)
    assert "<script" not in page_of_two


def test_unknown_results_are_shown_as_tables(run_folder, tmp_path):
    folder = tmp_path / "odd"
    (folder / "evaluation").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 5, "loss": 1.5}\n')
    (folder / "evaluation" / "probe.json").write_text('{"best_layer": {"accuracy": 0.25}}')
    (folder / "evaluation" / "torn.json").write_text('{"a')
    (folder / "evaluation" / "torn.png").write_text("no picture")
    (folder / "evaluation" / "long.csv").write_text("x" * 200_000)
    (folder / "evaluation" / "notes.md").write_text(
        "A note.\n| a \\| b | c\n|---|---|\n| 11 |\n| 22 | 33 | 44 |\n"
    )
    text = words_of(render([RunRecord.read(folder)]))
    assert "Torn cannot be read" in text
    assert "long.csv: field larger than field limit" in text
    assert "Notes a | b c 11 22 33 A note." in text
    assert "probe.json is not a result of `megavis probe`: `best_layer.layer` is" in text
    assert "best layer value accuracy 0.25" in text
    assert "1.5000 → 1.5000" in text


def test_bars_in_cells_are_kept(tmp_path):
    (tmp_path / "a.md").write_text("\n".join(markdown_lines(("a|b", "c"), [("1", "2|3")])))
    table = markdown_table(tmp_path / "a.md")
    assert (table.columns, table.rows) == (["a|b", "c"], [["1", "2|3"]])


def test_report_command_does_not_import_torch(run_folder):
    code = (
        "import sys; from megavis.cli import main; code = main(sys.argv[1:]);"
        " sys.exit(code or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "report", str(run_folder)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    page = run_folder / "report.html"
    assert str(page) in process.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_unwritable_report_is_refused(run_folder, capsys):
    assert main(["report", str(run_folder), "--html", "/dev/null/report.html"]) == 2
    assert "--html: /dev/null/report.html would lie in /dev/null" in capsys.readouterr().err


def test_package_data_covers_all_data_files():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, names in settings["tool"]["setuptools"]["package-data"].items()
        for pattern in names
    ]
    files = [path for path in (ROOT / "megavis").rglob("*.*") if path.is_file()]
    names = [path.relative_to(ROOT).as_posix() for path in files]
    data = [name for name in names if not name.endswith((".py", ".pyc"))]
    assert data
    assert not [name for name in data if not any(fnmatch.fnmatch(name, p) for p in patterns)]


def test_probe_on_other_images_names_them(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    path = folder / "evaluation" / "probe.json"
    splits = {"train": "other/train", "validation": "other/test"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "splits": splits}))
    page = render([RunRecord.read(folder)])
    assert "100 validation images of other/test" in page
    assert "100 of other/test" in page
    assert "100 of demo/validation" not in page


def test_parameters_are_weights_of_the_checkpoint(run_folder, monkeypatch):
    """Its moments have the same shapes."""
    shapes = {"weight/a": (3, 4), "weight/b": (5,), "moment/a": (3, 4), "average/a": (3, 4)}
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    manifest = SimpleNamespace(tensors=tensors)
    monkeypatch.setattr(run_record, "latest_checkpoint", lambda folder: folder)
    monkeypatch.setattr(run_record, "read_manifest", lambda folder: manifest)
    assert RunRecord.read(run_folder).num_parameters == 12 + 5


def test_time_in_steps_leaves_out_the_rest(run_folder):
    """The logged steps saw 320 images, at 16 a second."""
    assert RunRecord.read(run_folder).seconds_in_steps == 320 / 16
