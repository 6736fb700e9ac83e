"""Results that the headers of `yaml_configs/*/*.yaml` claim to reproduce, and the runs behind them.

The lines below `# Gives:` name them: `Table 4, row 8, FT: 82.7 by objective.num_groups=5`. Rows
count from 1, numbers are those of the published row; `by` precedes overridden keys or a command.

A model that differs from a config in a few keys has no file: `runs` of `docs/papers/PAPER.yaml`
names it, as `gvp_vit_b_p2p_raster: vit_b_p2p objective.order=raster`, or as a mapping with these
words as `by` and a sentence as `about`. Rows start from it like from a config, and headers may name
it after `by`, with more keys if need be.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megavis.config.load import exported_names, load_config
from megavis.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "yaml_configs"
PAGES = ROOT / "docs" / "papers"
GIVES = re.compile(
    r"(?:(?P<paper>[a-z0-9]+) )?(?P<item>(?:Table|Figure|Sections?|Appendix) [\w. ]+?)"
    r"(?:, row (?P<row>\d+))?(?:, (?P<column>[^:]+?))?(?:: (?P<numbers>.+?))?(?: by (?P<how>.+))?"
)
NO_ROW = "no row of the paper"
LAYOUT = re.compile(r"^# (\S+) on (\d+ \S+ GPUs), .*Made by", re.MULTILINE)
COMMANDS = ("megavis", "torchrun", "python", "make", "bash")


@dataclass(frozen=True)
class Run:
    """A run: a shipped config, or one with overridden keys.

    Attributes:
        path: the config file.
        words: overridden keys, with the run's name; empty for the config itself.
        item: the table or figure with the run, if it is not the config itself.
        about: what the run is, where its name does not say.
    """

    path: Path
    words: tuple[str, ...] = ()
    item: str = ""
    about: str = ""

    @functools.cached_property
    def config(self) -> RunConfig:
        """The config with its overrides."""
        return load_config(self.path, self.words).config

    @property
    def command(self) -> str:
        """The command that starts it."""
        verb = "finetune" if self.config.finetune else "train"
        return shlex.join(["megavis", verb, str(self.path.relative_to(ROOT)), *self.words])

    def __str__(self) -> str:
        if not self.words:
            return link(self.path)
        return f"[{self.config.name}]({self.path.parent.name}.md#runs)"


@dataclass(frozen=True)
class Claim:
    """A line of a header: a result that a config reproduces.

    Attributes:
        path: the config file.
        paper: the paper with the table or figure.
        item: name of the table or figure.
        row: counted from 1; 0 for an item without rows.
        column: the result within the row; empty for all that no other claim names.
        numbers: as printed in the header.
        words: overridden keys, with those of `run`.
        command: run in place of the config; empty to train it.
        run: the run that the header names, or the config.
    """

    path: Path
    paper: str
    item: str
    row: int
    column: str
    numbers: str
    words: tuple[str, ...]
    command: str
    run: Run

    @functools.cached_property
    def config(self) -> RunConfig:
        """The config with its overrides."""
        return load_config(self.path, self.words).config

    def __str__(self) -> str:
        if self.command:
            return f"`{self.command}`"
        runs = dict.fromkeys([*_runs_before(self.config), self.run])
        words = [word for word in self.words if word not in self.run.words]
        return " ".join([" → ".join(map(str, runs)), *(f"`{word}`" for word in words)])


def read_claims() -> list[Claim]:
    """Read the headers of all configs.

    Raises:
        ValueError: a line below `# Gives:` is not a claim, or names a run of another config.
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
        words = [] if is_command else shlex.split(how)
        run = Run(path)
        if words and "=" not in words[0]:
            run = _named_run(path, words.pop(0))
        yield Claim(
            path=path,
            paper=found["paper"] or path.parent.name,
            item=found["item"],
            row=int(found["row"] or 0),
            column=found["column"] or "",
            numbers=found["numbers"] or "",
            words=_joined([*run.words, *words]),
            command=how if is_command else "",
            run=run,
        )


def _named_run(path: Path, name: str) -> Run:
    """Return a run of `docs/papers` that a header names."""
    for run in row_runs(path.parent.name):
        if f"name={name}" in run.words and run.path == path:
            return run
    raise ValueError(
        f"{path}: docs/papers/{path.parent.name}.yaml has no run {name} of this config"
    )


def _joined(words: Sequence[str]) -> tuple[str, ...]:
    """Return overridden keys without those that later words override again."""
    return tuple({word.partition("=")[0]: word for word in words}.values())


@functools.cache
def row_runs(paper: str) -> tuple[Run, ...]:
    """Return the runs that `docs/papers/PAPER.yaml` names, in order."""
    return tuple(_runs_of(PAGES / f"{paper}.yaml"))


def _runs_of(page: Path) -> Iterator[Run]:
    for item in yaml.safe_load(page.read_text(encoding="utf-8")):
        for name, entry in item.get("runs", {}).items():
            fields = entry if isinstance(entry, dict) else {"by": entry, "about": ""}
            preset, *words = shlex.split(fields["by"])
            path = CONFIGS / page.stem / f"{preset}.yaml"
            yield Run(path, (*words, f"name={name}"), item["item"], fields["about"])


@functools.cache
def known_runs() -> dict[str, Run]:
    """Return the shipped configs and the runs of docs/papers by run folder."""
    runs = [Run(path) for path in sorted(CONFIGS.glob("*/*.yaml"))]
    for page in sorted(PAGES.glob("*.yaml")):
        runs += row_runs(page.stem)
    return {str(run.config.folder): run for run in runs}


def runs_before(config: RunConfig) -> Iterator[str]:
    """Yield the run folders that a config needs: a tokenizer, and the run to fine-tune."""
    yield from exported_names(config)
    if config.finetune and config.finetune.from_run:
        yield config.finetune.from_run


def _runs_before(config: RunConfig) -> Iterator[Run]:
    """Yield the known runs to finish before this one, in order."""
    for folder in runs_before(config):
        if folder in known_runs():
            run = known_runs()[folder]
            yield from _runs_before(run.config)
            yield run


def link(path: Path) -> str:
    """Return a Markdown link from a page of docs/papers to a config."""
    return f"[{path.stem}](../../yaml_configs/{path.parent.name}/{path.name})"


def presets_without_a_row(paper: str, claims: Sequence[Claim]) -> Iterator[str]:
    """Yield a list item for each shipped config of a paper that no page mentions.

    Raises:
        ValueError: its header does not declare this.
    """
    named = {claim.path for claim in claims}
    for claim in claims:
        if not claim.command:
            named.update(run.path for run in _runs_before(claim.config))
    for run in known_runs().values():
        path = run.path
        if run.words or path.parent.name != paper or path in named or "demo" in path.stem:
            continue
        text = path.read_text(encoding="utf-8")
        layout = LAYOUT.search(text)
        if layout is None and f"#   {NO_ROW}\n" not in text:
            raise ValueError(f"{path}: list the rows it reproduces below '# Gives:', or '{NO_ROW}'")
        what = f"{layout[1].removeprefix(f'{paper}_')} on {layout[2]}" if layout else NO_ROW
        yield f"- {link(path)}: {what}"
