"""Recipes of FP8."""

from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    """Formats of the forward and of the backward pass, by their largest numbers."""

    E4M3 = (448, 448)
    HYBRID = (448, 57344)


@dataclass
class DelayedScaling:
    """Only a name, of which Megatron-Core derives a class."""


@dataclass
class Float8CurrentScaling:
    """Scale each tensor by its own maximum."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: object = None
    fp8_gemm_dgrad: object = None
    fp8_gemm_wgrad: object = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
