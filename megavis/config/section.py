"""Base class for the sections of a YAML file."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

ConfigIssue = tuple[str, str]
"""The wrong key, and a sentence that says what would be right."""

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A group of keys: strict types, no unknown keys, immutable once read."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    sampling_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that affect only sampling, neither weights nor losses."""
