"""`speech`: a Speech Commands folder becomes three folders of frames: train, validation and test.

`validation_list.txt` and `testing_list.txt` in the folder name the files of the latter two ("Speech
Commands", Warden, 2018). With `--words` only these are classes of their own: the others are
`_unknown_`, and cuts of `_background_noise_` are `_silence_`, a tenth as many as wanted words each,
as in the twelve classes of TC-ResNet, whose split the paper takes over.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.cepstra import (
    DESCRIPTION,
    NUM_COEFFICIENTS,
    NUM_FRAMES,
    SAMPLE_RATE,
    cepstra,
    need_librosa,
    one_second,
    read_wav,
    versions,
)
from data_tools.decode import RefusedImageError
from data_tools.jobs import add_job_arguments, run_job
from data_tools.shard_tasks import Encoded
from data_tools.sources import FileSource, SourceFile, SourceImage
from megavis.config.errors import UserError
from megavis.data.codecs.frames import FramesCodec

LISTS = {"validation": "validation_list.txt", "test": "testing_list.txt"}
NOISE, UNKNOWN, SILENCE = "_background_noise_", "_unknown_", "_silence_"
_OTHERS = 10
"""Wanted words for one unknown word and one silence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `speech` to its parser."""
    parser.add_argument("source", type=Path, help="a folder of word/*.wav at 16 kHz")
    parser.add_argument(
        "--words",
        default="",
        help="commas between words that are classes of their own; absent: every word is one",
    )
    add_job_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the three folders and say what is in them. Raises UserError and OSError."""
    need_librosa()
    words = tuple(filter(None, arguments.words.split(",")))
    for part, source in sources(arguments.source, words).items():
        job = copy.copy(arguments)
        job.out = arguments.out / part
        code = run_job(source, SpeechEncoder(), job, label=part)
        if code:
            return code
    return 0


def sources(root: Path, words: Sequence[str] = ()) -> dict[str, FileSource]:
    """Return the recordings of each part.

    Args:
        root: a Speech Commands folder.
        words: those that are classes of their own; all when empty.

    Raises:
        UserError: the folder is none, or has not these words.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder of recordings")
    part_of = {name: part for part, file in LISTS.items() for name in _listed(root / file)}
    names = sorted(path.relative_to(root).as_posix() for path in root.glob("*/*.wav"))
    spoken = [name for name in names if not name.startswith(NOISE)]
    there = sorted({name.split("/")[0] for name in spoken})
    missing = [word for word in words if word not in there]
    if missing or not there:
        raise UserError(f"{root} has no recordings of {', '.join(missing) or 'any word'}")
    classes = [*words, UNKNOWN, SILENCE] if words else there
    found = {}
    for part in ("train", *LISTS):
        mine = [name for name in spoken if part_of.get(name, "train") == part]
        files = list(_labelled(root, mine, words, classes))
        if words:
            wanted = sum(file.label < len(words) for file in files)
            noises = [name for name in names if name.startswith(NOISE)]
            files = _share(files, len(words), wanted // _OTHERS)
            files += _silences(root, noises, part, wanted // _OTHERS, label=len(words) + 1)
        description = f"Speech Commands folder {root.name}, {part}"
        found[part] = FileSource.of(
            files, description=description, root=root, classes=classes, extra=part
        )
    return found


def _listed(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        raise UserError(f"{path} is missing: it names the files that are not trained on") from None


def _labelled(
    root: Path, names: Sequence[str], words: Sequence[str], classes: Sequence[str]
) -> Iterator[SourceFile]:
    numbers = {name: number for number, name in enumerate(classes)}
    for name in names:
        word = name.split("/")[0]
        label = numbers[word if word in words or not words else UNKNOWN]
        yield SourceFile(name, label, (root / name).stat().st_size)


def _share(files: Sequence[SourceFile], unknown: int, count: int) -> list[SourceFile]:
    """Keep `count` files of the class `unknown`, by a hash of their names."""
    others = sorted((file for file in files if file.label == unknown), key=lambda f: _hash(f.name))
    return [file for file in files if file.label != unknown] + others[:count]


def _silences(
    root: Path, noises: Sequence[str], part: str, count: int, *, label: int
) -> list[SourceFile]:
    if not noises:
        raise UserError(f"{root / NOISE} holds no recordings, of which --words makes {SILENCE}")
    files = []
    for number in range(count):
        path = noises[number % len(noises)]
        size = (root / path).stat().st_size
        files.append(SourceFile(f"{path}#{part}-{number:05d}", label, size, path))
    return files


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


@dataclass(frozen=True)
class SpeechEncoder:
    """One second of each recording as cepstral coefficients."""

    suffix: str = FramesCodec.suffix
    batch_size: int = 64
    folders: tuple[str, ...] = ("",)

    def settings(self, folder: str) -> dict[str, Any]:
        """Return what decides about the bytes."""
        return {"cepstra": DESCRIPTION, "versions": versions()}

    def prepare(self, directory: Path) -> None:
        """A folder holds nothing besides shards."""

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return the frames of each recording."""
        encoded: list[Encoded] = []
        for recording in pictures:
            try:
                encoded.append([[_payload(recording)]])
            except RefusedImageError as refusal:
                encoded.append(refusal)
        return encoded

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a data set of frames."""
        return {
            "kind": "frames",
            "image_size": None,
            "frame_shape": (NUM_FRAMES, NUM_COEFFICIENTS),
            "preparation": {
                "resize": DESCRIPTION,
                "crop": f"the first second, {SAMPLE_RATE} Hz; of noise any second",
                "decoders": versions(),
            },
        }


def _payload(recording: SourceImage) -> bytes:
    samples = read_wav(recording.content)
    start = 0
    if recording.name.startswith(NOISE):
        start = _hash(recording.name) % max(1, len(samples) - SAMPLE_RATE + 1)
    codec = FramesCodec((NUM_FRAMES, NUM_COEFFICIENTS))
    return codec.encode(cepstra(one_second(samples, start)))
