"""Speech: synthesised words, recordings and noises of a folder, its splits."""

import io
import json
import os
import struct

import numpy as np
import pytest
from scipy.io import wavfile

from data_tools import words as spoken_words
from data_tools.__main__ import main
from data_tools.decode import RefusedImageError
from data_tools.speech import one_second, read_wav
from megavis.data.codecs.sound import cepstra
from megavis.data.loading.dataset import ShardDataset

pytestmark = pytest.mark.once

RANDOM = np.random.default_rng(0)


def wav(samples, rate=16_000):
    file = io.BytesIO()
    wavfile.write(file, rate, samples)
    return file.getvalue()


def test_read_wav():
    samples = RANDOM.integers(-32768, 32767, 20_000).astype(np.int16)
    read = read_wav(wav(samples))
    assert np.array_equal(read, samples)
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


def chunk(name, content):
    return name + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", [b"bext", b"id3 ", b"cue ", b"smpl", b"iXML", b"LIST"])
def test_metadata_of_a_recording_do_not_matter(name, before):
    """Recorders, sample libraries and editors write chunks of their own, of any length."""
    samples = RANDOM.integers(-32768, 32767, 1_000).astype(np.int16)
    plain = wav(samples)
    start, data = plain[12:36], plain[36:]
    chunks = [start, chunk(name, b"x" * 41), data] if before else [start, data, chunk(name, b"x")]
    body = b"WAVE" + b"".join(chunks)
    content = b"RIFF" + struct.pack("<I", len(body)) + body
    assert np.array_equal(read_wav(content), samples)
    cut = b"RIFF" + struct.pack("<I", len(body)) + body[:1_000]
    with pytest.raises(RefusedImageError, match="no WAV file"):
        read_wav(cut)


def test_odd_files_of_a_folder_are_told_or_rejected(tmp_path, capsys):
    """Suffixes of any case, names of other encodings and broken links, as everywhere else."""
    folder = tmp_path / "commands"
    for word in ("no", "yes"):
        (folder / word / "deep").mkdir(parents=True)
        for number in range(3):
            (folder / word / f"{number}.wav").write_bytes(wav(np.ones(16_000, np.int16)))
    (folder / "no" / "0.wav").unlink()
    (folder / "no" / "0.wav").symlink_to("nowhere.wav")  # silences refer to no such file
    (folder / "yes" / "0.wav").rename(folder / "yes" / "0.WAV")
    latin = os.fsdecode(b"caf\xe9.wav")
    (folder / "yes" / latin).write_bytes(wav(np.ones(16_000, np.int16)))
    (folder / "yes" / "deep" / "4.wav").write_bytes(wav(np.ones(16_000, np.int16)))
    (folder / "yes" / "5.flac").write_bytes(b"fLaC")
    (folder / "validation_list.txt").write_text("yes/1.wav\nno/1.wav\nno/77.wav\n")
    (folder / "testing_list.txt").write_text("yes/2.wav\nno/2.wav\n")
    for words, count in (("", 3), ("yes, no,yes", 4)):
        out = tmp_path / f"out{words}"
        assert main(["speech", str(folder), "--out", str(out), "--words", words]) == 0
        manifest = json.loads((out / "train/manifest.json").read_text())
        others = ["yes", "no", "_unknown_", "_silence_"]
        assert manifest["class_names"] == (others if words else ["no", "yes"])
        assert manifest["skipped"] == {"unreadable file": 1}
        (index,) = (json.loads(path.read_text()) for path in (out / "train").glob("*.index.json"))
        names = {name for name in index["sources"] if "_silence_" not in name}
        assert names == {"yes/0.WAV", "yes/caf\\xe9.wav"}
        assert len(index["sources"]) + 1 == count
        said = capsys.readouterr().out
        assert "validation_list.txt lists 1 name of no recording, such as no/77.wav" in said
        assert words or "train: 3 recordings of 2 words\n" in said
        assert "2 files not read, such as yes/5.flac: only word/name.wav are" in said


