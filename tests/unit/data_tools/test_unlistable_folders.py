"""Folders that the user may not list: an error that names them, for every verb that reads folders.

A folder of mode 311 may be entered but not listed: `Path.glob` finds nothing in it, without an
error, and files in it are found by name.
"""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from image_files import encoded, real_picture
from image_sources import small_jpeg, validation_files, web_members, write_folder, write_tar
from labelled_files import write_dtd, write_mnist
from PIL import Image
from scipy.io import wavfile
from unprivileged import unprivileged
from vtab_files import write_dmlab

pytestmark = pytest.mark.once

# Name of the case: command, the folder that may not be listed, and the path that the error names.
PIXELS = "--size 8 --num-colors 4"
CASES = {
    "a class": ("data_tools jpeg images --out OUT", "images/bird", "images/bird"),
    "a folder below a class": ("data_tools jpeg images --out OUT", "images/bird/deep", "bird/deep"),
    "all images": ("data_tools jpeg images --out OUT", "images", "images"),
    "colours": (f"data_tools palette fit images --out OUT.npy {PIXELS}", "images/bird", "bird"),
    "tokens": (
        "data_tools palette shards images --palette grey.npy --size 8 --out OUT",
        "images/cat",
        "images/cat",
    ),
    "tars": ("data_tools jpeg web --out OUT", "web", "web"),
    "validation images": (
        "data_tools jpeg val --ground-truth truth.txt --out OUT",
        "val",
        "val",
    ),
    "images that are liked": ("data_tools filter web --like images --out OUT", "images/cat", "cat"),
    "a selection": ("data_tools jpeg images --selection selection --out OUT", "selection", ""),
    "images of pairs": ("data_tools pairs images maps --out OUT --size 8", "images/cat", "cat"),
    "targets of pairs": ("data_tools pairs images maps --out OUT --size 8", "maps/cat", "maps/cat"),
    "maps": (
        "data_tools maps semantic images maps --classes classes.txt --out OUT",
        "maps/cat",
        "maps/cat",
    ),
    "a labelled set": ("data_tools jpeg mnist --lossless --out OUT", "mnist", "mnist"),
    "records": ("data_tools jpeg dmlab --layout dmlab --out OUT", "dmlab", "dmlab"),
    "a word": ("data_tools speech speech --words no --out OUT", "speech/yes", "speech/yes"),
    "noises": (
        "data_tools speech speech --words no --out OUT",
        "speech/_background_noise_",
        "_background_noise_",
    ),
    "shards": ("data_tools verify shards", "shards", "shards"),
    "a folder to write to": ("data_tools letters drawn", "drawn", "drawn"),
    "images to evaluate": ("open_images images", "images/bird", "images/bird"),
    "all images to evaluate": ("open_images images", "images", "images"),
    "runs": ("megavis runs runs", "runs", "runs"),
    "what is no shard folder": ("read_manifest images", "images", "images"),
}
CHILD = """
import contextlib, io, json, sys
from pathlib import Path
from data_tools.__main__ import main as data_tools
from megavis.cli import main as megavis
from megavis.config.errors import UserError
from megavis.data.format.manifest import Manifest
from megavis.evaluation.images.image_files import open_images

def command(function):
    def run(words):
        try:
            function(Path(words[0]))
        except (UserError, PermissionError) as error:
            sys.stderr.write(f"error: {error}\\n")
            return 2
        return 0

    return run

programs = {
    "data_tools": data_tools,
    "megavis": megavis,
    "open_images": command(open_images),
    "read_manifest": command(Manifest.read),
}
found = {}
for number, (name, command, folder, mode) in enumerate(json.loads(sys.argv[1])):
    program, *words = command.replace("OUT", f"out/{number}").split()
    Path(folder).chmod(mode)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = programs[program](words)
        except BaseException as error:
            code = repr(error)
    Path(folder).chmod(0o755)
    found[f"{name} {mode:o}"] = code, said.getvalue()
print(json.dumps(found))
"""


