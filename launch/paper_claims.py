"""Results that the headers of `yaml_configs/*/*.yaml` claim to reproduce.

The lines below `# Gives:` name them: `Table 4, row 8, FT: 82.7 by objective.num_groups=5`. Rows
count from 1, numbers are those of the published row; `by` precedes overridden keys or a command.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megavis.config.load import exported_names, load_config
from megavis.config.schema import RunConfig

CONFIGS = Path(__file__).parents[1] / "yaml_configs"
GIVES = re.compile(
    r"(?:(?P<paper>[a-z0-9]+) )?(?P<item>(?:Table|Figure|Sections?|Appendix) [\w. ]+?)"
    r"(?:, row (?P<row>\d+))?(?:, (?P<column>[^:]+?))?(?:: (?P<numbers>.+?))?(?: by (?P<how>.+))?"
)
NO_ROW = "no row of the paper"
LAYOUT = re.compile(r"^# (\S+) on (\d+ \S+ GPUs), .*Made by", re.MULTILINE)
COMMANDS = ("megavis", "torchrun", "python", "make", "bash")


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
        words: overridden keys.
        command: run in place of the config; empty to train it.
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
        """The config with its overrides."""
        return load_config(self.path, self.words).config

    def __str__(self) -> str:
        if self.command:
            return f"`{self.command}`"
        names = [link(path) for path in dict.fromkeys([*_configs_before(self.config), self.path])]
        return " ".join([" → ".join(names), *(f"`{word}`" for word in self.words)])


def read_claims() -> list[Claim]:
    """Read the headers of all configs.

    Raises:
        ValueError: a line below `# Gives:` is not a claim.
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
    """Return the shipped configs by run folder."""
    paths = sorted(CONFIGS.glob("*/*.yaml"))
    configs = [load_config(path).config for path in paths]
    return {config.folder: (path, config) for path, config in zip(paths, configs, strict=True)}


def runs_before(config: RunConfig) -> Iterator[str]:
    """Yield the run folders that a config needs: a tokenizer, and the run to fine-tune."""
    yield from exported_names(config)
    if config.finetune and config.finetune.from_run:
        yield config.finetune.from_run


def _configs_before(config: RunConfig) -> Iterator[Path]:
    """Yield the shipped configs to run before this one, in order."""
    for folder in runs_before(config):
        if folder in presets():
            path, earlier = presets()[folder]
            yield from _configs_before(earlier)
            yield path


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
            named.update(_configs_before(claim.config))
    for path, _ in presets().values():
        if path.parent.name != paper or path in named or "demo" in path.stem:
            continue
        text = path.read_text(encoding="utf-8")
        layout = LAYOUT.search(text)
        if layout is None and f"#   {NO_ROW}\n" not in text:
            raise ValueError(f"{path}: list the rows it reproduces below '# Gives:', or '{NO_ROW}'")
        what = f"{layout[1].removeprefix(f'{paper}_')} on {layout[2]}" if layout else NO_ROW
        yield f"- {link(path)}: {what}"
