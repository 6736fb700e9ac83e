"""`words`: synthesized words in a folder like Speech Commands.

espeak-ng has about a hundred voices; some are held out, and the two lists have their recordings, so
that a model is evaluated on unseen voices. Accent, speed, pitch, position in the second and noise
level differ between recordings.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.job_report import ProgressBar, say
from data_tools.made_folder import make_folder
from data_tools.speech import LISTS, words_of
from megavis.config.arguments import non_negative, positive
from megavis.config.errors import UserError
from megavis.data.codecs.sound import SAMPLE_RATE

RECORD_NAME = "words.json"
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-029", "en-gb-x-rp", "en-gb-x-gbcwmd")
_RATE, _PITCH = 1, 3  # espeak's parameter numbers
_SYNCHRONOUS, _UTF8 = 2, 1
_SPEEDS, _PITCHES, _DECIBELS = (120, 220), (30, 71), (5.0, 30.0)


def add_words_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `words` to its parser."""
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--words", type=words_of, default=",".join(WORDS), help="comma-separated")
    parser.add_argument("--voices", type=positive, default=60, help="training voices")
    parser.add_argument(
        "--held-out-voices", type=positive, default=15, help="other voices, for validation and test"
    )
    parser.add_argument("--takes", type=positive, default=4, help="recordings per word and voice")
    parser.add_argument(
        "--seed", type=non_negative, default=0, help="seed of voices, accents, speeds and noise"
    )


def run_words(arguments: argparse.Namespace) -> int:
    """Write the recordings, unless the folder has the same ones already. Raises UserError."""
    counts = {"train": arguments.voices, **dict.fromkeys(LISTS, arguments.held_out_voices)}
    words: tuple[str, ...] = arguments.words
    if not words:
        raise UserError("--words names no word")
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
            speed: speed in words per minute.
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
