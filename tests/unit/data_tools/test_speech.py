"""Speech: cepstral coefficients against formulas, synthesised words, splits of a folder."""

import io
import json
import math

import numpy as np
import pytest
from scipy.io import wavfile

from data_tools import spoken_words
from data_tools.__main__ import main
from data_tools.cepstra import cepstra, one_second, read_wav
from data_tools.decode import RefusedImageError
from data_tools.speech_shards import vary
from megavis.data.loading.dataset import ShardDataset

pytestmark = pytest.mark.once

RANDOM = np.random.default_rng(0)


def to_mel(hertz):
    return 2595.0 * math.log10(1.0 + hertz / 700.0)


def to_hertz(mel):
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)


def coefficients_by_the_formulas(samples, frame):
    """Compute Hann window, FFT, triangular mel filters, logarithm and DCT in plain loops."""
    middle = 160 * frame + 80
    window = np.zeros(512)
    for i in range(480):
        place = middle - 240 + i
        value = samples[place] if 0 <= place < len(samples) else 0.0
        window[16 + i] = value * (0.5 - 0.5 * math.cos(2.0 * math.pi * i / 480))
    power = np.abs(np.fft.rfft(window)) ** 2
    low, high = to_mel(80.0), to_mel(7600.0)
    edges = [to_hertz(low + (high - low) * i / 65) for i in range(66)]
    logarithms = []
    for left, peak, right in zip(edges, edges[1:], edges[2:], strict=False):
        energy = 0.0
        for number, value in enumerate(power):
            hertz = number * 16_000 / 512
            rise, fall = (hertz - left) / (peak - left), (right - hertz) / (right - peak)
            energy += max(0.0, min(rise, fall)) * value
        logarithms.append(math.log(energy + 1e-6))
    return [
        math.sqrt((1.0 if k == 0 else 2.0) / 64)
        * sum(x * math.cos(math.pi * k * (i + 0.5) / 64) for i, x in enumerate(logarithms))
        for k in range(40)
    ]


def test_cepstra_match_formulas():
    samples = (0.1 * RANDOM.standard_normal(16_000)).astype(np.float32)
    found = cepstra(samples)
    assert found.shape == (100, 40)
    for frame in (0, 1, 50, 99):
        expected = coefficients_by_the_formulas(samples, frame)
        np.testing.assert_allclose(found[frame], expected, rtol=1e-3, atol=1e-3)


def wav(samples, rate=16_000):
    file = io.BytesIO()
    wavfile.write(file, rate, samples)
    return file.getvalue()


def test_read_wav():
    samples = RANDOM.integers(-32768, 32767, 20_000).astype(np.int16)
    read = read_wav(wav(samples))
    assert np.array_equal(read, samples / np.float32(32768))
    assert np.array_equal(one_second(read), read[:16_000])
    assert one_second(read[:10]).tolist() == [*read[:10].tolist(), *[0.0] * 15_990]
    for content, reason in (
        (b"", "no WAV file"),
        (wav(samples)[:300], "no WAV file"),
        (wav(samples, 8_000), "8000 Hz, not 16000"),
        (wav(samples.reshape(-1, 2)), "not one channel of 16 bits"),
    ):
        with pytest.raises(RefusedImageError, match=reason):
            read_wav(content)


def test_splits_share_no_voice(tmp_path):
    words, out = tmp_path / "words", tmp_path / "shards"
    options = ["--words", "yes,stop", "--voices", "2", "--held-out-voices", "1", "--takes", "2"]
    assert main(["words", str(words), *options]) == 0
    assert main(["words", str(words), *options]) == 0  # already finished
    assert main(["words", str(words), *options, "--seed", "1"]) == 2
    assert main(["speech", str(words), "--out", str(out)]) == 0
    voices = {}
    for part, voice_count in (("train", 2), ("validation", 1), ("test", 1)):
        dataset = ShardDataset(out / part)
        assert dataset.class_names == ("stop", "yes")
        assert len(dataset) == 4 * voice_count
        assert np.bincount(dataset.labels).tolist() == [2 * voice_count] * 2
        frames, _ = dataset.read(np.arange(len(dataset)))
        assert frames.shape == (len(dataset), 100, 40)
        # No coefficient is constant over time.
        assert frames.astype(np.float32).std(1).min() > 0
        names = json.loads((out / part / "shard-000000.index.json").read_text())["sources"]
        voices[part] = {name.split("/")[1].split("_")[0] for name in names}
    assert sum(map(len, voices.values())) == len(set.union(*voices.values())) == 4


class Humming:
    """A synthesizer, which is interrupted after some words."""

    num_words = 0

    def voices(self):
        return [f"voice {number}" for number in range(4)]

    def say(self, *_, **__):
        Humming.num_words -= 1
        if not Humming.num_words:
            raise KeyboardInterrupt
        return np.sin(np.arange(4000) / 9)


