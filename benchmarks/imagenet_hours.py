"""Time and size of ImageNet-1k's shards at each setting of `data_tools`.

    OMP_NUM_THREADS=1 python -m benchmarks.imagenet_hours

Every verb writes shards of a few hundred photographs of ImageNet's mean size, 500x375 pixels in
108 KB (138 GB of training images), on one core. Time and bytes per image, times 1,331,167 images
of training and validation set, are printed as the Markdown table of `docs/data.md`. Time is CPU
time, which other jobs hardly affect. Networks have random weights and the sizes of
`yaml_configs/givt/vae.yaml` and `yaml_configs/gvp/vqgan.yaml`: they cost as much as trained ones.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml

from benchmarks.palette_shards import run_verb, write_crops
from benchmarks.timing import machine
from megavis.checkpoint.state.save import write_weights
from megavis.config.load import dump_config, load_config
from megavis.tokenizers.network_tokenizer import NetworkTokenizer
from megavis.tokenizers.vae import VAE
from megavis.tokenizers.vqgan import VQGAN

TRAINING, VALIDATION = 1_281_167, 50_000
CORES = 32
QUALITY = 97  # gives files of about 108 KB, like ImageNet's
FEW = 3


@dataclass(frozen=True)
class Choice:
    """One line of the table.

    Attributes:
        text: description.
        verb: verb of `data_tools` with options; `@` marks a file that `prepare` writes.
        few: measure on three photographs, since a network takes seconds for each.
    """

    text: str
    verb: str
    few: bool = False


_PALETTE = "palette-shards --palette @palette.npy --size"
CHOICES = (
    Choice("palette, 32²", f"{_PALETTE} 32"),
    Choice("palette, 48²", f"{_PALETTE} 48"),
    Choice("palette, 64²", f"{_PALETTE} 64"),
    Choice("palette, 32², 48² and 64² in one run", f"{_PALETTE} 32 48 64"),
    Choice("palette, 64², `--fast`", f"{_PALETTE} 64 --fast"),
    Choice("palette, 64², `--resize pillow`", f"{_PALETTE} 64 --resize pillow"),
    Choice("palette, 32², `--crop evaluation`", f"{_PALETTE} 32 --crop evaluation"),
    Choice("palette, 32², `--crop random --crops 4`", f"{_PALETTE} 32 --crop random --crops 4"),
    Choice("palette, 40², to read 32² windows", f"{_PALETTE} 40"),
    Choice("palette, 56², to read 48² windows", f"{_PALETTE} 56"),
    Choice("palette, 80², to read 64² windows", f"{_PALETTE} 80"),
    Choice("`jpeg --size 64`, quality 95", "jpeg --size 64"),
    Choice("`jpeg --size 224`, quality 95", "jpeg --size 224"),
    Choice("`jpeg --size 256`, quality 95", "jpeg --size 256"),
    Choice("`jpeg`, the files as they are", "jpeg"),
    Choice("`latents --size 256`, mirrored too", "latents --tokenizer @vae --size 256", few=True),
    Choice("`ids --size 256`", "ids --tokenizer @vqgan --size 256", few=True),
)


def write_tokenizer(folder: Path, kind: type[NetworkTokenizer], preset: str) -> None:
    """Write a run folder of a network with random weights in a preset's sizes."""
    folder.mkdir()
    path = Path(__file__).parents[1] / "yaml_configs" / preset
    text = dump_config(load_config(path).config)
    (folder / "config.yaml").write_text(text)
    weights = kind.from_config(yaml.safe_load(text)).state_dict()
    named = {f"{kind.prefix}{name}": value for name, value in weights.items()}
    write_weights(folder, named, seed=0, tokenizer=None)


def prepare(work: Path, *, count: int) -> float:
    """Write the photographs and other inputs of the verbs; return the mean file size in bytes."""
    (work / "images").mkdir()
    paths = write_crops(work / "images", count=count, quality=QUALITY)
    for folder, few in (("one", 1), ("few", FEW)):
        (work / folder).mkdir()
        for path in paths[:few]:
            (work / folder / path.name).hardlink_to(path)
    run_verb("palette", "fit", work / "images", "--out", work / "palette.npy", "--pixels", 100_000)
    write_tokenizer(work / "vae", VAE, "givt/vae.yaml")
    write_tokenizer(work / "vqgan", VQGAN, "gvp/vqgan.yaml")
    return statistics.mean(path.stat().st_size for path in paths)


def run(work: Path, choice: Choice, images: str) -> np.ndarray:
    """Write the shards of a choice; return images, CPU seconds and bytes, float64 `[3]`."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    verb, *options = [work / word[1:] if word[0] == "@" else word for word in choice.verb.split()]
    words = ["palette", "shards"] if verb == "palette-shards" else [verb]
    begin = time.process_time()
    run_verb(*words, work / images, "--out", out, *options)
    seconds = time.process_time() - begin
    num_bytes = sum(path.stat().st_size for path in out.rglob("shard-*"))
    return np.array([len(list((work / images).iterdir())), seconds, num_bytes])


def cost(work: Path, choice: Choice, *, rounds: int) -> tuple[float, float]:
    """Return CPU seconds and bytes per image, without those of the first one."""
    run(work, choice, "one")  # compiles, opens the network
    images = "few" if choice.few else "images"
    taken = [run(work, choice, images) - run(work, choice, "one") for _ in range(rounds)]
    count, seconds, num_bytes = np.median(taken, axis=0).tolist()
    return seconds / count, num_bytes / count


def line(choice: Choice, seconds: float, num_bytes: float) -> str:
    """Return a line of the table from the cost per image."""
    hours = seconds * (TRAINING + VALIDATION) / 3600
    cells = [
        choice.text,
        f"{1 / seconds:,.0f}" if seconds < 0.1 else f"{1 / seconds:.2f}",
        f"{hours:,.1f} h" if hours < 100 else f"{hours:,.0f} h",
        f"{60 * hours / CORES:.1f} min" if hours < CORES else f"{hours / CORES:,.0f} h",
        f"{num_bytes:,.0f}",
        *(f"{num_bytes * count / 1e9:,.2f} GB" for count in (TRAINING, VALIDATION)),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure and print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--images", type=int, default=400, help="photographs; default: 400")
    options.add_argument("--rounds", type=int, default=3, help="timed turns of each; default: 3")
    options.add_argument(
        "--without-networks", action="store_true", help="skip the rows that take hours on a CPU"
    )
    arguments = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mean = prepare(Path(folder), count=arguments.images)
        print(f"{arguments.images} photographs of {mean / 1000:.0f} KB on average; {machine()}")
        print(f"| what is stored | images/s a core | on one core | on {CORES} cores |", end="")
        print(" bytes an image | training set | validation set |\n|---|---|---|---|---|---|---|")
        for choice in [each for each in CHOICES if not (each.few and arguments.without_networks)]:
            seconds, num_bytes = cost(Path(folder), choice, rounds=arguments.rounds)
            print(line(choice, seconds, num_bytes), flush=True)


if __name__ == "__main__":
    main()
