"""docs/papers: pages are up to date, and the runs and options they name exist."""

import importlib
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megavis.cli import read_arguments

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
SAMPLING = ("sampling_steps", "sampling_temperature")


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/scripts"))
        yield importlib.import_module("paper_tables")


@pytest.fixture(scope="module")
def headers(tables):
    return importlib.import_module("paper_claims")


@pytest.fixture(scope="module")
def claims(headers):
    return headers.read_claims()


@pytest.fixture(scope="module")
def pages(tables, claims):
    return {paper: tables.Page(paper, claims) for paper in tables.PAPERS}


@pytest.fixture(scope="module")
def runs(headers, claims):
    """Return configs by run folder: presets, runs of docs/papers, and header lines with keys."""
    found = {folder: run.config for folder, run in headers.known_runs().items()}
    for claim in claims:
        if claim.words:
            config = claim.config
            assert found.setdefault(str(config.folder), config) == config, (
                f"{claim}: give it a name"
            )
    return found


def test_pages_are_up_to_date(tables):
    texts = tables.write_out()
    assert set(texts) == {path.name for path in tables.PAGES.glob("*.md")}
    for name, text in texts.items():
        written = (tables.PAGES / name).read_text(encoding="utf-8")
        assert text == written, "run python docs/scripts/paper_tables.py"


def test_runs_to_start_from_have_the_same_model(headers, claims, runs):
    for claim in claims:
        for folder in () if claim.command else headers.runs_before(claim.config):
            assert folder in runs, f"{claim.path}: {folder}"
        before = not claim.command and claim.config.finetune and claim.config.finetune.from_run
        if before:
            source, own = (c.objective.model_dump() for c in (runs[before], claim.config))
            differing = {key for key in own if source[key] != own[key]} - set(SAMPLING)
            assert not differing, claim
            shape = ("num_layers", "hidden_size", "num_attention_heads")
            models = [
                [getattr(c.model, key) for key in shape] for c in (runs[before], claim.config)
            ]
            assert models[0] == models[1], claim


def test_commands_have_valid_options_and_runs(claims, runs):
    commands = [claim for claim in claims if claim.command]
    assert len(commands) > 40
    for claim in commands:
        name, *words = shlex.split(claim.command)
        assert name == "megavis", claim
        assert read_arguments(words).run
        assert set(re.findall(r"runs/[\w.-]+", claim.command)) <= set(runs), claim


def test_runs_have_names_and_commands_of_their_own(headers, pages):
    runs = [run for page in pages.values() for run in page.runs]
    presets = list(headers.CONFIGS.glob("*/*.yaml"))
    assert len(headers.known_runs()) == len(runs) + len(presets)
    for run in runs:
        assert read_arguments(shlex.split(run.command)[1:]).run


def test_unrun_rows_have_a_command_or_reason(pages):
    """A row without a result names the command that produces it, or why there is none."""
    for page in pages.values():
        lines = [line for lines in page.lines.values() for line in lines]
        bare = [line for line in lines if line.state == "not run" and not line.how]
        assert not bare, bare