def test_interrupted_words_can_be_made_again(tmp_path, monkeypatch):
    # espeak-ng cannot be initialized twice in a process.
    monkeypatch.setattr(spoken_words, "Synthesizer", Humming)
    monkeypatch.setattr(Humming, "num_words", 6)
    out = tmp_path / "words"
    command = ["words", str(out), "--words", "no", "--voices", "2", "--held-out-voices", "1"]
    assert main(command) == 130
    assert not out.exists()
    assert main(command) == 0
    assert len(list(out.glob("no/*.wav"))) == 4 * 4
    assert [path.name for path in tmp_path.iterdir()] == ["words"]


def test_unknown_and_silence_classes(tmp_path):
    folder = tmp_path / "commands"
    for word, count in (("yes", 15), ("no", 15), ("cat", 9), ("dog", 9)):
        (folder / word).mkdir(parents=True)
        for number in range(count):
            samples = RANDOM.integers(-900, 900, 16_000).astype(np.int16)
            (folder / word / f"{number}.wav").write_bytes(wav(samples))
    (folder / "_background_noise_").mkdir()
    hum = RANDOM.integers(-90, 90, 40_000).astype(np.int16)
    (folder / "_background_noise_" / "hum.wav").write_bytes(wav(hum))
    command = ["speech", str(folder), "--out", str(tmp_path / "out"), "--words", "yes,no"]
    assert main(command) == 2  # validation_list.txt and testing_list.txt are missing
    (folder / "validation_list.txt").write_text("yes/0.wav\nno/3.wav\ncat/1.wav\n")
    (folder / "testing_list.txt").write_text("\n".join(f"yes/{n}.wav" for n in range(1, 11)))
    assert main([*command[:-1], "yes,maybe"]) == 2
    assert main(command) == 0
    counts = {}
    for part in ("train", "validation", "test"):
        dataset = ShardDataset(tmp_path / "out" / part)
        assert dataset.class_names == ("yes", "no", "_unknown_", "_silence_")
        counts[part] = np.bincount(dataset.labels, minlength=4).tolist()
    assert counts == {"train": [4, 14, 1, 1], "validation": [1, 1, 0, 0], "test": [10, 0, 0, 1]}
    test = ShardDataset(tmp_path / "out" / "test")
    silence = test.read(np.flatnonzero(test.labels == 3))[0][0]
    np.testing.assert_array_equal(silence, cepstra(np.zeros(16_000, np.float32)).astype("<f2"))
    assert main([*command[:3], str(tmp_path / "varied"), *command[4:], "--variants", "3"]) == 0
    varied = ShardDataset(tmp_path / "varied" / "train")
    assert np.bincount(varied.labels).tolist() == [12, 42, 3, 3]
    frames, _ = varied.read(np.flatnonzero(varied.labels == 3))
    assert not (frames == silence).all((1, 2)).all()  # silence has noise in training
    again = ShardDataset(tmp_path / "varied" / "test")
    assert (again.read(np.arange(11))[0] == test.read(np.arange(11))[0]).all()


@pytest.mark.parametrize(
    ("held_out", "words", "message"),
    [
        (("yes/0.wav", ""), "", "no recording for test: list some in testing_list.txt"),
        (("yes/0.wav", "no/0.wav"), "yes", "no recording of yes for test: list some"),
        (("", "yes/0.wav"), "yes,no", "no recording of yes, no for validation: list some"),
        (("yes/0.wav no/0.wav", "yes/1.wav no/1.wav"), "", "no recording for train: remove some"),
    ],
)
def test_part_without_a_recording(tmp_path, capsys, held_out, words, message):
    folder, out = tmp_path / "commands", tmp_path / "out"
    for word in ("yes", "no"):
        (folder / word).mkdir(parents=True)
        for number in range(2):
            (folder / word / f"{number}.wav").write_bytes(wav(np.ones(16_000, np.int16)))
    for name, listed in zip(("validation", "testing"), held_out, strict=True):
        (folder / f"{name}_list.txt").write_text(listed)
    assert main(["speech", str(folder), "--out", str(out), "--words", words]) == 2
    error = capsys.readouterr().err
    assert f"{folder} has {message}" in error
    assert error.count("\n") == 1
    assert not out.exists()


class Replay:
    """A random generator that returns given numbers."""

    def __init__(self, *numbers):
        self.numbers = iter(numbers)

    def integers(self, *limits, **_):
        return next(self.numbers)

    def random(self):
        return next(self.numbers)

    def uniform(self, low, high):
        return next(self.numbers)


@pytest.mark.parametrize(("shift", "coin", "volume"), [(1600, 0.7, 0.08), (-900, 0.9, 0.0)])
def test_variants_match_tc_resnet(shift, coin, volume):
    """Shift, add volume · noise and clip, in a loop over samples."""
    second = RANDOM.uniform(-1, 1, 16_000).astype(np.float32)
    noise = RANDOM.uniform(-1, 1, 20_000).astype(np.float32)
    numbers = [shift, 0, 123, coin, *([volume] if coin < 0.8 else [])]
    varied = vary(second, [noise], Replay(*numbers))
    for place in range(0, 16_000, 37):
        before = second[place - shift] if 0 <= place - shift < 16_000 else 0.0
        expected = min(1.0, max(-1.0, before + volume * noise[123 + place]))
        assert varied[place] == pytest.approx(expected, abs=1e-6)
