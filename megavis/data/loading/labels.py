"""Compare the classes of shard folders with a classifier's and with each other's."""

from __future__ import annotations

from pathlib import Path

from megavis.config.errors import UserError, counted
from megavis.data.loading.blended_dataset import Samples

_ADVICE = "write its shards with --classes-from, the folder of data.train"


def check_labels(key: str, dataset: Samples) -> None:
    """Raise UserError, with the data set's config key, unless every image has a class."""
    missing = int((dataset.labels < 0).sum())
    if missing:
        found = counted(missing, "image")
        text = f"{dataset.directory} holds {found} without a label, of {len(dataset)} in all"
        raise UserError(text, key=key)


def check_classes(
    key: str, where: Path, found: tuple[str, ...], num_classes: int, class_names: tuple[str, ...]
) -> None:
    """Check that a data set distinguishes the classes that a network predicts.

    Args:
        key: the config key of the data set.
        where: its folder.
        found: its class names.
        num_classes: `finetune.num_classes`.
        class_names: class names of the training shards.

    Raises:
        UserError: it does not; names the key.
    """
    others = _other_classes(found, class_names)
    if len(found) != num_classes:
        count = counted(len(found), "class", "classes")
        text = f"{where} has {count}; finetune.num_classes is {num_classes}{others}"
        raise UserError(text, key=key)
    if found != class_names:
        text = f"{where} numbers its classes differently from data.train{others or f': {_ADVICE}'}"
        raise UserError(text, key=key)


def _other_classes(found: tuple[str, ...], known: tuple[str, ...]) -> str:
    """Return how the classes of a data set differ from data.train's, and what to do.

    Empty if they are the same.
    """
    unknown = [name for name in found if name not in known]
    missing = [name for name in known if name not in found]
    if unknown:
        return (
            f"; data.train has no class {unknown[0]!r}: remove its images, or add the class there"
        )
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"; it lacks {missing[0]!r}{more} of data.train: {_ADVICE}"
