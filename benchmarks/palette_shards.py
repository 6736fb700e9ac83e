"""`palette shards` compared with only decoding, and with a straightforward loop.

    OMP_NUM_THREADS=1 python -m benchmarks.palette_shards

All run on one core in one process: 500x375 crops of photographs from scikit-image, scikit-learn
and foolbox, as JPEG of quality 90, read from the disk cache. Tokens of a sample are compared
with Pillow's resize and the nearest of all colours in float64. Shares of decoding are also given in
processor time, which other jobs affect less.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from benchmarks.timing import parser, ratio, report, summary, take_turns
from data_tools.__main__ import main as data_tools
from megavis.data.loading.dataset import ShardDataset
from megavis.tokenizers.palette import Palette

WIDTH, HEIGHT, QUALITY = 500, 375, 90
BICUBIC = Image.Resampling.BICUBIC
_SHIPPED = {"skimage": "data", "sklearn": "datasets/images", "foolbox": "data"}
PACKAGES = tuple(_SHIPPED)


def photographs(packages: Sequence[str] = PACKAGES) -> Iterator[Image.Image]:
    """Yield the packages' photographs of at least 500x375 pixels."""
    for package in packages:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            sys.exit(f"{package} is missing: pip install 'megavis[test]'")
        for path in sorted((Path(spec.origin).parent / _SHIPPED[package]).glob("*.*g")):
            if path.suffix in (".jpg", ".png"):
                image = Image.open(path)
                if image.mode == "RGB" and image.width >= WIDTH and image.height >= HEIGHT:
                    yield image


def write_crops(
    folder: Path, *, count: int, quality: int = QUALITY, packages: Sequence[str] = PACKAGES
) -> list[Path]:
    """Write `count` random crops of 500x375 as JPEG; return the files."""
    random = np.random.default_rng(0)
    images = list(photographs(packages))
    paths = [folder / f"{number:06d}.jpg" for number in range(count)]
    for path, image in zip(paths, itertools.cycle(images)):
        left = int(random.integers(0, image.width - WIDTH, endpoint=True))
        top = int(random.integers(0, image.height - HEIGHT, endpoint=True))
        image.crop((left, top, left + WIDTH, top + HEIGHT)).save(path, quality=quality)
    return paths


def resized(path: Path, size: int) -> np.ndarray:
    """Resize a file's shorter side to `size` with Pillow, crop the center: uint8 `[s, s, 3]`."""
    image = Image.open(path).convert("RGB")
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)))


def plain_loop(paths: list[Path], palette: Palette, size: int) -> list[np.ndarray]:
    """Encode with a plain loop: Pillow, numpy, nearest colours by a matrix product."""
    centers = palette.centers
    squares = (centers**2).sum(axis=1)
    tokens = []
    for path in paths:
        points = resized(path, size).reshape(-1, 3).astype(np.float32) / 127.5 - 1
        tokens.append((squares - 2 * points @ centers.T).argmin(axis=1))
    return tokens


def run_verb(*words: object) -> None:
    """Run a verb of `data_tools` without output."""
    with contextlib.redirect_stdout(io.StringIO()):
        if code := data_tools([str(word) for word in words]):
            sys.exit(f"{words}: exit code {code}")


def share_that_differs(paths: list[Path], out: Path, palette: Palette, size: int) -> float:
    """Return the fraction of tokens unlike Pillow and brute force, in every tenth image."""
    dataset = ShardDataset(out)
    centers = palette.centers.astype(np.float64)
    chosen = np.arange(0, len(dataset), 10)
    wrong = 0
    for index, tokens in zip(chosen, dataset.read(chosen)[0], strict=True):
        path = paths[int(dataset.name_of(int(index)).split(":")[1])]
        points = resized(path, size).reshape(-1, 1, 3) / 127.5 - 1
        wrong += int((tokens != ((points - centers) ** 2).sum(axis=-1).argmin(axis=1)).sum())
    return wrong / (len(chosen) * size * size)


def processor() -> str:
    """Return the processor's model name, or nothing if Linux does not report it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1] if found else ""


class Contest:
    """The files, their palette, and the contestants.

    Args:
        work: an empty folder.
        count: number of files.
        size: side of the images in the shards.
    """

    def __init__(self, work: Path, *, count: int, size: int) -> None:
        self.work, self.size = work, size
        self.folder = work / "images"
        self.folder.mkdir()
        self.paths = write_crops(self.folder, count=count)
        run_verb("palette", "fit", self.folder, "--out", work / "palette.npy", "--pixels", 100_000)
        self.palette = Palette.load(work / "palette.npy")
        self.pixels = [resized(path, size) for path in self.paths]
        self._numbers = itertools.count()

    def shards(self, *options: str) -> Path:
        """Run the verb, end to end; return the new shard folder."""
        out, palette = self.work / f"shards-{next(self._numbers)}", self.work / "palette.npy"
        words = ("palette", "shards", self.folder, "--palette", palette, "--out", out)
        run_verb(*words, "--size", self.size, *options)
        return out

    def ways(self) -> dict[str, Callable[[], object]]:
        """Return the contestants by name."""
        return {
            "decode only": lambda: [simplejpeg.decode_jpeg(p.read_bytes()) for p in self.paths],
            "palette shards": self.shards,
            "palette shards --resize pillow": lambda: self.shards("--resize", "pillow"),
            "palette shards --fast": lambda: self.shards("--fast"),
            "plain loop": lambda: plain_loop(self.paths, self.palette, self.size),
            "nearest colours alone": lambda: [self.palette.encode(p) for p in self.pixels],
        }


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--images", type=int, default=400)
    arguments.add_argument("--size", type=int, default=64)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as work:
        contest = Contest(Path(work), count=options.images, size=options.size)
        out = contest.shards()
        wrong = share_that_differs(contest.paths, out, contest.palette, options.size)
        taken = take_turns(contest.ways(), rounds=options.rounds)
    seconds = {name: [each.wall for each in rounds] for name, rounds in taken.items()}
    rows = summary(taken, against="decode only")
    for row in rows:
        row["images_per_s"] = options.images / row["wall_s"]
        row["images_per_cpu_s"] = options.images / row["cpu_s"]
        row["share_of_decode"] = 1 / row["wall_times"]
        row["cpu_share_of_decode"] = 1 / row["cpu_times"]
    report(
        rows,
        options.json,
        images=f"{options.images} JPEGs of {WIDTH}x{HEIGHT} to {options.size}x{options.size}",
        processor=processor(),
        tokens_that_differ=wrong,
        plain_loop_over_ours=f"{ratio(seconds['plain loop'], seconds['palette shards']):.2f}",
        lookup_share=f"{ratio(seconds['nearest colours alone'], seconds['palette shards']):.3f}",
        **{name: version(name) for name in ("pillow", "simplejpeg", "numpy")},
    )


if __name__ == "__main__":
    main()
