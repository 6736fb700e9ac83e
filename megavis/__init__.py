"""megavis: pretraining of generative vision Transformers on any parallel layout.

Importing the package costs nothing: torch, DeepSpeed and Megatron-Core are imported when the
first function that needs them is called.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megavis.notebook import Run

__version__ = "0.1.0"

# Megatron-Core says so four times when it is imported, of optimizers and kernels that megavis does
# not take from it; here, before any module of ours can import it. Its other warnings are shown.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")


def load(run_folder: str, **options: Any) -> Run:
    """Open a finished or running training run on this process, whatever layout saved it.

    Args:
        run_folder: `runs/<name>`, as `megavis train` wrote it.
        **options: `step` (an older checkpoint), `device`, `dtype`, `image_size`.

    Returns:
        The run, with `.outputs`, `.features`, `.loss`, `.sample` and `.config`.
    """
    from megavis.notebook import Run

    return Run.open(run_folder, **options)
