"""Progress bars with the time left, for work that may take longer than ten seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

_SECONDS_UNTIL_SHOWN = 2.0

_Part = TypeVar("_Part")


def is_quiet() -> bool:
    """Return whether `--quiet` was given, which sets a variable of tqdm."""
    return bool(os.environ.get("TQDM_DISABLE"))


def is_silent() -> bool:
    """Return whether there is no bar: in a log, with `--quiet`, and on all processes but one."""
    # tqdm itself reads its variable only where `disable` is not given.
    if not sys.stderr.isatty() or is_quiet():
        return True
    # Set by the launcher, or when a process joins its job. torch knows the rank too, but reports,
    # which show bars, do not import torch.
    return int(os.environ.get("RANK", "0")) > 0


def shown(
    parts: Iterable[_Part],
    label: str,
    *,
    total: int,
    unit: str = "image",
    size: Callable[[_Part], int] | None = None,
) -> Iterator[_Part]:
    """Yield parts of some work, with a bar on a terminal if it takes longer than two seconds.

    Args:
        label: description of the work.
        total: total number of units.
        unit: name of the unit.
        size: function from a part to its number of units; one each when absent.
    """
    options: dict[str, Any] = {"delay": _SECONDS_UNTIL_SHOWN, "leave": False, "dynamic_ncols": True}
    with tqdm(total=total, desc=label, unit=unit, disable=is_silent(), **options) as bar:
        for part in parts:
            yield part
            bar.update(1 if size is None else size(part))
