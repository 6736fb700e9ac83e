"""The config keys of iGPT (sections 2.1, 3.2 and 4.6 of the paper)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

import numpy as np
from pydantic import BeforeValidator, Field

from megavis.composition.shared_keys import check_tokens, check_vocabulary
from megavis.config.schema import ConfigIssue, ObjectiveConfig, Positive, RunConfig
from megavis.config.section import AtLeast0, OrderKind


# Above the class: pydantic completes a class when it is created, and subclasses in other modules
# inherit its fields only then.
def read_order(value: object) -> object:
    """Parse `order`: a kind, a list of pixels, or a `.npy` file with such a list.

    The file is replaced by its content, so that a run does not depend on it and cannot resume with
    another order.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, str) and value.endswith(".npy"):
        return _read_file(Path(value))
    if isinstance(value, str) and value not in get_args(OrderKind):
        raise ValueError(f"must be one of {', '.join(get_args(OrderKind))} or a .npy file")
    # Compared as text: elements of a YAML list can be of any type.
    if isinstance(value, list | tuple) and {*map(str, value)} != {*map(str, range(len(value)))}:
        raise ValueError("must list every pixel, counted from 0, once")
    return value


def _read_file(path: Path) -> tuple[int, ...]:
    try:
        pixels = np.load(path, allow_pickle=False)
    except (OSError, ValueError):
        raise ValueError("must be a file written by numpy.save") from None
    is_vector = isinstance(pixels, np.ndarray) and pixels.ndim == 1
    if not is_vector or not np.array_equal(np.sort(pixels), np.arange(len(pixels))):
        raise ValueError(
            "must contain a permutation: a vector of every pixel, counted from 0, once"
        )
    return tuple(int(pixel) for pixel in pixels)


class IGPTConfig(ObjectiveConfig):
    """Config keys of iGPT."""

    host_milliseconds: ClassVar[tuple[float, float] | None] = (2.7, 5.6)

    name: Literal["igpt"] = "igpt"
    mode: Literal["autoregressive", "bert"] = "autoregressive"
    """L_AR or L_BERT of section 2.1."""
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """BERT: probability that a pixel is masked."""
    vocabulary_size: Annotated[int, Field(gt=1)] = 512
    """Colours of the palette (section 3.2)."""
    logits_std: AtLeast0 = 0.0
    """Initial standard deviation of the projection to logits. The paper found small gains from 0
    (appendix A.1)."""
    order: Annotated[
        str | Annotated[tuple[int, ...], Field(strict=False)], BeforeValidator(read_order)
    ] = "raster"
    """Autoregressive order π of the pixels, the same for all images: `raster`, `nested_raster`,
    `round_robin`, `random` (drawn once per run), or a `.npy` file with the raster index of the
    pixel at each position, whose content is copied into the run's config."""
    order_block: Positive = 4
    """Side of a block in pixels, for `nested_raster` and `round_robin`."""

    @property
    def no_images(self) -> str | None:
        """Why models of this config cannot generate images; None if they can."""
        if self.mode == "autoregressive":
            return None
        return (
            "a model of objective.mode bert cannot be sampled pixel by pixel; train one with"
            " objective.mode autoregressive"
        )

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check the order, and that the tensor size divides vocabulary and tokens."""
        num_pixels = config.data.image_size**2
        yield from check_vocabulary(config, self.vocabulary_size)
        yield from check_tokens(config, num_pixels, what=f"{num_pixels} pixels")
        yield from self._check_order(config.data.image_size)

    def _check_order(self, side: int) -> Iterator[ConfigIssue]:
        if not isinstance(self.order, str):
            if len(self.order) != side**2:
                yield (
                    "objective.order",
                    f"lists {len(self.order)} pixels; images of data.image_size {side} have"
                    f" {side**2}",
                )
        elif self.order in ("nested_raster", "round_robin") and side % self.order_block:
            text = f"{self.order_block} does not divide data.image_size {side}"
            yield "objective.order_block", text
