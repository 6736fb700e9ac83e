"""A stand-in for NVIDIA Transformer Engine in plain PyTorch, for tests on a CPU.

What megavis uses has the signatures of version 2.20.2 (`signatures.json`, read from its sources).
FP8 is emulated: tensors are rounded to `torch.float8_e4m3fn` and `torch.float8_e5m2` with one scale
each, and multiplied in float32. What Megatron-Core only names when it is imported is empty.
"""

from . import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
