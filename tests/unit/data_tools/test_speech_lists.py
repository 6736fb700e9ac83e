"""Speech Commands by TC-ResNet's lists, and the number of unknown words and silences without."""

import io
import json

import numpy as np
import pytest
from scipy.io import wavfile

from data_tools.__main__ import main
from data_tools.speech import num_others
from megavis.data.loading.dataset import ShardDataset

pytestmark = pytest.mark.once

SILENCE = "_silence_/721f767c_nohash_2.wav"
"""The line that TC-ResNet's lists repeat, once for each silence."""


@pytest.fixture
def commands(tmp_path):
    """A folder of six recordings of each of four words, without the authors' lists."""
    folder = tmp_path / "commands"
    random = np.random.default_rng(0)
    for word in ("yes", "no", "cat", "dog"):
        (folder / word).mkdir(parents=True)
        for number in range(6):
            file = io.BytesIO()
            wavfile.write(file, 16_000, random.integers(-900, 900, 16_000).astype(np.int16))
            (folder / word / f"{number}.wav").write_bytes(file.getvalue())
    return folder


@pytest.fixture
def write(commands, tmp_path):
    """Write lists, given as `yes/0 no/1`, and the shards; return the exit code."""

    def write(words="yes,no", **lists):
        folder = tmp_path / "lists"
        folder.mkdir(exist_ok=True)
        texts = {"train": "yes/0 no/0", "valid": "yes/1 no/1", "test": "yes/2 no/2"} | lists
        for name, text in texts.items():
            lines = [f"{line}.wav\n" if "." not in line else f"{line}\n" for line in text.split()]
            (folder / f"{name}.txt").write_text("".join(lines))
        options = ["--words", words, "--split-lists", str(folder), "--out", f"{tmp_path}/out"]
        return main(["speech", str(commands), *options])

    return write


def names_of(folder):
    return json.loads((folder / "shard-000000.index.json").read_text())["sources"]


def test_parts_are_those_of_the_lists(write, tmp_path, capsys):
    silences = f" {SILENCE}" * 3
    # TC-ResNet's own script takes the last two parts of a path.
    train = f"cat/5 yes/0 /data/no/4 dog/1 cat/0{silences}"
    assert write(train=train, valid=f"no/1 yes/3 {SILENCE}", test="yes/2 no/0 dog/2") == 0
    expected = {
        "train": (["cat/0", "cat/5", "dog/1", "no/4", "yes/0"], [1, 1, 3, 3]),
        "validation": (["no/1", "yes/3"], [1, 1, 0, 1]),
        "test": (["dog/2", "no/0", "yes/2"], [1, 1, 1, 0]),
    }
    for part, (spoken, counts) in expected.items():
        dataset = ShardDataset(tmp_path / "out" / part)
        assert dataset.class_names == ("yes", "no", "_unknown_", "_silence_")
        assert np.bincount(dataset.labels, minlength=4).tolist() == counts
        names = [name for name in names_of(tmp_path / "out" / part) if "_silence_" not in name]
        assert sorted(names) == [f"{name}.wav" for name in spoken]
    said = capsys.readouterr()
    assert "train: 2 of yes, no, 3 of other words, 3 silences" in said.out + said.err


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"valid": "yes/1 no/77"}, "valid.txt line 2: no/77.wav is no recording of"),
        ({"test": "yes/2 yes/2"}, "test.txt line 2: yes/2.wav is listed twice"),
        ({"test": "yes/0 no/2"}, "test.txt line 1: yes/0.wav is listed twice"),
        ({"train": ""}, "train.txt lists no recording of yes, no"),
        ({"valid": SILENCE}, "valid.txt lists no recording of yes, no"),
        ({"test": "yes 3"}, "test.txt line 1: yes.wav is not like cat/0.wav"),
    ],
)
def test_unsuitable_lists(write, tmp_path, capsys, lists, message):
    assert write(**lists) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_lists_need_words_and_must_exist(write, commands, tmp_path, capsys):
    assert write(words="") == 2
    assert "--split-lists needs --words" in capsys.readouterr().err
    options = ["--words", "yes,no", "--split-lists", str(tmp_path / "none"), "--out", "out"]
    assert main(["speech", str(commands), *options]) == 2
    assert "none/train.txt is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "others", "total"),
    # TC-ResNet's train.txt, valid.txt and test.txt; the first is MP3's Table 1.
    [(18_538, 1_854, 22_246), (2_577, 258, 3_093), (2_567, 257, 3_081), (10, 1, 12), (1, 1, 3)],
)
def test_unknown_words_and_silences_are_a_tenth_rounded_up(wanted, others, total):
    assert num_others(wanted) == others
    assert wanted + 2 * others == total
