"""Compare the classes of shard folders with a network's and with each other's."""

from __future__ import annotations

from pathlib import Path

from megavis.config.errors import UserError, counted
from megavis.data.loading.blended_dataset import Samples


def check_labels(key: str | None, dataset: Samples) -> None:
    """Raise UserError, with the data set's config key if any, unless every image has a class."""
    missing = int((dataset.labels < 0).sum())
    if missing:
        found = counted(missing, "image")
        text = f"{dataset.directory} holds {found} without a label, of {len(dataset)} in all"
        raise UserError(text, key=key)


def check_count(key: str | None, where: Path, found: tuple[str, ...], num_classes: int) -> None:
    """Raise UserError, with the data set's key, unless it has as many classes as a network.

    Args:
        key: the config key that names the data set, if one does.
        where: its folder.
        found: its class names.
        num_classes: `finetune.num_classes`.
    """
    if len(found) != num_classes:
        count = counted(len(found), "class", "classes")
        raise UserError(f"{where} has {count}; finetune.num_classes is {num_classes}", key=key)


def check_numbering(
    where: Path,
    found: tuple[str, ...],
    trained: tuple[str, ...],
    *,
    source: str = "data.train",
    folder: str = "the folder of data.train",
    may_lack_last: bool = False,
    key: str | None = None,
) -> None:
    """Check that a data set numbers its classes as the training set of a network does.

    Args:
        where: the folder of the data set.
        found: its class names by label.
        trained: class names of the training set by label.
        source: what the training set is called in the message.
        folder: what the message gives to `--classes-from`.
        may_lack_last: accept a data set without the last classes, such as one written for the first
            of several training folders.
        key: the config key that names the data set.

    Raises:
        UserError: it does not; says which class is missing or unknown, and what to do.
    """
    if found == trained or (may_lack_last and found and found == trained[: len(found)]):
        return
    unknown = [name for name in found if name not in trained]
    missing = [name for name in trained if name not in found]
    advice = f"write its shards with --classes-from, {folder}"
    why = f": {advice}"
    if unknown:
        why = f"; {source} has no class {unknown[0]!r}: remove its images"
    elif missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        why = f"; it lacks {missing[0]!r}{more} of {source}: {advice}"
    raise UserError(f"{where} numbers its classes differently from {source}{why}", key=key)
