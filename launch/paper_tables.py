"""Write docs/papers/PAPER.md: every table and figure of a paper, and what gives it here.

    python launch/paper_tables.py

Three sources, each of which says what the others do not:

- `megavis/evaluation/published/PAPER.yaml`: the numbers of the tables;
- the headers of `yaml_configs/*/*.yaml`, whose lines below `# Gives:` name what a config is for:
  `Table 4, row 8, FT: 82.7 by objective.num_groups=5`. Rows count from 1, numbers are those of the
  published row; behind `by` stand keys that change, or a command;
- `docs/papers/PAPER.yaml`: all tables and figures in order, which of their columns are results, and
  the state of rows that were run small, are other people's or that nothing here gives.
"""

from __future__ import annotations

import functools
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.evaluation.published import PublishedTable, published_papers

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "papers"
CONFIGS = ROOT / "yaml_configs"
PAPERS = ("igpt", "givt", "darl", "gvp", "mp3", "mae")
STATES = ("run small", "not run", "not possible", "cited", "drawing")
GIVES = re.compile(
    r"(?:(?P<paper>[a-z0-9]+) )?(?P<item>(?:Table|Figure|Sections?|Appendix) [\w. ]+?)"
    r"(?:, row (?P<row>\d+))?(?:, (?P<column>[^:]+?))?(?:: (?P<numbers>.+?))?(?: by (?P<how>.+))?"
)
NO_ROW = "no row of the paper"
LAYOUT = re.compile(r"^# (\S+) on (\d+ \S+ GPUs), .*Made by", re.MULTILINE)
COMMANDS = ("megavis", "torchrun", "python", "make", "bash")
HEAD = """# {short}: tables and figures

*{title}*

Made by `python launch/paper_tables.py`; [all papers](README.md), and what the states mean. A config
of [yaml_configs/{paper}](../../yaml_configs/{paper}) is named by its file, with the keys to add;
what stands before an arrow comes first.
"""
INDEX = """# The papers, table by table

Each page has a paper's tables and figures in order, the config or command for each result, and the
paper's number. `python launch/paper_tables.py` makes them of the headers of `yaml_configs/`, the
numbers in `megavis/evaluation/published/` and the YAML files beside the pages.

{table}

| state | |
|---|---|
| run small | a demo has measured this kind of result: its number and where; not the paper's |
| not run | a config or command that is shipped starts it |
| not possible | nothing here does it |
| cited | somebody else's method, as the paper cites it |

Not possible:

{lost}
"""


@dataclass(frozen=True)
class Claim:
    """A line of a header: what a config gives.

    Attributes:
        path: of the config.
        paper: whose table or figure it is.
        item: its name.
        row: counted from 1; 0 for an item without rows.
        column: which result of the row; empty for all that nobody names by itself.
        numbers: as the header prints them.
        words: keys that change.
        command: what is run in place of the config; empty for training it.
    """

    path: Path
    paper: str
    item: str
    row: int
    column: str
    numbers: str
    words: tuple[str, ...]
    command: str

    @functools.cached_property
    def config(self) -> RunConfig:
        """The config with its words."""
        return load_config(self.path, self.words).config

    def __str__(self) -> str:
        if self.command:
            return f"`{self.command}`"
        names = [_link(path) for path in dict.fromkeys([*_configs_before(self.config), self.path])]
        return " ".join([" → ".join(names), *(f"`{word}`" for word in self.words)])


def read_claims() -> list[Claim]:
    """Read the headers of all configs.

    Raises:
        ValueError: a line below `# Gives:` is none.
    """
    return [claim for path in sorted(CONFIGS.glob("*/*.yaml")) for claim in _claims_of(path)]


def _claims_of(path: Path) -> Iterator[Claim]:
    _, _, rest = path.read_text(encoding="utf-8").partition("# Gives:\n")
    block = re.match(r"(?:#   .*\n)*", rest)
    assert block is not None, "matches the empty text"
    for line in re.sub(r"\n#     +", " ", block[0]).splitlines():
        text = line.removeprefix("#   ")
        if text == NO_ROW:
            continue
        found = GIVES.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{path}: '{text}' is not like 'Table 4, row 8, FT: 82.7 by key=value'"
            )
        how = found["how"] or ""
        is_command = how.split(" ")[0] in COMMANDS
        yield Claim(
            path=path,
            paper=found["paper"] or path.parent.name,
            item=found["item"],
            row=int(found["row"] or 0),
            column=found["column"] or "",
            numbers=found["numbers"] or "",
            words=() if is_command else tuple(shlex.split(how)),
            command=how if is_command else "",
        )


