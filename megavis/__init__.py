"""megavis: pretraining of generative vision Transformers in any parallel layout.

Importing the package is cheap: torch, DeepSpeed and Megatron-Core are imported when the
first function that needs them is called.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megavis.notebook import Run

__version__ = "0.1.0"

# On import, Megatron-Core prints this four times, about optimizers and kernels that megavis does
# not use. Set the filter before any of our modules imports it. Other warnings are shown.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")

# Float32 is float32 unless `training.tf32` says otherwise, and a softmax over at most four keys
# needs no fast form.
for _message in ("TensorFloat32 tensor cores for float32", r"\s*Online softmax is disabled"):
    warnings.filterwarnings("ignore", message=_message)

# torch logs that CUDA is missing if a toolkit is installed without a GPU, DeepSpeed that it uses
# the CPU; `megavis doctor` reports what this machine provides.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
logging.getLogger("DeepSpeed").addFilter(
    lambda record: not record.getMessage().startswith("Setting accelerator to CPU")
)


def load(run_folder: str, **options: Any) -> Run:
    """Open a finished or running training run on this process, whatever layout saved it.

    Args:
        run_folder: `runs/<name>`, as written by `megavis train`.
        **options: `step` (of the checkpoint; default: the one that fine-tuning chose, or else
            the newest), `device`, `dtype`, `image_size`.

    Returns:
        The run, with `.outputs`, `.features`, `.loss`, `.sample` and `.config`.
    """
    from megavis.notebook import Run

    return Run.open(run_folder, **options)
