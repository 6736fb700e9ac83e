"""`speech`: recordings of Speech Commands as shards.

It writes a Speech Commands folder as folders of recordings: train, validation, test.
`validation_list.txt` and `testing_list.txt` in the folder list the files of the latter two ("Speech
Commands", Warden, 2018). With `--words`, only these words are classes: all others are `_unknown_`,
and seconds of zeros are `_silence_`, each a tenth as many as the recordings of `--words`, rounded
up, as in the twelve classes of TC-ResNet. A hash of their names selects the recordings of other
words; `--split-lists` uses TC-ResNet's lists. Recordings of `_background_noise_` that
last a second or more are written to `background_noise.npz`, which training mixes into recordings
(`data.background_noise`).
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import io
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from data_tools.decode import RefusedImageError
from data_tools.job_report import say
from data_tools.jobs import add_job_arguments, run_job
from data_tools.shard_tasks import Encoded, ShardEncoder, encode_each
from data_tools.sources import FileSource, SourceFile, SourceImage, file_of, printable
from data_tools.user_text import numbered_lines
from megavis.config.errors import UserError, counted
from megavis.data.codecs.sound import HOP, SAMPLE_RATE, RecordingsCodec, write_noises
from megavis.data.format.folders import find_files, walk_files
from megavis.data.format.manifest import SUFFIXES

LISTS = {"validation": "validation_list.txt", "test": "testing_list.txt"}
_SPLIT_LISTS = {"train": "train.txt", "validation": "valid.txt", "test": "test.txt"}
NOISE, UNKNOWN, SILENCE = "_background_noise_", "_unknown_", "_silence_"
_WAV = ".wav"
# What scipy says of chunks that other programs add, all of which it skips.
_OF_METADATA = (r"Chunk \(non-data\) not understood", "Incomplete chunk ID")
_OTHERS = 10
"""Recordings of `--words` per unknown word and per silence."""


def num_others(wanted: int) -> int:
    """Return the number of recordings of unknown words, and of silences, for `wanted` recordings.

    Rounded up, as in TensorFlow's script, whose lists TC-ResNet publishes: 1,854 for 18,538.
    """
    return math.ceil(wanted / _OTHERS)


NOISE_FILE = "background_noise.npz"
_FRAME_SHAPE = (SAMPLE_RATE // HOP, 40)
"""Frames of a second, and coefficients per frame."""


def add_speech_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `speech` to its parser."""
    parser.add_argument("source", type=Path, help="a folder of word/*.wav")
    parser.add_argument(
        "--words",
        type=words_of,
        default="",
        help="comma-separated words to use as classes; default: all words",
    )
    parser.add_argument(
        "--split-lists",
        type=Path,
        metavar="FOLDER",
        help="with --words: take the parts from train.txt, valid.txt and test.txt in this folder,"
        " as TC-ResNet publishes them; default: validation_list.txt and testing_list.txt in source",
    )
    parser.add_argument(
        "--resample",
        action="store_true",
        help="convert recordings of other rates to 16 kHz; default: reject them",
    )
    add_job_arguments(parser)


def words_of(text: str) -> tuple[str, ...]:
    """Parse comma-separated words; each counts once."""
    return tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def run_speech(arguments: argparse.Namespace) -> int:
    """Write the three folders and the file of noises. Raises UserError and OSError."""
    words: tuple[str, ...] = arguments.words
    noises = read_noises(arguments.source / NOISE, resample=arguments.resample)
    for part, source in sources(arguments.source, words, arguments.split_lists).items():
        say(_counts(part, source, words))
        job = copy.copy(arguments)
        job.out = arguments.out / part
        code = run_job(source, SpeechEncoder(resample=arguments.resample), job, label=part)
        if code:
            return code
    if noises:
        write_noises(arguments.out / NOISE_FILE, noises)
        say(f"{arguments.out / NOISE_FILE}: {len(noises)} noises")
    return 0


def _counts(part: str, source: FileSource, words: Sequence[str]) -> str:
    """Return a line on the number of recordings of a part."""
    if not words:
        spoken = {file.label for file in source.files}
        many = counted(len(source.files), "recording")
        return f"{part}: {many} of {counted(len(spoken), 'word')}"
    labels = [min(file.label - len(words), 1) for file in source.files]
    unknown, silent = labels.count(0), labels.count(1)
    wanted = len(labels) - unknown - silent
    return (
        f"{part}: {wanted} of {', '.join(words)}, {unknown} of other words, {silent} silences,"
        f" {len(labels)} in all"
    )


