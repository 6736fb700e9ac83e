"""Records of measurements in one checkout, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, Any]
"""Arrays or JSON values by name of the measurement. Times are under `seconds/...`."""

SECONDS = "seconds/"


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as `path`.json and `path`.npz."""
    arrays = {key: value for key, value in record.items() if isinstance(value, np.ndarray)}
    rest = {key: value for key, value in record.items() if key not in arrays}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(rest, indent=1), encoding="utf-8")
    with path.with_suffix(".npz").open("wb") as file:
        # Keys have slashes and may be `file`, so they cannot be keyword arguments.
        np.savez(file, names=np.array(list(arrays)), **_numbered(arrays))


def read(path: Path) -> Record:
    """Read a record."""
    record: Record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    with np.load(path.with_suffix(".npz")) as archive:
        names = archive["names"].tolist()
        return record | {name: archive[f"a{i}"] for i, name in enumerate(names)}


def _numbered(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {f"a{i}": value for i, value in enumerate(arrays.values())}
