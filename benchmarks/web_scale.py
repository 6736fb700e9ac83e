"""Hours and bytes of a hundred million web images, scaled from rates that are measured here.

    OMP_NUM_THREADS=1 python -m benchmarks.web_scale

Tars as img2dataset writes them (photographs of 256 pixels a side with captions and metadata; a few
damaged) are measured by `filter` and written as palette shards of 64² tokens, in one process, one
after the other and at once. The decision is made for synthetic measurements, a fifth of which are
near-duplicates. Seconds are CPU time. Memory is a process's peak at two sizes: numbers of tars for
the commands, and numbers of images for the decision. The hours are extrapolated: nothing of that
size was run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.palette_shards import processor, run_verb, write_crops
from benchmarks.timing import machine
from data_tools.filter_decision import TABLE, Excluded, Reference, Thresholds, drop_near
from data_tools.measurements import best_bands, search_cost
from data_tools.shard_tasks import peak_memory

MILLION, IMAGES = 1_000_000, 100_000_000
MACHINES, CORES, SIDE, IN_TAR = (1, 16, 256), 32, 256, 1_000
_NEAR = 4  # bits
_SHARE = 5  # one in this many synthetic images is a near-duplicate


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a command, bytes that it wrote, and the peak memory of its process."""

    count: int
    seconds: float
    num_bytes: int
    memory: float

    def since(self, fewer: Cost) -> Cost:
        """Return the cost of the images that `fewer` lacks, without start-up."""
        values = (self.seconds - fewer.seconds, self.num_bytes - fewer.num_bytes)
        return Cost(self.count - fewer.count, *values, self.memory)