def write_sources(root):
    """Write a small source of each kind."""
    pictures = {"bird/a.jpg": 0, "bird/deep/b.jpg": 1, "cat/c.jpg": 2}
    write_folder(root / "images", {name: small_jpeg(number) for name, number in pictures.items()})
    for name in pictures:
        size = Image.open(root / "images" / name).size
        target = encoded(real_picture().convert("L").resize(size), "PNG")
        write_folder(root / "maps", {name.replace("jpg", "png"): target})
    write_tar(root / "web" / "0.tar", web_members(range(3)))
    write_folder(root / "val", validation_files(3))
    (root / "truth.txt").write_text("n01\nn02\nn01\n")
    (root / "classes.txt").write_text("Idx\tName\n1\twall\n")
    for name, write in {"mnist": write_mnist, "dtd": write_dtd, "dmlab": write_dmlab}.items():
        (root / name).mkdir()
        write(root / name)
    words = ("no", "yes", "_background_noise_")
    names = [f"{word}/{number}.wav" for word in words for number in range(3)]
    write_folder(root / "speech", dict.fromkeys(names, wav_of_a_second()))
    (root / "speech/validation_list.txt").write_text("no/0.wav\nyes/0.wav\n")
    (root / "speech/testing_list.txt").write_text("no/1.wav\nyes/1.wav\n")
    write_folder(root / "runs", {"a/config.yaml": b"", "b/config.yaml": b""})
    (root / "drawn").mkdir()


def wav_of_a_second():
    """Return the bytes of a recording of silence."""
    written = io.BytesIO()
    wavfile.write(written, 16_000, np.zeros(16_000, np.int16))
    return written.getvalue()


PREPARE = """
import sys
from data_tools.__main__ import main
for words in sys.argv[1:]:
    assert main(words.split()) == 0, words
"""
PREPARATIONS = (
    "palette grey --out grey.npy",
    "filter images --out selection --min-side 31",
    "jpeg images --out shards",
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Code and words of each command by the case and the mode of the folder."""
    root = tmp_path_factory.mktemp("unlistable")
    write_sources(root)
    prepare = [sys.executable, "-c", PREPARE, *PREPARATIONS]
    subprocess.run(prepare, cwd=root, check=True, capture_output=True)
    # Other readers of the folder would read it too.
    (root / "shards/stray.tar").write_bytes(b"")
    asked = [
        (n, command, folder, mode) for n, (command, folder, _) in CASES.items() for mode in MODES
    ]
    asked.append(("a listed image", "data_tools jpeg dtd --out OUT", "dtd/images/banded", 0))
    asked.append(("one run", "megavis runs runs", "runs/a", 0))
    asked.append(("a folder beside shards", "read_manifest .", "runs", 0))
    words = unprivileged([sys.executable, "-c", CHILD, json.dumps(asked)])
    done = subprocess.run(words, cwd=root, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


MODES = (0o000, 0o311)


@pytest.mark.parametrize("mode", MODES, ids="{:03o}".format)
@pytest.mark.parametrize("name", CASES)
def test_one_sentence_names_the_folder(answers, name, mode):
    code, said = answers[f"{name} {mode:o}"]
    assert code == 2, said
    assert said.count("error: ") == said.count("\n") == 1
    assert "Permission denied" in said
    assert CASES[name][2] in said
    assert "is missing" not in said
    # Of a source that is no shard folder, no file is named that nobody says is there.
    assert "manifest.json" not in said or name in ("shards", "what is no shard folder")


def test_a_listed_image_that_may_not_be_read_is_not_missing(answers):
    code, said = answers["a listed image 0"]
    assert code == 2
    assert "banded/banded_0000.jpg cannot be read: Permission denied" in said


def test_the_other_runs_are_listed(answers):
    code, said = answers["one run 0"]
    assert code == 0
    assert said == "WARNING: runs/a cannot be listed: Permission denied\n"


def test_a_folder_of_shards_may_hold_another_that_is_forbidden(answers):
    code, said = answers["a folder beside shards 0"]
    assert code == 2
    assert "holds the shard folders shards: give one of them" in said
