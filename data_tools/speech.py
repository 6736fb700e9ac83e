"""`speech` and `words`: recordings of Speech Commands as shards, and synthesized words like them.

`speech` writes a Speech Commands folder as folders of recordings: train, validation, test.
`validation_list.txt` and `testing_list.txt` in the folder list the files of the latter two ("Speech
Commands", Warden, 2018). With `--words`, only these words are classes: all others are `_unknown_`,
and seconds of zeros are `_silence_`, each a tenth as many as the recordings of `--words`, as in the
twelve classes of TC-ResNet. Recordings of `_background_noise_` that last a second or more are
written to `background_noise.npz`, which training mixes into recordings (`data.background_noise`).

`words` writes such a folder. espeak-ng has about a hundred voices; some are held out, and the two
lists have their recordings, so that a model is evaluated on unseen voices. Accent, speed, pitch,
position in the second and noise level differ between recordings.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import hashlib
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.decode import RefusedImageError
from data_tools.job_report import ProgressBar, say
from data_tools.jobs import add_job_arguments, run_job
from data_tools.made_folder import make_folder
from data_tools.shard_tasks import Encoded, ShardEncoder, encode_each
from data_tools.sources import FileSource, SourceFile, SourceImage
from data_tools.user_text import numbered_lines
from megavis.config.errors import UserError
from megavis.data.codecs.codec import RecordingsCodec
from megavis.data.codecs.sound import HOP, SAMPLE_RATE, write_noises
from megavis.data.format.folders import walk_files

LISTS = {"validation": "validation_list.txt", "test": "testing_list.txt"}
NOISE, UNKNOWN, SILENCE = "_background_noise_", "_unknown_", "_silence_"
_OTHERS = 10
"""Recordings of `--words` per unknown word and per silence."""
NOISE_FILE = "background_noise.npz"
_FRAME_SHAPE = (SAMPLE_RATE // HOP, 40)
"""Frames of a second, and coefficients per frame."""


def add_speech_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `speech` to its parser."""
    parser.add_argument("source", type=Path, help="a folder of word/*.wav at 16 kHz")
    parser.add_argument(
        "--words", default="", help="comma-separated words to use as classes; default: all words"
    )
    add_job_arguments(parser)


def run_speech(arguments: argparse.Namespace) -> int:
    """Write the three folders and the file of noises. Raises UserError and OSError."""
    words = tuple(filter(None, arguments.words.split(",")))
    noises = read_noises(arguments.source / NOISE)
    for part, source in sources(arguments.source, words).items():
        job = copy.copy(arguments)
        job.out = arguments.out / part
        code = run_job(source, SpeechEncoder(), job, label=part)
        if code:
            return code
    if noises:
        write_noises(arguments.out / NOISE_FILE, noises)
        say(f"{arguments.out / NOISE_FILE}: {len(noises)} noises")
    return 0


def sources(root: Path, words: Sequence[str] = ()) -> dict[str, FileSource]:
    """Return the recordings of each part of a Speech Commands folder.

    Without `words`, all of them are classes. Raises UserError if this is not a folder, or it or one
    of its parts does not have these words.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder of recordings")
    names = sorted(name for name in walk_files(root) if re.fullmatch(r"[^/]+/[^/]+\.wav", name))
    part_of = {name: part for part, file in LISTS.items() for name in _listed(root / file, names)}
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


def _listed(path: Path, names: Sequence[str]) -> list[str]:
    """Return the names in a list. Raises UserError if there are some, but none of a recording."""
    if not path.is_file():
        raise UserError(f"{path} is missing: it lists the files that are held out")
    lines = numbered_lines(path)
    if names and lines and not {name for _, name in lines} & set(names):
        number, name = lines[0]
        raise UserError(
            f"{path} line {number}: {name!r} is not the name of a recording, such as {names[0]};"
            " neither is any other line"
        )
    return [name for _, name in lines]


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
class SpeechEncoder(ShardEncoder):
    """Store one second of each recording."""

    suffix: str = RecordingsCodec.suffix
    batch_size: int = 64

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the bytes."""
        return {"sample_rate": SAMPLE_RATE, "frame_shape": _FRAME_SHAPE}

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return the samples of each recording."""
        return encode_each(pictures, lambda recording: [[_payload(recording)]])

    def describe(self, folder: str) -> dict[str, Any]:
        """Return the manifest's fields of a data set of recordings."""
        return {
            "kind": "recordings",
            "image_size": None,
            "frame_shape": _FRAME_SHAPE,
            "preparation": {
                "resize": "none",
                "crop": f"the first second, {SAMPLE_RATE} Hz",
                "decoders": {"scipy": version("scipy")},
            },
        }