@functools.cache
def presets() -> dict[str, tuple[Path, RunConfig]]:
    """Return each shipped config by the run folder that it makes."""
    paths = sorted(CONFIGS.glob("*/*.yaml"))
    configs = [load_config(path).config for path in paths]
    return {config.folder: (path, config) for path, config in zip(paths, configs, strict=True)}


def runs_before(config: RunConfig) -> Iterator[str]:
    """Yield the run folders that a config needs: of a tokenizer, and of what is fine-tuned."""
    parts = [getattr(config.objective, name, None) for name in ("reads", "condition")]
    for section in (config.objective, *parts):
        if folder := getattr(section, "tokenizer", None):
            yield folder
    if config.finetune and config.finetune.from_run:
        yield config.finetune.from_run


def _configs_before(config: RunConfig) -> Iterator[Path]:
    """Yield the shipped configs that make what a config needs, first one first."""
    for folder in runs_before(config):
        if folder in presets():
            path, earlier = presets()[folder]
            yield from _configs_before(earlier)
            yield path


def _link(path: Path) -> str:
    return f"[{path.stem}](../../yaml_configs/{path.parent.name}/{path.name})"


def presets_without_a_row(paper: str, claims: Sequence[Claim]) -> Iterator[str]:
    """Yield a sentence for each shipped config of a paper that comes in no line of any page.

    Raises:
        ValueError: its header does not say so.
    """
    named = {claim.path for claim in claims}
    for claim in claims:
        if not claim.command:
            named.update(_configs_before(claim.config))
    for path, _ in presets().values():
        if path.parent.name != paper or path in named or "demo" in path.stem:
            continue
        text = path.read_text(encoding="utf-8")
        layout = LAYOUT.search(text)
        if layout is None and f"#   {NO_ROW}\n" not in text:
            raise ValueError(f"{path}: say below '# Gives:' which row it gives, or '{NO_ROW}'")
        what = f"{layout[1].removeprefix(f'{paper}_')} on {layout[2]}" if layout else NO_ROW
        yield f"- {_link(path)}: {what}"


@dataclass(frozen=True)
class Line:
    """A line of a table on a page.

    Attributes:
        row: its number, with the column where it has a line of its own; empty where an item has
            no rows.
        what: the row's words.
        numbers: the paper's.
        how: what gives them.
        state: one of `STATES`, with its reason or number.
    """

    row: str
    what: str
    numbers: str
    how: str
    state: str


