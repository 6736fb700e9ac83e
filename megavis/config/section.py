"""Base class for the sections of a YAML file, and choices that config keys and layers share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

ConfigIssue = tuple[str, str]
"""The wrong key, and a sentence that says what would be right."""

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

OrderKind = Literal["raster", "nested_raster", "round_robin", "random"]
PositionKind = Literal["none", "learned", "sincos", "rope_1d", "rope_2d", "relative_2d"]
ScaleActivation = Literal["squareplus", "softplus"]
Activation = Literal["quick_gelu", "gelu", "gelu_tanh"]
DecoderKind = Literal["linear", "mlp", "transformer"]
DashboardKind = Literal["tensorboard", "wandb", "mlflow", "jsonl"]
"""Where the numbers of a run are shown; `jsonl` is the record that every run writes."""
KernelLibrary = Literal["auto", "torch", "apex", "transformer_engine"]


class Section(BaseModel):
    """A group of keys: strict types, no unknown keys, immutable once read."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    sampling_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that affect only sampling, neither weights nor losses."""
