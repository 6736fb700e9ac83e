"""Lists of Speech Commands' recordings by part, as TC-ResNet publishes them.

`speech_commands_dataset/{train,valid,test}.txt` in TC-ResNet's repository ("Temporal Convolution
for Real-time Keyword Spotting on Mobile Devices", Choi et al., 2019) have a line `word/file.wav`
for each recording, with 1,854, 258 and 257 lines of `_silence_`. TensorFlow's own script, which
made them, chooses the unknown words by the order in which a folder lists its files, so no rule
gives the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from data_tools.user_text import numbered_lines
from megavis.config.errors import UserError

FILES = {"train": "train.txt", "validation": "valid.txt", "test": "test.txt"}
SILENCE = "_silence_"


@dataclass(frozen=True)
class ListedPart:
    """The recordings of a part.

    Attributes:
        names: `word/file.wav` below the folder of recordings.
        num_silences: lines of `_silence_`.
    """

    names: tuple[str, ...]
    num_silences: int


def read_split_lists(
    folder: Path, recordings: Collection[str], words: Sequence[str]
) -> Mapping[str, ListedPart]:
    """Read the lists of all parts.

    Args:
        folder: folder of the three lists.
        recordings: names of the existing recordings.
        words: wanted words; each part must have a recording of one.

    Raises:
        UserError: a list is missing, or names a recording that does not exist or is listed twice.
    """
    found, seen, there = {}, set[str](), set(recordings)
    for part, file in FILES.items():
        names, num_silences = [], 0
        for number, name in _names(folder / file):
            if name.startswith(f"{SILENCE}/"):
                num_silences += 1
                continue
            if name not in there:
                example = next(iter(recordings), "")
                is_name = name.count("/") == 1
                reason = "is no recording of the source" if is_name else f"is not like {example}"
                raise UserError(f"{folder / file} line {number}: {name} {reason}")
            if name in seen:
                raise UserError(f"{folder / file} line {number}: {name} is listed twice")
            seen.add(name)
            names.append(name)
        if not any(name.split("/")[0] in words for name in names):
            raise UserError(f"{folder / file} lists no recording of {', '.join(words)}")
        found[part] = ListedPart(tuple(names), num_silences)
    return found


def _names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and the last two parts of the path on each line."""
    if not path.is_file():
        raise UserError(
            f"{path} is missing: --split-lists needs {', '.join(FILES.values())}, as in"
            " speech_commands_dataset of TC-ResNet's repository"
        )
    for number, line in numbered_lines(path):
        yield number, "/".join(PurePosixPath(line).parts[-2:])
