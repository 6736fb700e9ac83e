"""Statistics of reference images as `.npz` files.

`mu` and `sigma`, and `mu_s` and `sigma_s` of spatial features, have the names of pytorch-fid and of
ADM's reference batches, so files are interchangeable with these tools. megavis's files also have
`features` of some images, for precision and recall, and `about`, a JSON description of network and
images. ADM's files also have some of the images in `arr_0`.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file, write_atomically
from megavis.evaluation.images.feature_networks import NetworkName
from megavis.evaluation.images.generation import FeatureSummary
from megavis.evaluation.images.set_metrics import Gaussian


def write_statistics(path: Path, summary: FeatureSummary) -> None:
    """Write the summary of a set of images. Raises OSError."""
    assert summary.network is not None
    about = {
        "images": summary.source,
        "images_sha256": summary.sha256,
        "num_images": summary.num_images,
        "network": vars(summary.network),
    }
    arrays = _named("", summary.gaussian) | {"about": np.array(json.dumps(about))}
    if summary.spatial is not None:
        arrays |= _named("_s", summary.spatial)
    if summary.features is not None:
        arrays["features"] = summary.features.numpy()
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())


def holds_statistics(path: Path) -> bool:
    """Return whether the file is an `.npz` with `mu`."""
    try:
        with zipfile.ZipFile(path) as file:
            return "mu.npy" in file.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def read_statistics(path: Path) -> FeatureSummary:
    """Read statistics written by megavis or another tool.

    Raises:
        UserError: the file is damaged, or has other content.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            # Skip arr_0 of ADM's files, which has 2 GB.
            arrays = {name: file[name] for name in file.files if name != "arr_0"}
        about = json.loads(str(arrays["about"])) if "about" in arrays else {}
        network = NetworkName(**about["network"]) if about else None
        gaussian = _gaussian(arrays, "")
        spatial = _gaussian(arrays, "_s") if "mu_s" in arrays else None
    except (KeyError, TypeError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a statistics file: {error}") from None
    features = torch.from_numpy(arrays["features"]) if "features" in arrays else None
    return FeatureSummary(
        network,
        str(path),
        sha256_of_file(path),
        about.get("num_images"),
        gaussian,
        spatial,
        features,
    )


def _named(suffix: str, gaussian: Gaussian) -> dict[str, np.ndarray]:
    names = {f"mu{suffix}": gaussian.mean, f"sigma{suffix}": gaussian.covariance}
    return {name: tensor.numpy() for name, tensor in names.items()}


def _gaussian(arrays: dict[str, np.ndarray], suffix: str) -> Gaussian:
    mean, covariance = _float(arrays[f"mu{suffix}"]), _float(arrays[f"sigma{suffix}"])
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        shapes = f"{list(mean.shape)} and {list(covariance.shape)}"
        raise ValueError(f"mu{suffix} and sigma{suffix} have shapes {shapes}")
    return Gaussian(mean, covariance)


def _float(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.float64))
