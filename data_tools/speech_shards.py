"""`speech`: write a Speech Commands folder as three folders of frames: train, validation and test.

`validation_list.txt` and `testing_list.txt` in the folder list the files of the latter two ("Speech
Commands", Warden, 2018). With `--words`, only these words are classes: all others are `_unknown_`,
and seconds of zeros are `_silence_`, each a tenth as many as the recordings of `--words`, as in the
twelve classes of TC-ResNet.

`--variants N` stores N augmented copies of each training recording, as TC-ResNet's released code
("Temporal Convolution for Real-time Keyword Spotting on Mobile Devices", Choi et al., 2019; method
`anchored_slice_or_pad_with_shift`): it is shifted by up to 100 ms with zero padding, and in four of
five a random second of `_background_noise_` is mixed in at a volume of up to 0.1.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

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
from data_tools.shard_tasks import Encoded, encode_each
from data_tools.sources import FileSource, SourceFile, SourceImage
from megavis.config.errors import UserError
from megavis.data.codecs.arrays import FramesCodec

LISTS = {"validation": "validation_list.txt", "test": "testing_list.txt"}
NOISE, UNKNOWN, SILENCE = "_background_noise_", "_unknown_", "_silence_"
_OTHERS = 10
"""Recordings of `--words` per unknown word and per silence."""
VARIANTS = "moved by up to 100 ms, noise of volume up to 0.1 mixed into 80 %"
_LARGEST_SHIFT = SAMPLE_RATE // 10
_SHARE, _LARGEST_VOLUME = 0.8, 0.1
"""Of the noise: share of recordings that it is mixed into, and largest volume."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `speech` to its parser."""
    parser.add_argument("source", type=Path, help="a folder of word/*.wav at 16 kHz")
    parser.add_argument(
        "--words",
        default="",
        help="comma-separated words to use as classes; default: all words",
    )
    parser.add_argument(
        "--variants",
        type=int,
        default=0,
        help="store each training recording N times, shifted by up to 100 ms and mixed with"
        " _background_noise_, as in TC-ResNet; 0 for once, unchanged",
    )
    add_job_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the three folders. Raises UserError and OSError."""
    need_librosa()
    if arguments.variants < 0:
        raise UserError("--variants must be at least 0")
    words = tuple(filter(None, arguments.words.split(",")))
    for part, source in sources(arguments.source, words, variants=arguments.variants).items():
        job = copy.copy(arguments)
        job.out = arguments.out / part
        varies = part == "train" and arguments.variants > 0
        encoder = SpeechEncoder(noise=arguments.source / NOISE if varies else None)
        code = run_job(source, encoder, job, label=part)
        if code:
            return code
    return 0


def sources(root: Path, words: Sequence[str] = (), *, variants: int = 0) -> dict[str, FileSource]:
    """Return the recordings of each part.

    Args:
        root: a Speech Commands folder.
        words: words to use as classes; all if empty.
        variants: copies of a training recording, numbered in their names; 0 for one without number.

    Raises:
        UserError: this is not a folder, or it or one of its parts does not have these words.
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
        wanted = sum(file.label < len(words or classes) for file in files)
        if not wanted:
            raise _nothing_in(root, part, words)
        if words:
            files = _share(files, len(words), wanted // _OTHERS)
            files += _silences(files[0], part, wanted // _OTHERS, label=len(words) + 1)
        if part == "train" and variants:
            if not any(name.startswith(NOISE) for name in names):
                raise UserError(f"{root / NOISE} has no recordings for --variants")
            files = [
                replace(file, name=f"{file.name}#{number}", path=file.path or file.name)
                for file in files
                for number in range(variants)
            ]
        description = f"Speech Commands folder {root.name}, {part}"
        found[part] = FileSource.of(
            files, description=description, root=root, classes=classes, extra=part
        )
    return found


def _nothing_in(root: Path, part: str, words: Sequence[str]) -> UserError:
    what = f"recording of {', '.join(words)}" if words else "recording"
    where = LISTS.get(part)
    advice = f"list some in {where}" if where else f"remove some from {' or '.join(LISTS.values())}"
    return UserError(f"{root} has no {what} for {part}: {advice}")


def _listed(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        raise UserError(f"{path} is missing: it lists the files that are held out") from None


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


def _silences(like: SourceFile, part: str, count: int, *, label: int) -> Iterator[SourceFile]:
    """Yield silences; each refers to a file whose samples are ignored."""
    for number in range(count):
        name, path = f"{SILENCE}/{part}-{number:05d}", like.path or like.name
        yield SourceFile(name, label, like.num_bytes, path)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


@dataclass(frozen=True)
class SpeechEncoder:
    """Encode one second of each recording as cepstral coefficients.

    Attributes:
        noise: folder of noise to mix in; None for unchanged recordings.
    """

    noise: Path | None = None
    suffix: str = FramesCodec.suffix
    batch_size: int = 64
    folders: tuple[str, ...] = ("",)

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        varied = {} if self.noise is None else {"variants": VARIANTS}
        return {"cepstra": DESCRIPTION, "versions": versions(), **varied}

    def prepare(self, directory: Path) -> None:
        """No further files are needed."""

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return the frames of each recording."""
        return encode_each(pictures, lambda recording: [[self._payload(recording)]])

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a data set of frames."""
        varied = "" if self.noise is None else f"; {VARIANTS}"
        return {
            "kind": "frames",
            "image_size": None,
            "frame_shape": (NUM_FRAMES, NUM_COEFFICIENTS),
            "preparation": {
                "resize": DESCRIPTION,
                "crop": f"the first second, {SAMPLE_RATE} Hz{varied}",
                "decoders": versions(),
            },
        }

    def _payload(self, recording: SourceImage) -> bytes:
        is_silent = recording.name.startswith(SILENCE)
        samples = np.zeros(0, np.float32) if is_silent else read_wav(recording.content)
        second = one_second(samples)
        if self.noise is not None:
            random = np.random.default_rng(_hash(recording.name))
            second = vary(second, read_noises(self.noise), random)
        return FramesCodec((NUM_FRAMES, NUM_COEFFICIENTS)).encode(cepstra(second))


@functools.lru_cache(maxsize=1)
def read_noises(folder: Path) -> Sequence[np.ndarray]:
    """Read the recordings of a folder that last a second or more, float32 `[n]` in [-1, 1].

    Raises:
        UserError: there is none.
    """
    noises = []
    for path in sorted(folder.glob("*.wav")):
        try:
            noises.append(read_wav(path.read_bytes()))
        except RefusedImageError as refusal:
            raise UserError(f"{path}: {refusal}") from None
    long = [noise for noise in noises if len(noise) >= SAMPLE_RATE]
    if not long:
        raise UserError(f"{folder} has no recording of a second or more to mix in")
    return long


def vary(
    second: np.ndarray, noises: Sequence[np.ndarray], random: np.random.Generator
) -> np.ndarray:
    """Augment one second `[16000]` by a shift and noise.

    Args:
        second: float32 `[16000]` in [-1, 1].
        noises: each of a second or more.
        random: draws the shift, and choice, position and volume of the noise.
    """
    moved = move(second, int(random.integers(-_LARGEST_SHIFT, _LARGEST_SHIFT)))
    noise = noises[int(random.integers(len(noises)))]
    start = int(random.integers(0, len(noise) - SAMPLE_RATE, endpoint=True))
    volume = random.uniform(0.0, _LARGEST_VOLUME) if random.random() < _SHARE else 0.0
    mixed = moved + volume * noise[start : start + SAMPLE_RATE]
    return mixed.clip(-1.0, 1.0).astype(np.float32)


def move(second: np.ndarray, shift: int) -> np.ndarray:
    """Shift samples `[n]` with zero padding, to the right if `shift` is positive."""
    moved = np.zeros_like(second)
    if shift >= 0:
        moved[shift:] = second[: len(second) - shift]
    else:
        moved[:shift] = second[-shift:]
    return moved