def sources(
    root: Path, words: Sequence[str] = (), split_lists: Path | None = None
) -> dict[str, FileSource]:
    """Return the recordings of each part of a Speech Commands folder.

    Without `words`, all of them are classes. `split_lists` is a folder of TC-ResNet's lists.

    Raises:
        UserError: `root` is not a folder, it or one of its parts lacks these words, or a list is
            unsuitable.
    """
    if split_lists is not None and not words:
        raise UserError("--split-lists needs --words: the lists are of wanted and other words")
    if not root.is_dir():
        raise UserError(f"{root} is not a folder of recordings")
    spoken = _recordings(root)
    lists = {} if split_lists else LISTS
    part_of = {name: part for part, file in lists.items() for name in _listed(root / file, spoken)}
    there = sorted({name.split("/")[0] for name in spoken})
    missing = [word for word in words if word not in there]
    if missing or not there:
        raise UserError(f"{root} has no recordings of {', '.join(missing) or 'any word'}")
    classes = [*words, UNKNOWN, SILENCE] if words else there
    listed = read_split_lists(split_lists, spoken, words) if split_lists else {}
    found = {}
    for part in ("train", *LISTS):
        mine: Sequence[str] = [name for name in spoken if part_of.get(name, "train") == part]
        if listed:
            mine = listed[part].names
        files = list(_labelled([spoken[name] for name in mine], words, classes))
        wanted = sum(file.label < len(words or classes) for file in files)
        if not wanted:
            raise _nothing_in(root, part, words)
        if words:
            silent = listed[part].num_silences if listed else num_others(wanted)
            if not listed:
                files = _share(files, len(words), num_others(wanted))
            like = next((file for file in files if not file.refused), files[0])
            files += _silences(like, part, silent, label=len(words) + 1)
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


def _recordings(root: Path) -> dict[str, SourceFile]:
    """Return the recordings `word/name.wav` of a folder by name, without the noises.

    Prints how many other files there are.
    """
    raw: list[str] = []
    others: list[str] = []
    for path in walk_files(root):
        is_sound = path.lower().endswith(_WAV)
        if path.startswith(NOISE) or not (is_sound or "/" in path):
            continue  # noises are read separately; files outside word folders are lists
        (raw if is_sound and path.count("/") == 1 else others).append(path)
    if others:
        many, example = counted(len(others), "file"), printable(min(others))
        say(f"{root}: {many} not read, such as {example}: only word/name{_WAV} are")
    files = [file_of(root, path) for path in raw]
    return {file.name: file for file in sorted(files, key=lambda file: file.name)}


