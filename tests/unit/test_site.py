"""The site of `make docs`: strict build, offline use, links and completeness."""

import json
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from browser import find_browser, open_browser

from megavis.config.papers import PAPER_CONFIGS
from megavis.config.schema import RunConfig
from megavis.config.section import Section

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
# Attributes that a browser fetches automatically, by tag.
FETCHED = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
    "video": "src",
}


class Reader(HTMLParser):
    """Collect the links, anchors, fetched files and table cells of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors, self.fetched = [], set(), []
        self.cells, self.open = [], False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in FETCHED and found.get(FETCHED[tag]):
            self.fetched.append(found[FETCHED[tag]])
        if tag == "td":
            self.cells.append("")
        self.open = tag == "td" or (self.open and tag not in ("tr", "table"))

    def handle_endtag(self, tag):
        self.open = self.open and tag != "td"

    def handle_data(self, data):
        if self.open:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as `make docs` does and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Reader(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_document_has_a_page(site):
    written = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    places = [site / (path.parent / "index" if path.stem == "README" else path) for path in written]
    assert len(places) > 15
    assert not [path for path in places if not path.with_suffix(".html").exists()]


def test_pages_fetch_only_local_files(pages):
    missing = []
    for path, page in pages.items():
        assert page.fetched
        for url in page.fetched:
            local = not urlsplit(url).scheme and not url.startswith("//")
            if not local or not (path.parent / unquote(urlsplit(url).path)).exists():
                missing.append((path.name, url))
    assert not missing


def test_styles_fetch_nothing_remote(site):
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text())


def test_links_and_anchors_resolve(pages):
    lost = []
    for path, page in pages.items():
        for link in page.links:
            url, anchor = urldefrag(link)
            if urlsplit(url).scheme:
                continue
            target = (path.parent / unquote(url)).resolve() if url else path
            known = pages[target].anchors if target in pages else set()
            if not target.exists() or (anchor and unquote(anchor) not in known):
                lost.append((path.name, link))
    assert not lost


def keys_of(section):
    """Yield name and field of all keys of a section and its subsections."""
    for name, field in section.model_fields.items():
        yield name, field
        if isinstance(field.default, Section) and type(field.default) is field.annotation:
            yield from keys_of(type(field.default))


def rows_of(page):
    """Return type, default, meaning and source by key; a key may occur in several tables."""
    cells = iter(page.cells)
    rows = {}
    for key in cells:
        rows.setdefault(key, []).append([next(cells) for _ in range(4)])
    return rows


@pytest.mark.parametrize("name", ["index", *PAPER_CONFIGS])
def test_reference_lists_every_key_with_default_and_source(site, name):
    """Compare with pydantic's fields; the pages are generated from the JSON schema."""
    config = PAPER_CONFIGS.get(name, RunConfig)
    room = "index" if config is RunConfig else config.__module__.split(".")[2]
    rows = rows_of(Reader(site / "config" / f"{room}.html"))
    keys = list(keys_of(config))
    assert len(keys) > 5
    for key, field in keys:
        assert any(is_default(row[1], field) for row in rows[key]), (key, rows[key])
        # The schema replaces the objective's section by the papers'.
        meaning = re.sub("[`*]", "", " ".join((field.description or "").split()))
        matches = [row[2].startswith(meaning[:30]) for row in rows[key]]
        assert any(matches) or key == "objective", (key, rows[key])
    for key, found in rows.items():
        for *_, place in found:
            file, _, line = place.partition(":")
            text = (ROOT / "megavis" / file).read_text().splitlines()
            assert not line or text[int(line) - 1].strip().startswith(f"{key}:")


def is_default(shown, field):
    """Return whether the reference shows the field's default."""
    if field.is_required():
        return shown == "required"
    if field.default is None:
        return shown == "absent"
    if isinstance(field.default, Section):
        return shown == "defaults of its keys" or "kind" in json.loads(shown)
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    try:
        return json.loads(shown) == value
    except ValueError:
        return shown == value


def test_api_pages_cover_the_notebook_interface(pages, site):
    anchors = pages[site / "api" / "notebook.html"].anchors
    calls = ("features", "sample", "loss", "outputs", "untrained", "images", "to_ids")
    assert {f"megavis.notebook.Run.{call}" for call in calls} <= anchors
    assert "megavis.load" in pages[site / "api" / "index.html"].anchors


@pytest.mark.skipif(find_browser() is None, reason="no Chromium here (Debian: chromium)")
def test_search_works_from_disk(site, tmp_path):
    with open_browser(find_browser(), tmp_path / "profile") as browser:
        browser.open((site / "index.html").as_uri() + "?q=tensor_model_parallel_size")
        links = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
        end = time.monotonic() + 120
        while not (found := browser.evaluate(links)) and time.monotonic() < end:
            time.sleep(0.1)
        assert any("/config/index.html" in url for url in found)
        asked = [each["request"]["url"] for each in browser.events_of("Network.requestWillBeSent")]
        assert asked
        assert all(url.startswith(("file:", "data:")) for url in asked)
