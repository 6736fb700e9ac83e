"""What a YAML file may say about images: where they come from, and what is cut out of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from megavis.config.section import (
    Above0,
    AtLeast0,
    Fraction,
    NonNegative,
    Positive,
    Section,
    Share,
)


class MixedSource(Section):
    """One of several shard folders that training mixes."""

    path: str
    """Folder of shards."""
    weight: Above0
    """Share of the training images that come from it; weights need not sum to 1."""


def _form(train: object) -> str:
    return UNION_LABELS[isinstance(train, list | tuple)]


# The labels of the two forms are not keys: `SchemaNames` takes them out of what pydantic reports.
UNION_LABELS = ("one folder", "several folders")
TrainData = Annotated[
    Annotated[str, Tag(UNION_LABELS[0])]
    | Annotated[tuple[MixedSource, ...], Field(strict=False), Tag(UNION_LABELS[1])],
    Discriminator(_form),
]


class DataConfig(Section):
    """Where the images come from."""

    train: TrainData
    """Folder of training shards (made by `python -m data_tools`) or its URL, or a list of folders,
    each with `path` and `weight`, that are mixed."""
    validation: str | None = None
    """Folder of held-out shards; without it no validation loss is computed."""
    cache: str | None = None
    """Local folder in which data sets are kept that are read from a URL."""
    image_size: NonNegative = 0
    """Side of the square images in pixels; without a crop it must be that of the shards. Frames
    have none."""
    frames: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = None
    """Frames of a sample and numbers of a frame, where shards hold no images but frames."""
    palette: str | None = None
    """Palette with which JPEG shards are read as colours: a file of `data_tools palette fit`. With
    it, the augmentation of images is that of JPEG shards."""
    crop: Literal["random_resized", "scaled", "window", "shifted", "center", "none"] = "none"
    """What is cut out of images when they are read. Of JPEG shards alone: `random_resized` a random
    part, resized; `scaled` a random square of `crop_size`, once the shorter side has a random
    length of `short_sides`, resized (iGPT, section 3.1); `center` the middle, resized. Of palette
    shards too: `window` a random square out of larger stored images, and `shifted` moves training
    images by up to 4 pixels. `none`: nothing. Validation reads the middle."""
    border: Literal["reflect", "zeros"] = "reflect"
    """With `shifted`: what comes into sight at the border, the image's reflection or zeros (black;
    of palette shards the first colour)."""
    short_sides: Annotated[tuple[Positive, Positive], Field(strict=False)] = (256, 384)
    """With `scaled`: smallest and largest length of the shorter side."""
    crop_size: Positive = 224
    """With `scaled`: side of the square in pixels before it is resized to `image_size`; in
    validation the shorter side, too."""
    scale: Annotated[tuple[Share, Share], Field(strict=False)] = (0.2, 1.0)
    """Smallest and largest share of an image's area that a `random_resized` crop takes."""
    aspect: Annotated[tuple[Above0, Above0], Field(strict=False)] = (3 / 4, 4 / 3)
    """Smallest and largest width / height of such a crop."""
    short_side: Positive | None = None
    """What the shorter side is resized to before the middle is cut; `image_size` when absent."""
    flip: bool = False
    """Mirror every second training image, at random; ids cannot, and latents must hold the
    mirrored ones too."""
    rand_augment: (
        Annotated[tuple[Annotated[float, Field(ge=0, le=10)], AtLeast0], Field(strict=False)] | None
    ) = None
    """RandAugment of training images, of JPEG shards alone: magnitude of 10, and its deviation from
    one operation to the next; none when absent."""
    random_erasing: Fraction = 0.0
    """Probability that a rectangle of a training image becomes noise, of JPEG shards alone, after
    all else."""
    repeats: Positive = 1
    """Repeated Augmentation: so many samples with draws of their own come from one image, 32
    samples apart; an epoch of so many samples sees that share of the images."""
    threads: Positive = 4
    """Threads of each process that read and decode ahead; they change the speed alone."""

    @property
    def train_sources(self) -> tuple[MixedSource, ...]:
        """The training folders, one or several."""
        if isinstance(self.train, str):
            return (MixedSource(path=self.train, weight=1.0),)
        return self.train