class Page:
    """The page of one paper.

    Raises:
        ValueError: the sources contradict one another, or nobody speaks of a row.
    """

    def __init__(self, paper: str, claims: Sequence[Claim]) -> None:
        """Join the sources."""
        self.paper, self.published = paper, published_papers()[paper]
        self.tables = {table.table: table for table in self.published.tables}
        tree = yaml.safe_load((PAGES / f"{paper}.yaml").read_text(encoding="utf-8"))
        self.items = {item["item"]: item for item in tree}
        claimed: dict[tuple[str, int], list[Claim]] = {}
        for claim in claims:
            if claim.paper == paper:
                claimed.setdefault((claim.item, claim.row), []).append(claim)
        self._claimed = claimed
        self.others = list(presets_without_a_row(paper, claims))
        self.lines = {name: list(self._lines(name, item)) for name, item in self.items.items()}
        if claimed or set(self.tables) - set(self.items):
            unknown = [*map(str, claimed), *(set(self.tables) - set(self.items))]
            raise ValueError(f"docs/papers/{paper}.yaml has no {', '.join(unknown)}")

    def _lines(self, name: str, item: Mapping[str, Any]) -> Iterator[Line]:
        states = dict(_states(item.get("rows", {})))
        if "results" in item:
            table = self.tables[name]
            for number, row in enumerate(table.rows, start=1):
                yield from self._row(table, number, row, item["results"], states)
        else:
            claims = self._claimed.pop((name, 0), [])
            yield self._line(name, "", "", str(item.get("numbers", "")), claims, states)

    def _row(
        self,
        table: PublishedTable,
        number: int,
        row: tuple[str, ...],
        columns: Sequence[str],
        states: Mapping[str, str],
    ) -> Iterator[Line]:
        """Yield a line for each result that is named by its column, and one for the others."""
        cells = dict(zip(table.columns, row, strict=True))
        what = ", ".join(text for column, text in cells.items() if text and column not in columns)
        claims = self._claimed.pop((table.table, number), [])
        named = {claim.column for claim in claims}
        left = [column for column in columns if cells[column]]
        for column in [*left, ""]:
            label = f"{number} {column}".strip()
            of_all = not column and "all" in states
            if column not in named and label not in states and not of_all:
                continue
            mine = [claim for claim in claims if claim.column == column]
            if column:
                left.remove(column)
            texts = [cells[column]] if column else [cells[each] for each in left]
            wrong = [claim for claim in mine if claim.numbers != ", ".join(texts)]
            if wrong:
                raise ValueError(f"{wrong[0].path}: {table.table}, row {label} is {texts}")
            if not column and len(columns) > 1:
                texts = [f"{each} {text}" for each, text in zip(left, texts, strict=True)]
            yield self._line(table.table, label, what, ", ".join(texts), mine, states)
            if not column:
                left = []
        if left or named - set(columns) - {""}:
            raise ValueError(f"{self.paper}: nobody speaks of {table.table}, row {number}: {left}")

    def _line(
        self,
        name: str,
        label: str,
        what: str,
        numbers: str,
        claims: Sequence[Claim],
        states: Mapping[str, str],
    ) -> Line:
        state = states.get(label) or states.get("all") or ("not run" if claims else "")
        if not state.startswith(STATES):
            raise ValueError(f"{self.paper}: nobody speaks of {name}, row {label or 'all'}")
        return Line(label, what, numbers, "; ".join(map(str, claims)), state)

    def counts(self) -> list[str]:
        """Return how many items there are, how many results, and how many in each state."""
        states = [line.state for lines in self.lines.values() for line in lines]
        states = [state for state in states if not state.startswith("drawing")]
        found = (sum(state.startswith(kind) for state in states) for kind in STATES[:-1])
        return [str(count) for count in (len(self.items), len(states), *found)]

    def text(self) -> str:
        """Return the page as Markdown."""
        short, title = self.published.short, self.published.title
        head = HEAD.format(short=short, title=title, paper=self.paper)
        parts = [self._section(name, item) for name, item in self.items.items()]
        if self.others:
            parts.append("\n".join(["## Other presets\n", *self.others, ""]))
        return "\n".join([head, *parts])

    def _section(self, name: str, item: Mapping[str, Any]) -> str:
        table, lines = self.tables.get(name), self.lines[name]
        shows = item.get("shows") or (table.title if table else "")
        if table is None or "results" not in item:
            (line,) = lines
            parts = [
                line.numbers and f"The paper: {line.numbers}.",
                line.how and f"{line.how}.",
                line.state,
            ]
            return f"## {name}: {shows}\n\n" + "\n".join(filter(None, parts)) + ".\n"
        about = ". ".join(filter(None, (table.dataset, table.metric)))
        rows = [
            f"| {line.row} | {line.what} | {line.numbers} | {line.how} | {line.state} |"
            for line in lines
        ]
        note = [f"{item['note']}\n"] if "note" in item else []
        return "\n".join(
            [
                f"## {name}: {shows}\n",
                f"{about[:1].upper()}{about[1:]}.\n",
                *note,
                "| row | | paper | here | state |",
                "|---|---|---|---|---|",
                *rows,
                "",
            ]
        )


def _states(rows: Mapping[object, str] | str) -> Iterator[tuple[str, str]]:
    """Yield label and state; `1-3 5 LP: cited` names column LP of four rows."""
    if isinstance(rows, str):
        yield "all", rows
        return
    for labels, state in rows.items():
        found = re.fullmatch(r"([\d -]*\d)( \D.*)?", str(labels))
        if found is None:
            raise ValueError(f"'{labels}' is not like '1-3 5 LP'")
        for part in found[1].split():
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                yield f"{number}{found[2] or ''}", state


def write_out() -> dict[str, str]:
    """Return the text of each file of docs/papers.

    Raises:
        ValueError: as `Page`.
    """
    claims = read_claims()
    pages = {paper: Page(paper, claims) for paper in PAPERS}
    texts = {f"{paper}.md": page.text() for paper, page in pages.items()}
    return {**texts, "README.md": _index(pages)}


def _index(pages: Mapping[str, Page]) -> str:
    """Return the page of all papers: how many results are in which state, what is not possible."""
    head = ["paper", "tables and figures", "results", *STATES[:-1]]
    table = [head, ["---"] * len(head)]
    lost: dict[str, list[str]] = {}
    for paper, page in pages.items():
        table.append([f"[{page.published.short}]({paper}.md)", *page.counts()])
        for name, lines in page.lines.items():
            for line in lines:
                if line.state.startswith("not possible"):
                    key = f"{page.published.short}, {name}: {line.state[len('not possible: ') :]}"
                    lost.setdefault(key, []).append(line.row)
    reasons = [f"- {key}{_rows(rows)}" for key, rows in lost.items()]
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return INDEX.format(table=text, lost="\n".join(reasons))


def _rows(rows: Sequence[str]) -> str:
    named = ", ".join(filter(None, rows))
    return named and f" (row{'s' * (len(rows) > 1)} {named})"


def main() -> int:
    """Write the pages; 1 where the sources contradict one another."""
    try:
        for name, text in write_out().items():
            (PAGES / name).write_text(text, encoding="utf-8")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