def write_tars(folder: Path, photographs: list[Path], *, tars: int, in_tar: int) -> float:
    """Write tars as img2dataset does; return the mean bytes of an image in them."""
    folder.mkdir()
    files = [_resized(path) for path in photographs]
    for number in range(tars):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for place in range(in_tar):
                key, content = f"{number:05d}{place:04d}", files[(number + place) % len(files)]
                if place % 200 == 0:
                    content = content[: len(content) // 2]
                meta = json.dumps({"url": f"https://host/{key}.jpg", "status": "success"}).encode()
                for suffix, member in (("jpg", content), ("json", meta), ("txt", b"a caption")):
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(member)
                    tar.addfile(info, io.BytesIO(member))
        stats = {"count": in_tar, "successes": in_tar}
        (folder / f"{number:05d}_stats.json").write_text(json.dumps(stats))
    return sum(path.stat().st_size for path in folder.glob("*.tar")) / (tars * in_tar)


def _resized(path: Path) -> bytes:
    """Return a photograph with a shorter side of 256 pixels, as JPEG of quality 95."""
    image = Image.open(path)
    scale = SIDE / min(image.size)
    size = (round(image.width * scale), round(image.height * scale))
    written = io.BytesIO()
    image.resize(size).save(written, "JPEG", quality=95)
    return written.getvalue()


def measured(folder: Path, tars: int, *, words: list[str], out: str, count: int) -> Cost:
    """Run a verb on the first tars in a separate process; `{out}` in a word is the folder."""
    source = f"{folder}/{{00000..{tars - 1:05d}}}.tar"
    words = [word.format(out=folder.parent / out) for word in words]
    told = _in_a_child("--verb", *words, source, "--out", str(folder.parent / out))
    paths = (folder.parent / out).rglob("shard-*")
    return Cost(count, told[0], sum(path.stat().st_size for path in paths), told[1])


def _in_a_child(*words: str) -> tuple[float, float]:
    """Return CPU seconds and peak memory of this program with other words."""
    command = [sys.executable, "-m", "benchmarks.web_scale", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)  # noqa: S603 - ourselves
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    return seconds, memory


def verb_here(words: list[str]) -> None:
    """Run a verb of `data_tools`; print CPU seconds without imports, and peak memory."""
    begin = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        run_verb(*words)
    print(json.dumps([time.process_time() - begin, peak_memory()]))


def decide_here(count: int) -> None:
    """Find near-duplicates among synthetic measurements; print seconds and additional memory."""
    random = np.random.default_rng(0)
    table = np.empty(count, TABLE)
    table["width"], table["height"] = random.integers(64, 1_024, (2, count))
    table["perceptual"] = random.integers(0, 2**64, count, np.uint64)
    copies = count // _SHARE
    flips = np.uint64(1) << random.integers(0, 64, copies, np.uint64)
    table["perceptual"][:copies] = table["perceptual"][copies : 2 * copies] ^ flips
    reason = np.full(count, "", object)
    thresholds = Thresholds(64, 3.0, _NEAR, keep_duplicates=False, min_likeness=None, like_count=0)
    before, begin = peak_memory(), time.process_time()
    drop_near(table, reason, thresholds, Reference.of(Excluded(), ()))
    seconds, memory = time.process_time() - begin, peak_memory() - before
    assert copies * 0.99 < (reason != "").sum() < copies * 1.01
    print(json.dumps([seconds, memory + table.nbytes + reason.nbytes]))


def report(options: argparse.Namespace, root: Path) -> None:
    """Measure, and print the tables of `docs/data.md`."""
    (root / "images").mkdir()
    photographs = write_crops(root / "images", count=options.photographs)
    run_verb("palette", "fit", root / "images", "--out", root / "p.npy", "--pixels", 100_000)
    mean = write_tars(root / "web", photographs, tars=options.tars, in_tar=options.in_tar)
    sizes = (max(options.tars // 4, 1), options.tars)
    palette = ["palette", "shards", "--size", "64", "--palette", str(root / "p.npy")]
    verbs = {
        "filter, measuring": ["filter", "--keep-duplicates"],
        "palette shards, 64²": palette,
        "both at once": [*palette, "--measure", "{out}_measured"],
    }
    costs: dict[str, list[Cost]] = {}
    for name, words in verbs.items():
        costs[name] = [
            measured(
                root / "web",
                tars,
                words=words,
                out=f"{name.split()[0].strip(',')}{tars}",
                count=tars * options.in_tar,
            )
            for tars in sizes
        ]
    decisions = {
        n: _in_a_child("--decide", str(n)) for n in (options.decided // 4, options.decided)
    }
    print(f"{processor()}; {machine()}")
    print(f"{mean:,.0f} bytes an image in the tars of {options.in_tar}")
    print("| step | CPU seconds a million | memory at fewer | memory at more |\n|---|---|---|---|")
    for name, (fewer, more) in costs.items():
        seconds = more.since(fewer).seconds / more.since(fewer).count * MILLION
        memory = [f"{one.memory / 1e6:.0f} MB at {one.count:,}" for one in (fewer, more)]
        print(f"| {name} | {seconds:,.0f} | {' | '.join(memory)} |")
    taken = [f"{seconds / n * MILLION:.1f}" for n, (seconds, _) in decisions.items()]
    memory = [f"{most / n:.0f} bytes an image at {n:,}" for n, (_, most) in decisions.items()]
    print(f"| near-duplicates | {' and '.join(taken)} | {' | '.join(memory)} |")
    marginal = [more.since(fewer) for fewer, more in costs.values()]
    _print_hours(marginal, decisions, mean)


def _print_hours(costs: list[Cost], decisions: dict[int, tuple[float, float]], mean: float) -> None:
    """Print hours and bytes for a hundred million images, by arithmetic.

    Args:
        costs: costs of measuring, of writing, and of both at once.
    """
    count, (seconds, memory) = max(decisions.items())
    deciding = seconds / count * IMAGES * _search_cost(IMAGES) / _search_cost(count) / 3600
    print(f"a hundred million, {CORES} cores a machine, scaled:")
    print("| machines | measuring | near-duplicates | writing | in all | each reads", end=" | ")
    print("both at once | in all | each reads |\n|---|---|---|---|---|---|---|---|---|")
    for machines in MACHINES:
        measuring, writing, both = (
            one.seconds / one.count * IMAGES / 3600 / machines / CORES for one in costs
        )
        gigabytes = mean * IMAGES / machines / 1e9
        cells = [f"{one:.2f} h" for one in (measuring, deciding, writing)]
        cells += [f"{measuring + deciding + writing:.2f} h", f"{2 * gigabytes:,.0f} GB"]
        cells += [f"{both:.2f} h", f"{both + deciding:.2f} h", f"{gigabytes:,.0f} GB"]
        print(f"| {machines} | {' | '.join(cells)} |")
    written = [one.num_bytes / one.count * IMAGES for one in costs[:2]]
    print(f"tars {mean * IMAGES / 1e12:.2f} TB, measurements {written[0] / 1e9:.0f} GB,", end=" ")
    print(f"shards and their indexes {written[1] / 1e9:.0f} GB,", end=" ")
    print(f"memory of the decision {memory / count * IMAGES / 1e9:.1f} GB")


def _search_cost(count: int) -> float:
    """Return the expected cost per image of the search for near-duplicates."""
    return search_cost(count, best_bands(count, distance=_NEAR), distance=_NEAR)


def main() -> None:
    """Run the benchmark."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--photographs", type=int, default=50, help="different ones; default: 50")
    made.add_argument("--tars", type=int, default=8, help="default: 8")
    made.add_argument("--in-tar", type=int, default=IN_TAR, help=f"images; default: {IN_TAR}")
    made.add_argument("--decided", type=int, default=8 * MILLION, help="made-up images")
    made.add_argument("--decide", type=int, help=argparse.SUPPRESS)  # in a child
    made.add_argument("--verb", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.decide:
        decide_here(options.decide)
    elif options.verb:
        verb_here(options.verb)
    else:
        with tempfile.TemporaryDirectory() as root:
            report(options, Path(root))


if __name__ == "__main__":
    main()