def _payload(recording: SourceImage) -> bytes:
    is_silent = recording.name.startswith(SILENCE)
    samples = np.zeros(0, np.int16) if is_silent else read_wav(recording.content)
    return RecordingsCodec(_FRAME_SHAPE).encode(one_second(samples))


def read_noises(folder: Path) -> list[np.ndarray]:
    """Read the recordings of a folder that last a second or more, int16 `[t]`, sorted by name."""
    noises = []
    for path in sorted(folder.glob("*.wav")):
        try:
            noises.append(read_wav(path.read_bytes()))
        except RefusedImageError as refusal:
            raise UserError(f"{path}: {refusal}") from None
    return [noise for noise in noises if len(noise) >= SAMPLE_RATE]


def read_wav(content: bytes) -> np.ndarray:
    """Read the samples of a mono WAV file of 16 kHz, int16 `[t]`; raises RefusedImageError."""
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", wavfile.WavFileWarning)  # truncated files
            rate, samples = wavfile.read(io.BytesIO(content))
    except Exception:
        # The reader raises almost any exception on damaged bytes: struct.error, ValueError, ...
        raise RefusedImageError("no WAV file, or a damaged one") from None
    if rate != SAMPLE_RATE:
        raise RefusedImageError(f"{rate} Hz, not {SAMPLE_RATE}")
    if samples.ndim != 1 or samples.dtype != np.int16:
        raise RefusedImageError("not one channel of 16 bits")
    return samples


def one_second(samples: np.ndarray) -> np.ndarray:
    """Return the first second, int16 `[16000]`, padded with silence."""
    first = samples[:SAMPLE_RATE]
    return np.pad(first, (0, SAMPLE_RATE - len(first)))


RECORD_NAME = "words.json"
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-029", "en-gb-x-rp", "en-gb-x-gbcwmd")
_RATE, _PITCH = 1, 3  # espeak's parameter numbers
_SYNCHRONOUS, _UTF8 = 2, 1
_SPEEDS, _PITCHES, _DECIBELS = (120, 220), (30, 71), (5.0, 30.0)


