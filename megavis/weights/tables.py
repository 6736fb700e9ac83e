"""Tables of names: our tensors, another library's tensors, and how both are laid out.

A row is read in both directions: ours to theirs for an export, theirs to ours for an import.
Applied to a run's parameters on the meta device, a table gives the names and shapes that a file of
another library must have, so no form checks its tensors by itself.

Legend: n heads, d head size, h hidden size, p side of a patch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.model.attention import join_heads, split_heads

Names = str | tuple[str, ...]


class Layout(NamedTuple):
    """How another library stores what a row names: two functions that invert each other.

    Attributes:
        read: takes their tensors and returns ours, one or a tuple.
        write: takes our tensors and returns theirs.
    """

    read: Callable[..., Any]
    write: Callable[..., Any]


SAME = Layout(lambda x: x, lambda x: x)
TRANSPOSED = Layout(Tensor.t, Tensor.t)
# A learned token: [h], elsewhere [1, 1, h].
TOKEN = Layout(lambda x: x[0, 0], lambda x: x.view(1, 1, -1))
BATCHED = Layout(lambda x: x[0], lambda x: x[None])


class Row(NamedTuple):
    """Our name or names, theirs, and how they store it."""

    ours: Names
    theirs: Names
    layout: Layout = SAME


Table = Sequence[Row]


def read_table(table: Table, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our float32 tensors, made of another library's; a missing one raises KeyError."""
    return _applied(((row.theirs, row.ours, row.layout.read) for row in table), tensors)


def write_table(table: Table, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return another library's float32 tensors, made of ours; a missing one raises KeyError."""
    return _applied(((row.ours, row.theirs, row.layout.write) for row in table), weights)


def _applied(
    steps: Iterable[tuple[Names, Names, Callable[..., Any]]], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    for given, wanted, convert in steps:
        results = convert(*(tensors[name] for name in _tuple(given)))
        results = results if isinstance(results, tuple) else (results,)
        made |= zip(_tuple(wanted), results, strict=True)
    return {name: tensor.float().contiguous() for name, tensor in made.items()}


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def ours_of(table: Table) -> set[str]:
    """Return our names in a table."""
    return {name for row in table for name in _tuple(row.ours)}


def layer(ours: str, theirs: Names, layout: Layout = SAME) -> list[Row]:
    """Return the rows of a layer's weight and bias, both of which are stored in this way."""
    return [
        Row(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in _tuple(theirs)), layout)
        for kind in ("weight", "bias")
    ]


def joined_heads(num_heads: int, *, parts: int = 3, stored: Layout = SAME) -> Layout:
    """Return the layout of queries, keys and values, which we join as `linear_qkv` does.

    Args:
        num_heads: attention heads n.
        parts: tensors that store them: three, or 1 with all rows of queries first.
        stored: of each of these tensors, as opposed to rows `[n · d, h]` or `[n · d]`.
    """

    def read(*theirs: Tensor) -> Tensor:
        query, key, value = torch.cat([stored.read(each) for each in theirs]).chunk(3)
        return join_heads(query, key, value, num_heads)

    def write(joined: Tensor) -> tuple[Tensor, ...]:
        rows = torch.cat(split_heads(joined, num_heads))
        return tuple(stored.write(part) for part in rows.chunk(parts))

    return Layout(read, write)


def patches(side: int) -> Layout:
    """Return the layout of an embedding of patches: `[h, p · p · 3]`, elsewhere `[h, 3, p, p]`."""
    return Layout(
        lambda kernel: kernel.permute(0, 2, 3, 1).flatten(1),
        lambda matrix: matrix.unflatten(1, (side, side, 3)).permute(0, 3, 1, 2),
    )


def with_blank_row(positions: Tensor) -> Tensor:
    """Return a table `[1, 1 + n, h]` whose first row, of the class token, is zero."""
    return F.pad(positions, (0, 0, 1, 0))[None]


def count(names: Iterable[str], prefix: str) -> int:
    """Return one more than the largest number that follows `prefix` in a name, and at least 1."""
    found = (re.match(rf"{re.escape(prefix)}(\d+)[./]", name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=0)