def section_of(path, anchor):
    """Return the text below a heading of a document up to the next heading of its rank."""
    text = path.read_text(encoding="utf-8")
    if not anchor:
        return text
    for found in re.finditer(r"^(#+) (.*)$", text, re.MULTILINE):
        if re.sub(r"[^\w\- ]", "", found[2].lower()).replace(" ", "-") == anchor:
            rest = text[found.end() :]
            return re.split(rf"^#{{1,{len(found[1])}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]
    raise AssertionError(f"{path} has no {anchor}")


def test_numbers_of_small_runs_stand_where_the_row_points(pages):
    small = [
        (paper, name, line.state)
        for paper, page in pages.items()
        for name, lines in page.lines.items()
        for line in lines
        if line.state.startswith("run small")
    ]
    assert len(small) > 15
    for paper, name, state in small:
        (link,) = re.findall(r"\]\(\.\./([\w.-]+)(?:#([\w-]+))?\)", state)
        there = " ".join(section_of(ROOT / "docs" / link[0], link[1]).split())
        numbers = re.findall(r"\d+\.\d+(?: ± \d+\.\d+)?", state.partition("([")[0])
        missing = [number for number in numbers if number not in there]
        assert not missing, f"{paper}, {name}: {missing}"


def test_readme_names_every_table_that_is_not_possible(pages):
    """Limitations have all that remains: parts of a table or figure by number, others by name."""
    limits = section_of(ROOT / "README.md", "limitations")
    for page in pages.values():
        (row,) = re.findall(rf"^\| {page.published.short}\b.*$", limits, re.MULTILINE)
        named = set(re.findall(r"(?:Table|Figure) \d+[a-f]?", row))
        lost = {
            name
            for name, lines in page.lines.items()
            for line in lines
            if line.state.startswith("not possible")
        }
        unnamed = {name for name in lost - named if re.match(r"Table|Figure", name)}
        unnamed |= {name for name in lost - named if name.lower() not in row}
        assert not unnamed, f"{page.paper}: {sorted(unnamed)}"


@pytest.fixture
def changed(tables, claims):
    """Build GVP's page with one header line changed."""

    def build(**fields):
        claim = next(c for c in claims if c.path.stem == "vit_b_p2p_finetune" and c.row == 11)
        other = replace(claim, **fields)
        return tables.Page("gvp", [other if each is claim else each for each in claims])

    return build


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"numbers": "83.4"}, r"Table 1, row 11 FT is \['83.2'\]"),
        ({"row": 99}, "has no .*99"),
        ({"item": "Table 12"}, "has no .*Table 12"),
        ({"column": "FID"}, "no source covers Table 1, row 11"),
    ],
)
def test_headers_contradicting_the_paper_raise(changed, fields, text):
    with pytest.raises(ValueError, match=text):
        changed(**fields)


def test_preset_without_rows_raises(headers, claims):
    left = [claim for claim in claims if claim.path.stem != "vit_b_p2p_ade20k"]
    with pytest.raises(ValueError, match="vit_b_p2p_ade20k.yaml: list the rows"):
        list(headers.presets_without_a_row("gvp", left))


@pytest.fixture
def read_header(headers, tmp_path, monkeypatch):
    """Read the claims of a config with a line of a header, and a page that names a run of it."""
    for name in ("CONFIGS", "PAGES"):
        monkeypatch.setattr(headers, name, tmp_path)
    runs = {"by": "base training.steps=7 seed=3", "about": "Seven steps"}
    page = {"item": "Table 1", "runs": {"own_long": runs, "own_other": "other seed=3"}}
    (tmp_path / "own.yaml").write_text(json.dumps([page]))
    (tmp_path / "own").mkdir()

    def read(line):
        headers.row_runs.cache_clear()
        (tmp_path / "own/base.yaml").write_text(f"# Gives:\n#   {line}\n\nname: own_base\n")
        return headers.read_claims()

    yield read
    headers.row_runs.cache_clear()


def test_header_names_a_run_with_more_keys(headers, read_header):
    (claim,) = read_header("Table 1, row 2: 3.4 by own_long")
    assert claim.words == ("training.steps=7", "seed=3", "name=own_long")
    assert (claim.run,) == headers.row_runs("own")[:1]
    assert claim.run.about == "Seven steps"
    (claim,) = read_header("Table 1, row 2: 3.4 by own_long training.steps=9 name=own_longer")
    assert claim.words == ("training.steps=9", "seed=3", "name=own_longer")


@pytest.mark.parametrize("name", ["own_short", "own_other"])
def test_header_names_only_runs_of_its_own_config(read_header, name):
    with pytest.raises(ValueError, match=f"own.yaml has no run {name} of this config"):
        read_header(f"Table 1, row 2: 3.4 by {name}")
