"""Find the raw data in a folder, and list the commands that make shards of it."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results.digits import is_digits, link_digits
from benchmarks.results.tasks import DataSet, Task
from megavis.config.errors import UserError

HELD_OUT = 0.1
"""Share of CIFAR-10's training images for selection, which are never trained on."""
_PARTS = {"train": ("train", 0.15), "selection": ("validation", 0.004), "test": ("test", 0.02)}
"""Name of a part of CIFAR-10, its `--split`, and the share that a small study keeps."""
_MNIST = "*train-images-idx3-ubyte*"


NAMES: Mapping[DataSet, str] = {
    "cifar10": "CIFAR-10",
    "mnist": "MNIST",
    "digits": "spoken digits",
}


@dataclass(frozen=True)
class Sources:
    """Folders of the raw data; None if missing.

    Attributes:
        cifar10: the folder of its authors' files, or one with `train/` and `test/`.
        has_class_folders: whether it has `train/` and `test/`.
        mnist: the folder of its authors' files.
        digits: the folder of the recordings.
    """

    cifar10: Path | None = None
    has_class_folders: bool = False
    mnist: Path | None = None
    digits: Path | None = None

    def place(self, data: DataSet) -> Path | None:
        """Return the folder of a data set."""
        return {"cifar10": self.cifar10, "mnist": self.mnist, "digits": self.digits}[data]


def find_sources(data: Path, unpacked: Path) -> Sources:
    """Find the data sets in a folder; archives among its files are unpacked first.

    Args:
        data: the user's folder, which is only read.
        unpacked: where archives are unpacked, once.

    Raises:
        UserError: there is no such folder, it holds no data set, or an archive is damaged.
    """
    if not data.is_dir():
        raise UserError(f"{data}: no such folder; give the one with the data (DATA=folder)")
    for archive in sorted(data.glob("*.tar*")):
        _unpack(archive, unpacked)
    places = [*_places(data), *_places(unpacked)]
    classes = next((place for place in places if _has_classes(place)), None)
    batches = next((place for place in places if any(place.glob("data_batch_1*"))), None)
    mnist = next((place for place in places if any(place.glob(_MNIST))), None)
    digits = next((place for place in places if is_digits(place)), None)
    found = Sources(classes or batches, classes is not None, mnist, digits)
    if all(found.place(name) is None for name in NAMES):
        raise UserError(
            f"{data} holds no data set: neither CIFAR-10 (train/ and test/ with a folder for each"
            " class, or data_batch_1...) nor MNIST (train-images-idx3-ubyte...) nor spoken digits"
            " (7_speaker_0.wav or 7/speaker_0.wav)"
        )
    return found


def _places(folder: Path) -> Iterator[Path]:
    """Yield a folder and the folders in it."""
    if folder.is_dir():
        yield folder
        yield from sorted(path for path in folder.iterdir() if path.is_dir())


def _has_classes(place: Path) -> bool:
    return all((place / part / "airplane").is_dir() for part in ("train", "test"))


def _unpack(archive: Path, folder: Path) -> None:
    done = folder / f"{archive.name}.unpacked"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (OSError, EOFError, tarfile.TarError) as error:
        raise UserError(f"{archive} cannot be unpacked: {error}") from None
    done.touch()


def shard_tasks(sources: Sources, reads: str, folder: Path, *, small: bool) -> Iterator[Task]:
    """Yield the commands that make the shards that a method reads.

    Args:
        sources: folders of the raw data.
        reads: `cifar10`, JPEG files of 32²; `cifar10_16`, tokens of 16²; `mnist` or `digits`.
        folder: folder of the study, in which recordings of digits are linked.
        small: make shards of few images.
    """
    if reads == "digits" and sources.digits is not None:
        link_digits(sources.digits, folder / "digits")
        words = ["speech", "digits", "--resample", "--out", "shards/digits"]
        yield Task.data(words, Path("shards/digits/test/manifest.json"))
    if reads == "mnist" and sources.mnist is not None:
        yield from _mnist(sources.mnist, small=small)
    if reads.startswith("cifar10") and sources.cifar10 is not None:
        yield from _cifar10(sources.cifar10, sources.has_class_folders, small=small)
    if reads == "cifar10_16":
        yield from _tokens()


def _cifar10(folder: Path, has_class_folders: bool, *, small: bool) -> Iterator[Task]:
    whole = "shards/whole" if small else "shards/cifar10"
    for part, (split, _) in _PARTS.items():
        words = ["jpeg", str(folder), "--split", split]
        if has_class_folders:
            words = ["jpeg", str(folder / ("test" if part == "test" else "train"))]
            words += [] if part == "test" else ["--split", split]
        if part != "test":
            words += ["--validation-share", str(HELD_OUT)]
        yield _write([*words, "--size", "32", "--lossless"], f"{whole}/{part}", f"{whole}/train")
    if small:
        for part, (_, share) in _PARTS.items():
            words = ["jpeg", f"{whole}/{part}", *_share(share), "--size", "32", "--lossless"]
            yield _write(words, f"shards/cifar10/{part}", f"{whole}/train")


def _tokens() -> Iterator[Task]:
    words = ["palette", "fit", "shards/cifar10/train", "--num-colors", "512", "--size", "16"]
    yield Task.data([*words, "--out", "palette.npy"], Path("palette.npy"))
    for part in _PARTS:
        words = ["palette", "shards", f"shards/cifar10/{part}", "--palette", "palette.npy"]
        out = f"shards/cifar10_16/{part}"
        yield _write([*words, "--size", "16"], out, "shards/cifar10/train")


def _mnist(folder: Path, *, small: bool) -> Iterator[Task]:
    yield Task.data(["palette", "grey", "--out", "grey.npy"], Path("grey.npy"))
    for part, split in (("train", _share(0.03) if small else ["--split", "all"]), ("test", None)):
        words = ["palette", "shards", str(folder), *(split or ["--split", "test"])]
        yield _write([*words, "--palette", "grey.npy", "--size", "28"], f"shards/mnist/{part}")


def _share(share: float) -> list[str]:
    return ["--split", "validation", "--validation-share", str(share)]


def _write(words: list[str], out: str, classes: str = "") -> Task:
    """Return the task that writes a shard folder, with the class numbers of another one."""
    if classes and classes != out:
        words = [*words, "--classes-from", classes]
    return Task.data([*words, "--out", out], Path(out) / "manifest.json")
