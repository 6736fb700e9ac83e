"""Plan the shipped layouts again, and write their table in docs/scaling.md.

From the root of the checkout:

    python docs/scripts/plans.py                 # the table, from the files' headers, in a second
    python docs/scripts/plans.py --plan [NAME]   # plan layouts first, as their headers say

A shipped layout is a config whose header has the command of `megavis plan` that made it. Run it
with `--plan` after a change of the planner; a test compares the table with the files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megavis.cli import main as megavis
from megavis.config.load import load_config
from megavis.planning.layouts import layout_name

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/scaling.md"
_COMMAND = re.compile(r"^#   (megavis plan .*)$", re.MULTILINE)
_FIGURES = re.compile(
    r"^#   (\S+) GB on the fullest GPU, (\S+) s a step, (\S+) days for \S+ steps\.$", re.MULTILINE
)
_FIRST = re.compile(r"^# \S+ on (\d+) (\S+) GPUs, \d+ to a node", re.MULTILINE)
_HEAD = """\
| config | GPUs | layout | micro-batch | GB | s per step | days |
|---|---|---|---|---|---|---|
"""


def planned(names: Sequence[str] = ()) -> list[Path]:
    """Return the shipped layouts whose file names contain one of the names; default: all."""
    paths = sorted((ROOT / "yaml_configs").glob("*/*.yaml"))
    found = [path for path in paths if _COMMAND.search(path.read_text(encoding="utf-8"))]
    return [path for path in found if not names or any(name in path.stem for name in names)]


def command_of(path: Path) -> list[str]:
    """Return the words of the command that made a file, without `megavis`."""
    found = _COMMAND.search(path.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{path} has no command of `megavis plan` in its header")
    return shlex.split(found[1])[1:]


def row(path: Path) -> str:
    """Return a file's row of the table."""
    text, config = path.read_text(encoding="utf-8"), load_config(path).config
    first, figures = _FIRST.search(text), _FIGURES.search(text)
    if first is None or figures is None:
        raise ValueError(f"{path}: the header lacks GPUs, or the figures of `megavis plan`")
    cells = (
        f"`{path.parent.name}/{path.name}`",
        f"{first[1]} {first[2].upper()}",
        layout_name(config.parallel),
        str(config.training.micro_batch_size),
        *figures.groups(),
    )
    return f"| {' | '.join(cells)} |\n"


def table() -> str:
    """Return the table of all shipped layouts."""
    return _HEAD + "".join(map(row, planned()))


def with_table(page: str) -> str:
    """Return a page with the table in place of its own."""
    start = page.index(_HEAD.splitlines()[0])
    end = page.index("\n\n", start) + 1
    return page[:start] + table() + page[end:]


def main(words: Sequence[str] | None = None) -> int:
    """Plan if asked, and write the table; return the exit code of the first plan that fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plan", nargs="*", metavar="NAME", help="plan these files; default: all")
    args = parser.parse_args(words)
    for path in [] if args.plan is None else planned(args.plan):
        with contextlib.redirect_stdout(io.StringIO()):
            code = megavis(command_of(path))
        if code:
            sys.stderr.write(f"{path}: `megavis plan` ended with exit code {code}\n")
            return code
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
