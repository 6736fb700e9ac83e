"""Features of a trained network, for the classifier of `filter --like`.

This is the only data tool that opens a run of any paper; all others need only tokenizers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from data_tools import __version__
from data_tools.resize import RESIZE
from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import MANIFEST
from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file
from megavis.data.format.manifest import (
    FORMAT_VERSION,
    PALETTE_NAME,
    Manifest,
    Preparation,
    SourceIdentity,
)

if TYPE_CHECKING:  # slow to import, and only needed for measuring
    from megavis.notebook import Run

_BICUBIC = Image.Resampling.BICUBIC


@dataclass(frozen=True)
class RunFeatures:
    """Output of the norm in the middle of a run's network, averaged over tokens.

    The middle layers of generative models have the best features (Generative Pretraining
    from Pixels, section 4.1).

    Attributes:
        run_folder: of the run, opened once per process.
        sha256: of the manifest of its newest checkpoint, which has the hashes of all weights.
        width: D, features per image.
    """

    run_folder: Path
    sha256: str
    width: int

    @classmethod
    def open(cls, run_folder: Path) -> RunFeatures:
        """Open the newest checkpoint of a run, which must have layers and take images."""
        sha256 = _identity(run_folder)
        run = _opened(run_folder.resolve(), sha256)
        if not run.config.model.num_layers or not _takes_pictures(run):
            raise UserError(f"{run_folder} has no layers or no image inputs: choose another run")
        return cls(run_folder.resolve(), sha256, run.config.model.hidden_size)

    def __call__(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Return features float32 `[n, D]` of images uint8 `[h, w, 3]` of any size.

        Images are resized to the network's input without regard to their aspect ratio, as in the
        measurement of colour and texture.
        """
        if not pictures:
            return np.empty((0, self.width), np.float32)
        run = _opened(self.run_folder, self.sha256)
        size = (run.config.data.image_size,) * 2
        squares = [np.asarray(Image.fromarray(each).resize(size, _BICUBIC)) for each in pictures]
        middle = run.config.model.num_layers // 2
        features: np.ndarray = run.features(np.stack(squares), layer=middle).cpu().numpy()
        return features


def _identity(run_folder: Path) -> str:
    checkpoint = latest_checkpoint(run_folder)
    if checkpoint is None:
        raise UserError(f"{run_folder} has no checkpoint: give the folder of a trained run")
    return sha256_of_file(checkpoint / MANIFEST)


def _takes_pictures(run: Run) -> bool:
    if (run.folder / PALETTE_NAME).exists():
        return True
    pictures = Manifest(
        format_version=FORMAT_VERSION,
        kind="jpeg",
        image_size=run.config.data.image_size or None,
        preparation=Preparation(resize=RESIZE, crop="none", decoders={}),
        class_names=(),
        shards=(),
        skipped={},
        seed=0,
        source=SourceIdentity(description="a picture", num_files=0, sha256="0" * 64),
        tool_version=__version__,
    )
    return not list(run.objective.check_data(pictures))


@functools.lru_cache(maxsize=1)
def _opened(run_folder: Path, sha256: str) -> Run:
    import torch

    from megavis.notebook import Run

    torch.set_num_threads(1)  # the same summation order on any machine
    if _identity(run_folder) != sha256:
        raise UserError(f"{run_folder} was trained further since this job began: use another --out")
    return Run.open(run_folder, device="cpu")
