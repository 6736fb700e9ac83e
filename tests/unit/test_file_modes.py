"""Whoever may read a folder may read every file in it: modes follow the umask alone.

The umask is set in child processes, since it belongs to a whole process.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import small_codebook
from small_codebook import SmallCodebook, write_run

from megavis.tokenizers.shapes import VAEShape
from megavis.tokenizers.vae import VAE

pytestmark = pytest.mark.once

RUN = """
import sys
from pathlib import Path
from PIL import Image
from data_tools.__main__ import VERBS, main as data_tools
from megavis.cli import main
from megavis.tokenizers import network_tokenizer
config, shards, tokenizers, support = sys.argv[1:]
sys.path.insert(0, support)
from coco_folder import write_coco
network_tokenizer.TOKENIZERS["small_codebook"] = "small_codebook:SmallCodebook"
tried = set()

def run(command, words):
    assert command(words.split()) == 0, words

def make(verb, words):
    run(data_tools, f"{verb} {words}")
    tried.add(verb)

make("letters", "letters --letters 2 --images 64 --selection-images 8 --validation-images 8"
    " --workers 0")
make("photographs", "crops --size 16 --crops 8 --validation-crops 4")
make("palette grey", "--out grey.npy")
make("palette fit", "crops/train --out new.npy --num-colors 8 --pixels 200 --size 8")
for part in ("train", "validation"):
    make("palette shards", f"letters/{part} --out {part} --size 8 --workers 0"
        f" --palette {shards}/palette.npy")
make("jpeg", "crops/train --out jpeg_shards --workers 0")
make("inspect", "jpeg_shards --out sheets/sheet.png")
make("verify", "jpeg_shards")
make("index", "jpeg_shards")
make("reshard", "jpeg_shards --out resharded --samples-per-shard 5")
make("merge", "jpeg_shards resharded --out merged")
make("filter", "crops/train --out filtered --min-side 1 --keep-duplicates")
make("pairs", "crops/train crops/train --out pairs --size 16")
make("scenes", "scenes --size 16 --images 2 --validation-images 1")
make("maps panoptic", "scenes/images/train scenes/panoptic/train scenes/panoptic_train.json"
    " --out panoptic")
make("maps depth", "scenes/images/train scenes/depth/train --out depths")
Path("semantic").mkdir()
Path("names.txt").write_text("all\\n")
for path in Path("scenes/images/train").iterdir():
    Image.new("L", (16, 16), 1).save(Path("semantic", path.name).with_suffix(".png"))
make("maps semantic", "scenes/images/train semantic --classes names.txt --out classes")
write_coco(Path("coco"), train=2, validation=1)
make("maps instances", "coco/train2017 coco/annotations/instances_train2017.json --out objects")
for verb in ("latents", "ids"):
    make(verb, f"crops/train --out {verb} --size 16 --batch-size 4"
        f" --tokenizer {tokenizers}/{verb}")
make("words", "spoken --words yes --voices 1 --held-out-voices 1 --takes 1")
make("speech", "spoken --out speech")
# Writes as the other maps do, from a file of 2.8 GB.
left = {verb.name for verb in VERBS} - tried - {"maps nyu"}
assert not left, left

run(main, f"train {config} --device cpu output=runs data.train=train data.validation=null"
    " schedule.warmup_steps=0 training.steps=2 checkpoint.every=1 training.sample_every=2"
    " training.sample_images=2")
run(main, "probe runs/tiny --train train --validation validation --device cpu"
    " --untrained-networks 1")
run(main, "export runs/tiny --to huggingface exports/hub")
run(main, "export runs/tiny --to safetensors exports/weights.safetensors")
run(main, "import huggingface exports/hub imported")
run(main, "report runs/tiny")
"""


def wrong_modes(folder, umask):
    """Return the paths whose mode is not that of a new file or folder."""
    found = {str(path.relative_to(folder)): path.stat().st_mode for path in folder.rglob("*")}
    right = {True: 0o40777 & ~umask, False: 0o100666 & ~umask}
    return {
        name: oct(mode) for name, mode in found.items() if mode != right[(folder / name).is_dir()]
    }


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """A folder with the runs of two untrained tokenizers: latents and ids."""
    folder = tmp_path_factory.mktemp("tokenizers")
    shape = {"latent_channels": 2, "filters": 8, "multipliers": (1, 1), "blocks_per_level": 1}
    vae = VAE(VAEShape(**shape, groups=4))
    section = {"name": "vae", **vae.settings, "norm_groups": vae.settings["groups"]}
    write_run(folder / "latents", vae, section)
    SmallCodebook(8).save_run(folder / "ids")
    return folder


def test_files_of_runs_exports_and_shards(tiny_config, shards, tokenizers, tmp_path):
    support = Path(small_codebook.__file__).parent
    words = [sys.executable, "-c", RUN, *map(str, (tiny_config, shards, tokenizers, support))]
    done = subprocess.run(words, cwd=tmp_path, umask=0o002, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds >= {".safetensors", ".json", ".jsonl", ".yaml", ".npy", ".png", ".tar", ".html"}
    assert wrong_modes(tmp_path, 0o002) == {}


WRITE = """
import os, sys, torch
from pathlib import Path
from megavis.checkpoint.format.tensor_files import save_tensors
for folder in map(Path, sys.argv[1:]):
    os.umask(int(folder.name, 8))
    save_tensors(folder / "new.safetensors", {"x": torch.ones(2)}, {"format": "pt"})
    save_tensors(folder / "old.safetensors", {"x": torch.ones(2)}, {"format": "pt"})
"""


def test_tensor_files(tmp_path):
    umasks = (0o022, 0o027, 0o077, 0)
    folders = [tmp_path / f"{umask:o}" for umask in umasks]
    for folder in folders:
        folder.mkdir()
        (folder / "old.safetensors").touch(mode=0o600)
    subprocess.run([sys.executable, "-c", WRITE, *map(str, folders)], check=True)
    assert [wrong_modes(*each) for each in zip(folders, umasks, strict=True)] == [{}] * 4