def test_no_words(tmp_path, capsys):
    assert main(["words", str(tmp_path / "out"), "--words", " ,"]) == 2
    assert "--words names no word" in capsys.readouterr().err


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100])
def test_resampled_tone_is_the_tone(rate):
    """Half a second of a tone, read at another rate, has the samples of that tone at 16 kHz."""
    seconds = np.arange(rate // 2) / rate
    tone = np.round(20_000 * np.sin(2 * np.pi * 440 * seconds)).astype(np.int16)
    read = read_wav(wav(tone, rate), resample=True)
    assert read.dtype == np.int16
    assert abs(len(read) - 8_000) <= 1
    expected = 20_000 * np.sin(2 * np.pi * 440 * np.arange(len(read)) / 16_000)
    # The filter rings at both ends, before which and after which there is silence.
    inside = slice(200, -200)
    assert np.abs(read[inside] - expected[inside]).max() < 200


def test_resampled_clipping_does_not_wrap_around():
    """A filter overshoots at full volume; int16 would turn the sign."""
    square = np.where(np.arange(4_000) // 40 % 2, 32_767, -32_768).astype(np.int16)
    read = read_wav(wav(square, 8_000), resample=True).reshape(-1, 80)
    middle = read[:, 20:60].astype(int)
    assert (np.sign(middle[0::2]) == -1).all()
    assert (np.sign(middle[1::2]) == 1).all()


def test_recordings_of_another_rate(tmp_path, capsys):
    """They are rejected, and the report says how to read them; with `--resample` they are read."""
    for name in ("train", "validation", "test"):
        (tmp_path / "raw" / "yes").mkdir(parents=True, exist_ok=True)
        (tmp_path / "raw" / "yes" / f"{name}.wav").write_bytes(wav(np.ones(4_000, "<i2"), 8_000))
    (tmp_path / "raw/validation_list.txt").write_text("yes/validation.wav\n")
    (tmp_path / "raw/testing_list.txt").write_text("yes/test.wav\n")
    command = ["speech", str(tmp_path / "raw"), "--out"]
    assert main([*command, str(tmp_path / "refused")]) == 2
    printed = capsys.readouterr()
    assert "8000 Hz, not 16000" in printed.out + printed.err
    assert main([*command, str(tmp_path / "read"), "--resample"]) == 0
    manifest = json.loads((tmp_path / "read/test/manifest.json").read_text())
    assert manifest["preparation"]["resize"] == "to 16000 Hz"


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
        assert frames.std(1).min() > 0
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
    (folder / "_background_noise_" / "click.wav").write_bytes(wav(hum[:15_999]))
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
    # A tenth, rounded up as TC-ResNet does; no unknown word is left for the test.
    assert counts == {"train": [4, 14, 2, 2], "validation": [1, 1, 1, 1], "test": [10, 0, 0, 1]}
    test = ShardDataset(tmp_path / "out" / "test")
    silence = test.read(np.flatnonzero(test.labels == 3))[0][0]
    np.testing.assert_array_equal(silence, cepstra(np.zeros(16_000, np.float32), 40))
    stored = (folder / "no" / "3.wav").read_bytes()
    held_out = ShardDataset(tmp_path / "out" / "validation")
    payloads = [held_out.payload(index) for index in np.flatnonzero(held_out.labels == 1)]
    assert payloads == [read_wav(stored).tobytes()]
    with np.load(tmp_path / "out" / "background_noise.npz") as noises:
        (found,) = noises.values()  # the other is shorter than a recording
    np.testing.assert_array_equal(found, hum)


@pytest.mark.parametrize(
    ("held_out", "words", "message"),
    [
        (("yes/0.wav", ""), "", "no recording for test: list some in testing_list.txt"),
        (("yes/0.wav", "no/0.wav"), "yes", "no recording of yes for test: list some"),
        (("", "yes/0.wav"), "yes,no", "no recording of yes, no for validation: list some"),
        (("yes/0.wav\nno/0.wav", "yes/1.wav\nno/1.wav"), "", "no recording for train: remove some"),
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