def _listed(path: Path, recordings: Collection[str]) -> list[str]:
    """Return the names in a list; print how many have no recording.

    Raises UserError if it has names, but none of a recording.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing: it lists the files that are held out")
    lines = numbered_lines(path)
    absent = [(number, name) for number, name in lines if name not in recordings]
    if recordings and lines and len(absent) == len(lines):
        number, name = lines[0]
        raise UserError(
            f"{path} line {number}: {name!r} is not the name of a recording, such as"
            f" {next(iter(recordings))}; neither is any other line"
        )
    if absent:
        names = counted(len(absent), "name")
        say(f"{path} lists {names} of no recording, such as {absent[0][1]}")
    return [name for _, name in lines]


def _labelled(
    files: Sequence[SourceFile], words: Sequence[str], classes: Sequence[str]
) -> Iterator[SourceFile]:
    numbers = {name: number for number, name in enumerate(classes)}
    for file in files:
        word = file.name.split("/")[0]
        yield replace(file, label=numbers[word if word in words or not words else UNKNOWN])


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
    """Read the lists of all parts, as TC-ResNet's repository has them.

    `speech_commands_dataset/{train,valid,test}.txt` ("Temporal Convolution for Real-time Keyword
    Spotting on Mobile Devices", Choi et al., 2019) have a line `word/file.wav` for each recording,
    and 1,854, 258 and 257 lines of `_silence_`. TensorFlow's own script, which made them, chooses
    the unknown words by the order in which a folder lists its files, so no rule gives the same.

    Args:
        folder: folder of the three lists.
        recordings: names of the existing recordings.
        words: wanted words; each part must have a recording of one.

    Raises:
        UserError: a list is missing, or names a recording that does not exist or is listed twice.
    """
    found, seen, there = {}, set[str](), set(recordings)
    for part, file in _SPLIT_LISTS.items():
        names, num_silences = [], 0
        for number, name in _listed_names(folder / file):
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


def _listed_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and the last two parts of the path on each line."""
    if not path.is_file():
        raise UserError(
            f"{path} is missing: --split-lists needs {', '.join(_SPLIT_LISTS.values())}, as in"
            " speech_commands_dataset of TC-ResNet's repository"
        )
    for number, line in numbered_lines(path):
        yield number, "/".join(PurePosixPath(line).parts[-2:])


@dataclass(frozen=True)
class SpeechEncoder(ShardEncoder):
    """Store one second of each recording.

    Attributes:
        resample: convert recordings of other rates instead of rejecting them.
    """

    suffix: str = SUFFIXES["recordings"]
    batch_size: int = 64
    resample: bool = False

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        resampled = {"resample": True} if self.resample else {}
        return {"sample_rate": SAMPLE_RATE, "frame_shape": _FRAME_SHAPE, **resampled}

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return the samples of each recording."""
        return encode_each(pictures, lambda each: [[_payload(each, resample=self.resample)]])

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a data set of recordings."""
        return {
            "kind": "recordings",
            "image_size": None,
            "frame_shape": _FRAME_SHAPE,
            "preparation": {
                "resize": f"to {SAMPLE_RATE} Hz" if self.resample else "none",
                "crop": f"the first second, {SAMPLE_RATE} Hz",
                "decoders": {"scipy": version("scipy")},
            },
        }


def _payload(recording: SourceImage, *, resample: bool) -> bytes:
    if recording.name.startswith(SILENCE):
        samples = np.zeros(0, np.int16)
    else:
        samples = read_wav(recording.content, resample=resample)
    return RecordingsCodec(_FRAME_SHAPE).encode(one_second(samples))


def read_noises(folder: Path, *, resample: bool = False) -> list[np.ndarray]:
    """Read the recordings of a folder that last a second or more, int16 `[t]`, sorted by name.

    A folder that does not exist has none. Raises UserError if it cannot be listed or read.
    """
    noises: list[np.ndarray] = []
    if not folder.exists():
        return noises
    for path in find_files(folder, "*.[wW][aA][vV]"):
        try:
            noises.append(read_wav(path.read_bytes(), resample=resample))
        except RefusedImageError as refusal:
            raise UserError(f"{path}: {refusal}") from None
    return [noise for noise in noises if len(noise) >= SAMPLE_RATE]


def read_wav(content: bytes, *, resample: bool = False) -> np.ndarray:
    """Read the samples of a mono WAV file, at 16 kHz, int16 `[t]`.

    Args:
        content: content of the file.
        resample: convert another rate by a polyphase filter.

    Raises:
        RefusedImageError: the file is damaged, has several channels, does not have 16 bits, or,
            without `resample`, has another rate.
    """
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", wavfile.WavFileWarning)  # truncated files
            for text in _OF_METADATA:
                warnings.filterwarnings("ignore", text, wavfile.WavFileWarning)
            rate, samples = wavfile.read(io.BytesIO(content))
    except MemoryError:  # says nothing about the file
        raise
    except Exception:
        # The reader raises almost any exception on damaged bytes: struct.error, ValueError, ...
        raise RefusedImageError("no WAV file, or a damaged one") from None
    if rate != SAMPLE_RATE and not resample:
        raise RefusedImageError(f"{rate} Hz, not {SAMPLE_RATE} (see --resample)")
    if samples.ndim != 1 or samples.dtype != np.int16:
        raise RefusedImageError("not one channel of 16 bits")
    return samples if rate == SAMPLE_RATE else _resampled(samples, rate)


def _resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    from scipy.signal import resample_poly

    divisor = math.gcd(rate, SAMPLE_RATE)
    found = resample_poly(samples.astype(float), SAMPLE_RATE // divisor, rate // divisor)
    limits = np.iinfo(np.int16)
    return np.round(found).clip(limits.min, limits.max).astype(np.int16)


def one_second(samples: np.ndarray) -> np.ndarray:
    """Return the first second, int16 `[16000]`, padded with silence."""
    first = samples[:SAMPLE_RATE]
    return np.pad(first, (0, SAMPLE_RATE - len(first)))
