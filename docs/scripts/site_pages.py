"""Generate pages of the site; a hook of mkdocs.yml.

- the documents of the checkout's root: README.md is the first page;
- `config/`: every key of a config, by section (docs/scripts/config_reference.py);
- `presets/`: the files of `yaml_configs/`, a page per paper;
- `notebooks/`: the notebooks of `docs/notebooks`, as text;
- `api/`: public modules, a page per package, from their docstrings;
- the introduction of `docs/papers/PAPER.md`, from the paper's module.

Documents link to files of the checkout. Links out of `docs/` are rewritten for the site; a link
without a page is kept, so that the strict build fails.
"""

from __future__ import annotations

import ast
import functools
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from config_reference import config_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "yaml_configs"
PAPERS = {
    "igpt": "iGPT",
    "givt": "GIVT",
    "darl": "DARL",
    "gvp": "GVP",
    "mp3": "MP3",
    "mae": "MAE",
    "aim": "AIM",
    "rar": "RAR",
    "randar": "RandAR",
    "mar": "MAR",
    "compose": "Compositions",
    "comparison": "Comparison",
    "results": "Study",
}
DOCUMENTS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
API = (
    "notebook",
    "config",
    "grammar",
    "data",
    "tokenizers",
    "composition",
    "schedules",
    "densities",
    "model",
    "papers",
    "sampling",
    "evaluation",
    "checkpoint",
    "weights",
)
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the generated pages of each folder in the navigation."""
    config.nav = _filled(config.nav)
    return config


def _filled(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_filled(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: _filled(entry) for title, entry in nav.items()}
    return [page for page in pages() if page.startswith(nav)] if nav.endswith("/") else nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for source, text in pages().items():
        files.append(File.generated(config, source, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that lead out of `docs/`; put a paper's description on top of its page."""
    source = page.file.src_uri
    if source.startswith("papers/") and Path(source).stem in PAPERS:
        markdown = _introduced(markdown, Path(source).stem)
    return rewritten(markdown, source)


def rewritten(markdown: str, source: str) -> str:
    """Return a document with the links of the site.

    Args:
        markdown: its text; links are relative to its path in the checkout.
        source: its path in the site.
    """
    places = {site: checkout for checkout, site in DOCUMENTS.items()}
    folder = posixpath.dirname(places.get(source, f"docs/{source}"))

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        page, anchor = _place(target, found[2] or "")
        return posixpath.relpath(page, posixpath.dirname(source) or ".") + anchor

    return LINK.sub(link, markdown)


def _place(target: str, anchor: str) -> tuple[str, str]:
    """Return the page and the anchor that show a file or folder of the checkout."""
    folder, _, name = target.partition("/")
    if target in DOCUMENTS:
        return DOCUMENTS[target], anchor
    if target == "docs":
        return "index.md", anchor
    if folder == "docs":
        return re.sub(r"\.ipynb$", ".md", name), anchor
    if folder == "yaml_configs" and name.endswith(".yaml"):
        paper, _, preset = name.removesuffix(".yaml").partition("/")
        return f"presets/{paper}.md", f"#{preset}"
    if folder == "yaml_configs" and name.rstrip("/") in PAPERS:
        return f"presets/{name.rstrip('/')}.md", anchor
    return f"../{target}", anchor


@functools.cache
def pages() -> Mapping[str, str]:
    """Return the text of each generated page by its path in the site."""
    return dict(_pages())


def _pages() -> Iterator[tuple[str, str]]:
    for checkout, site in DOCUMENTS.items():
        yield site, (ROOT / checkout).read_text(encoding="utf-8")
    yield from config_pages()
    for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        yield f"notebooks/{path.stem}.md", _notebook_page(path)
    yield "presets/index.md", _preset_index()
    for paper in PAPERS:
        yield f"presets/{paper}.md", _preset_page(paper)
    yield "api/index.md", _api_index()
    for package in API:
        yield f"api/{package}.md", _api_page(package)


def _notebook_page(path: Path) -> str:
    """Return the cells of a notebook as Markdown."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"````python\n{text}\n````\n" if is_code else f"{text}\n")
    return "\n".join(parts)


def _preset_index() -> str:
    rows = [
        f"- [{name}]({paper}.md): {len(_presets(paper))} files" for paper, name in PAPERS.items()
    ]
    return "\n".join(["# Presets", "", "The files of `yaml_configs/`, by paper.", "", *rows, ""])


def _presets(paper: str) -> list[Path]:
    return sorted((CONFIGS / paper).glob("*.yaml"))


def _preset_page(paper: str) -> str:
    lines = [f"# Presets of {PAPERS[paper]}", ""]
    for path in _presets(paper):
        text = path.read_text(encoding="utf-8").rstrip()
        name = path.relative_to(ROOT).as_posix()
        lines += [f"## {name} {{#{path.stem}}}", "", "```yaml", text, "```", ""]
    return "\n".join(lines)


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _public(package: str) -> Iterator[str]:
    """Yield the modules of a package and its subpackages that have public names."""
    path = ROOT / "megavis" / package
    sources = [path.with_suffix(".py")] if not path.is_dir() else sorted(path.rglob("*.py"))
    for source in sources:
        names = ast.parse(source.read_text(encoding="utf-8")).body
        kinds = (ast.FunctionDef, ast.ClassDef)
        if any(isinstance(each, kinds) and each.name[0] != "_" for each in names):
            parts = source.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__")


def _api_page(package: str) -> str:
    path = ROOT / "megavis" / package
    about = _docstring(path / "__init__.py") if path.is_dir() else ""
    lines = [f"# megavis.{package}", "", about, ""]
    for module in _public(package):
        lines += [f"::: {module}", ""]
    return "\n".join(lines)


def _api_index() -> str:
    rows = []
    for package in API:
        path = ROOT / "megavis" / package
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        rows.append(f"- [`megavis.{package}`]({package}.md): {_docstring(source).splitlines()[0]}")
    head = ["# API", "", "From the docstrings. Most programs need only this:", ""]
    return "\n".join([*head, "::: megavis.load", "", *rows, ""])


def _introduced(markdown: str, paper: str) -> str:
    """Return a paper's page with an introduction from its module and its demo, and links."""
    head, title, rest = markdown.partition("\n\n*")
    name = PAPERS[paper]
    about = _docstring(ROOT / "megavis" / "papers" / paper / "config.py")
    header = (CONFIGS / paper / "demo.yaml").read_text(encoding="utf-8").split("\n#\n")
    expected = [part for part in header if part.startswith(("# Hardware", "# Expect"))][-1]
    expect = " ".join(
        line.removeprefix("# ")
        for line in expected.splitlines()
        if line.startswith("# ") and "language-server" not in line
    )
    lines = [
        "",
        about,
        "",
        f"`make demo PAPER={paper}` trains a small one on letters ([gallery](../gallery.md)).",
        expect,
        "",
        f"[Keys of {name}](../config/{paper}.md) · [presets](../../yaml_configs/{paper})"
        f" · [code](../api/papers.md)",
    ]
    return head + "\n".join(lines) + title + rest
