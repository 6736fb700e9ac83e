"""Spoken digits as a folder that `data_tools speech` reads, with a speaker held out.

The Free Spoken Digit Dataset has files such as `7_jackson_32.wav`: digit, speaker, take. They may
also lie in a folder for each digit, as `7/s1_32.wav`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megavis.config.errors import UserError

_DIGITS = [str(digit) for digit in range(10)]
_FLAT = re.compile(r"(?P<digit>\d)_(?P<speaker>[^_]+)_(?P<take>\d+)\.wav")
_IN_FOLDERS = re.compile(r"(?P<speaker>[^_]+)_(?P<take>\d+)\.wav")
_FEWEST_SPEAKERS = 3


def is_digits(place: Path) -> bool:
    """Return whether a folder holds spoken digits in one of the two forms."""
    return next(_recordings(place), None) is not None


def _recordings(place: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield digit, speaker and file of each recording."""
    for path in sorted(place.glob("*.wav")):
        if found := _FLAT.fullmatch(path.name):
            yield found["digit"], found["speaker"], path
    for digit in _DIGITS:
        for path in sorted((place / digit).glob("*.wav")):
            if found := _IN_FOLDERS.fullmatch(path.name):
                yield digit, found["speaker"], path


def link_digits(place: Path, folder: Path) -> None:
    """Make a folder of links in Speech Commands' layout, with its lists of held-out recordings.

    In order of their names, the last speaker is for testing, the one before for selecting the step,
    and the others for training.

    Args:
        place: folder with the recordings, which is only read.
        folder: folder to make; nothing is done if it exists.

    Raises:
        UserError: there are fewer than three speakers.
    """
    if (folder / "testing_list.txt").exists():
        return
    found = list(_recordings(place))
    speakers = sorted({speaker for _, speaker, _ in found})
    if len(speakers) < _FEWEST_SPEAKERS:
        raise UserError(
            f"{place} has spoken digits of {len(speakers)} speakers; one tests, one chooses, and at"
            " least one trains"
        )
    held_out: dict[str, list[str]] = {speakers[-2]: [], speakers[-1]: []}
    for digit, speaker, path in found:
        name = f"{digit}/{speaker}_{path.stem.rpartition('_')[2]}.wav"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(path)
        if speaker in held_out:
            held_out[speaker].append(name)
    for list_name, names in zip(
        ("validation_list.txt", "testing_list.txt"), held_out.values(), strict=True
    ):
        (folder / list_name).write_text("".join(f"{name}\n" for name in names))