def add_words_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `words` to its parser."""
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--words", default=",".join(WORDS), help="comma-separated")
    parser.add_argument("--voices", type=int, default=60, help="training voices")
    parser.add_argument(
        "--held-out-voices", type=int, default=15, help="other voices, for validation and test"
    )
    parser.add_argument("--takes", type=int, default=4, help="recordings per word and voice")
    parser.add_argument("--seed", type=int, default=0, help="of voices, accents, speeds and noise")


def run_words(arguments: argparse.Namespace) -> int:
    """Write the recordings, unless the folder has the same ones already. Raises UserError."""
    counts = {"train": arguments.voices, **dict.fromkeys(LISTS, arguments.held_out_voices)}
    if min(*counts.values(), arguments.takes) < 1 or arguments.seed < 0:
        raise UserError(
            "--voices, --held-out-voices and --takes must be at least 1, --seed at least 0"
        )
    words = tuple(filter(None, arguments.words.split(",")))
    takes, seed = arguments.takes, arguments.seed
    record = {"words": words, "voices": counts, "takes": takes, "seed": seed}
    num_voices = sum(counts.values())
    total = num_voices * len(words) * takes

    def write(folder: Path) -> None:
        synthesizer = Synthesizer()
        voices = drawn_voices(synthesizer.voices(), counts, seed=seed)
        with ProgressBar("speaking", total=total, unit="words") as progress:
            for part, names in voices.items():
                files = []
                for voice in names:
                    files += speak(synthesizer, voice, words, takes=takes, out=folder, seed=seed)
                    progress.advance(len(words) * takes)
                if part in LISTS:
                    (folder / LISTS[part]).write_text("\n".join(files) + "\n")

    out: Path = arguments.out
    if not make_folder(out, RECORD_NAME, record, write):
        say(f"{out}: the words exist already")
        return 0
    say(f"{out}: {total} recordings of {len(words)} words by {num_voices} voices")
    return 0


def drawn_voices(
    voices: Sequence[str], counts: dict[str, int], *, seed: int
) -> dict[str, list[str]]:
    """Assign voices to parts at random. Raises UserError if there are too few."""
    if sum(counts.values()) > len(voices):
        raise UserError(
            f"espeak-ng has {len(voices)} voices; --voices and twice --held-out-voices are"
            f" {sum(counts.values())}"
        )
    order = iter(np.random.default_rng(seed).permutation(sorted(voices)).tolist())
    return {part: [next(order) for _ in range(count)] for part, count in counts.items()}


def speak(
    synthesizer: Synthesizer, voice: str, words: Sequence[str], *, takes: int, out: Path, seed: int
) -> list[str]:
    """Write recordings of one voice; return their names below `out`, in Speech Commands' format.

    Differences between takes depend only on the seed and the recording's name.
    """
    from scipy.io import wavfile

    speaker = "".join(letter for letter in voice if letter.isalnum())
    names = []
    for word in words:
        (out / word).mkdir(parents=True, exist_ok=True)
        for take in range(takes):
            name = f"{word}/{speaker}_nohash_{take}.wav"
            random = np.random.default_rng([seed, *name.encode()])
            accent = ACCENTS[int(random.integers(len(ACCENTS)))]
            speed, pitch = int(random.integers(*_SPEEDS)), int(random.integers(*_PITCHES))
            spoken = synthesizer.say(word, f"{accent}+{voice}", speed=speed, pitch=pitch)
            wavfile.write(out / name, SAMPLE_RATE, recorded(spoken, random))
            names.append(name)
    return names


def recorded(spoken: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Place speech float `[t]` at a random position in a second of white noise: int16 `[16000]`.

    The speech is 5 to 30 decibels louder than the noise.
    """
    spoken = spoken[:SAMPLE_RATE]
    start = int(random.integers(0, SAMPLE_RATE - len(spoken) + 1))
    loudness = np.sqrt(np.mean(spoken**2))
    noise = loudness * 10.0 ** (-random.uniform(*_DECIBELS) / 20.0)
    second = noise * random.standard_normal(SAMPLE_RATE)
    second[start : start + len(spoken)] += spoken
    # Half the range, since noise is unbounded and clipped.
    level = 0.5 * 32767.0 / np.abs(spoken).max()
    return (level * second).round().clip(-32768, 32767).astype(np.int16)


class Synthesizer:
    """espeak-ng, from `espeakng-loader`; raises UserError if that is not installed."""

    def __init__(self) -> None:
        try:
            import espeakng_loader
        except ImportError:
            raise UserError("words needs espeak-ng: pip install 'megavis[speech]'") from None
        self._data = Path(espeakng_loader.get_data_path())
        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, bytes(self._data), 0)
        self._pieces: list[np.ndarray] = []
        types = (ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        # Keep a reference: the library calls it after this function has returned.
        self._callback = ctypes.CFUNCTYPE(*types)(self._keep)
        self._library.espeak_SetSynthCallback(self._callback)

    def voices(self) -> list[str]:
        """Return the names of the voices; each can speak with any accent."""
        return sorted(path.name for path in (self._data / "voices" / "!v").iterdir())

    def say(self, text: str, voice: str, *, speed: int, pitch: int) -> np.ndarray:
        """Synthesize speech, float64 `[t]` at 16 kHz, without surrounding silence.

        Args:
            text: text to speak.
            voice: accent and voice, for example `en-us+f3`.
            speed: in words per minute.
            pitch: 0 to 99.
        """
        from scipy.signal import resample_poly

        self._pieces.clear()
        self._library.espeak_SetVoiceByName(voice.encode())
        self._library.espeak_SetParameter(_RATE, speed, 0)
        self._library.espeak_SetParameter(_PITCH, pitch, 0)
        content = text.encode()
        self._library.espeak_Synth(content, len(content) + 1, 0, 0, 0, _UTF8, None, None)
        self._library.espeak_Synchronize()
        spoken = np.concatenate([*self._pieces, np.zeros(0)])
        loud = np.flatnonzero(np.abs(spoken) > 0.01 * np.abs(spoken).max(initial=1.0))
        if not len(loud):
            raise UserError(f"espeak-ng produces no sound for {text!r} with the voice {voice}")
        return resample_poly(spoken[loud[0] : loud[-1] + 1], SAMPLE_RATE, self._rate)

    def _keep(self, samples: Any, count: int, _: object) -> int:
        if count > 0:
            self._pieces.append(np.ctypeslib.as_array(samples, (count,)).astype(np.float64))
        return 0
