"""Places of imports and exports that cannot be written, and disks that are full."""

import pytest
from safetensors import SafetensorError
from tiny import VIT, tiny

from megavis.checkpoint.format import tensor_files
from megavis.cli import main
from megavis.config.load import load_config
from megavis.weights.released import write_run

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("context")]

MP3 = tiny("{name: mp3, patch_size: 4}", model=VIT)
FULL = "Error while serializing: I/O error: No space left on device (os error 28)"


@pytest.fixture
def run(tmp_path, build_paper):
    """The folder of a small run with random weights."""
    (tmp_path / "mp3.yaml").write_text(MP3)
    _, inference = build_paper(MP3)
    weights = {name: value.detach() for name, value in inference.layers.named_parameters()}
    write_run(tmp_path / "run", load_config(tmp_path / "mp3.yaml").config, weights)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("{}/file/below/deep", "would lie in {}/file, which is not a folder"),
        ("/proc/megavis", "/proc/megavis: nothing can be written there (No such file"),
        ("{}/file", "file exists; choose another name"),
        ("{}/" + "o" * 300, "nothing can be written there (File name too long); choose another"),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        ["import", "huggingface", "no/folder"],
        ["export", "no/run", "--to", "huggingface"],
        ["export", "no/run", "--to", "safetensors"],
        ["checkpoint", "convert", "no/run"],
    ],
    ids=lambda words: words[-1],
)
def test_places_are_checked_before_the_work(tmp_path, capsys, words, place, sentence):
    (tmp_path / "file").touch()
    assert main([*words, place.format(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert sentence.format(tmp_path) in message
    assert message.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "words",
    [
        ["export", "RUN", "--to", "huggingface"],
        ["export", "RUN", "--to", "timm"],
        ["export", "RUN", "--to", "safetensors"],
        ["import", "huggingface", "EXPORTED"],
        ["checkpoint", "convert", "RUN"],
    ],
    ids=lambda words: words[-1],
)
def test_a_full_disk_is_one_sentence(tmp_path, run, capsys, monkeypatch, words):
    exported = tmp_path / "exported"
    assert main(["export", str(run), "--to", "huggingface", str(exported)]) == 0
    before = sorted(each.name for each in tmp_path.iterdir())
    capsys.readouterr()

    def fail(*_, **__):
        raise SafetensorError(FULL)

    monkeypatch.setattr(tensor_files, "save_file", fail)
    places = {"RUN": str(run), "EXPORTED": str(exported)}
    out = str(tmp_path / "out")
    assert main([*(places.get(word, word) for word in words), out]) == 2
    message = capsys.readouterr().err
    assert message == f"error: {out}: No space left on device; the result was discarded\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == before
