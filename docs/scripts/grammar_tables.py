"""Write the table of all words, their kinds and keys into the documents.

    python docs/scripts/grammar_tables.py

The table stands between two comments in `docs/compose.md`, and comes
from the sections of `megavis/grammar/words`.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megavis.config.section import Section
from megavis.grammar.grammar import Words

DOCUMENTS = ("docs/compose.md",)
BEGIN, END = "<!-- words: python docs/scripts/grammar_tables.py -->", "<!-- end of the words -->"
ROOT = Path(__file__).parents[2]


def sections_of(annotation: Any) -> list[type[Section]]:
    """Return the sections in an annotation, in order."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [each for part in typing.get_args(annotation) for each in sections_of(part)]


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield word, kind, meaning and keys of each section."""
    for word, field in Words.model_fields.items():
        if word == "predicts":  # the kinds of `reads`
            continue
        name = "`reads`, `predicts`" if word == "reads" else f"`{word}`"
        for section in sections_of(field.annotation):
            kind = section.model_fields.get("kind")
            shown = f"`{kind.default}`" if kind else ""
            keys = [f"`{key}`" for key in section.model_fields if key != "kind"]
            meaning = (section.__doc__ or "").split("\n\n")[0].replace("\n", " ").strip()
            yield name, shown, " ".join(meaning.split()), ", ".join(keys)
            name = ""


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| word | kind | what it is | keys |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows()]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """Return a document with the present table; raises ValueError if it has no place for it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no place for the table: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{table()}{END}{after}"


def main() -> None:
    """Write the table into each document."""
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
