"""Choices shared by config keys and layers."""

from __future__ import annotations

from typing import Literal

OrderKind = Literal["raster", "nested_raster", "round_robin", "random"]
PositionKind = Literal["none", "learned", "sincos", "rope_1d", "rope_2d", "relative_2d"]
ScaleActivation = Literal["squareplus", "softplus"]
Activation = Literal["quick_gelu", "gelu", "gelu_tanh"]
DecoderKind = Literal["linear", "mlp", "transformer"]

DashboardKind = Literal["tensorboard", "wandb", "mlflow", "jsonl"]
"""Where the numbers of a run are shown; `jsonl` is the record that every run writes."""
KernelLibrary = Literal["auto", "torch", "apex", "transformer_engine"]

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Pattern of the names of run folders."""
RUN_NAME_RULE = (
    "a run's name has only letters, digits, '.', '_' and '-', and begins with a letter or digit"
)
