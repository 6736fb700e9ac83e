"""Schema of the `data` section: sources of images, crops and augmentation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from megavis.config.section import Above0, AtLeast0, Fraction, NonNegative, Positive, Section, Share

# The labels of the two forms are not keys: `SchemaNames` removes them from pydantic's errors.
UNION_LABELS = ("one folder", "several folders")


class MixedSource(Section):
    """One of several shard folders to mix in training."""

    path: str
    """Folder of shards."""
    weight: Above0
    """Share of the training images from this folder; weights need not sum to 1."""


def _form(train: object) -> str:
    return UNION_LABELS[isinstance(train, list | tuple)]


TrainData = Annotated[
    Annotated[str, Tag(UNION_LABELS[0])]
    | Annotated[tuple[MixedSource, ...], Field(strict=False), Tag(UNION_LABELS[1])],
    Discriminator(_form),
]


class DataConfig(Section):
    """Sources of images, crops and augmentation."""

    train: TrainData
    """Folder of training shards (made by `python -m data_tools`) or its URL, or a list of folders
    to mix, each with `path` and `weight`."""
    validation: str | None = None
    """Folder of held-out shards; without it there is no validation loss."""
    cache: str | None = None
    """Local folder that caches data sets read from a URL."""
    image_size: NonNegative = 0
    """Side of the square images in pixels; without a crop it must equal that of the shards. Frames
    have none."""
    frames: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = None
    """Frames of 10 ms per recording and coefficients per frame, if shards hold recordings instead
    of images."""
    time_shift: AtLeast0 = 0.0
    """Recordings only: maximum shift of a training recording in seconds, filled with silence."""
    background_noise: str | None = None
    """Recordings only: file of noises, written by `data_tools speech`; a random part of one is
    mixed into four of five training recordings, at a volume of up to 0.1."""
    palette: str | None = None
    """Palette for reading JPEG shards as colours: a file written by `data_tools palette fit`.
    Images
    are augmented as in JPEG shards."""
    crop: Literal["random_resized", "scaled", "window", "shifted", "center", "none"] = "none"
    """Crop applied when images are read. For JPEG shards only: `random_resized`, a random region,
    resized; `scaled`, a random square of `crop_size` after resizing the shorter side to a random
    length in `short_sides`, resized (iGPT, section 3.1); `center`, the centre, resized. For palette
    shards too: `window`, a random square of larger stored images, and `shifted`, which shifts
    training images by up to 4 pixels. `none`: no crop. Validation uses the centre. Pairs with label
    maps take `random_resized` and `center`, which resizes the whole image to the square; so does
    validation."""
    border: Literal["reflect", "zeros"] = "reflect"
    """With `shifted`: fill at the border, the image's reflection or zeros (black; for palette
    shards the first colour)."""
    short_sides: Annotated[tuple[Positive, Positive], Field(strict=False)] = (256, 384)
    """With `scaled`: minimum and maximum length of the shorter side."""
    crop_size: Positive = 224
    """With `scaled`: side of the square in pixels before resizing to `image_size`; in validation
    also the length of the shorter side."""
    scale: Annotated[tuple[Share, Share], Field(strict=False)] = (0.2, 1.0)
    """Minimum and maximum share of an image's area for a `random_resized` crop."""
    aspect: Annotated[tuple[Above0, Above0], Field(strict=False)] = (3 / 4, 4 / 3)
    """Minimum and maximum width / height of such a crop."""
    short_side: Positive | None = None
    """Length of the shorter side before the centre crop; default: `image_size`."""
    flip: bool = False
    """Mirror half of the training images at random; not supported for ids, and latents must include
    mirror images."""
    rand_augment: (
        Annotated[tuple[Annotated[float, Field(ge=0, le=10)], AtLeast0], Field(strict=False)] | None
    ) = None
    """RandAugment of training images, for JPEG shards only: magnitude out of 10, and its standard
    deviation between operations; default: none."""
    random_erasing: Fraction = 0.0
    """Probability of replacing a rectangle of a training image by noise, for JPEG shards only,
    after all other augmentation."""
    repeats: Positive = 1
    """Repeated Augmentation: number of samples with separate draws from one image, 32 samples
    apart; an epoch then covers the corresponding share of the images."""
    images_per_class: Positive | None = None
    """Train on so many images of each class alone, drawn by `seed`; on all when absent (iGPT,
    section 4.7)."""
    threads: Positive = 4
    """Threads per process that read and decode ahead; affects only speed."""

    @property
    def train_sources(self) -> tuple[MixedSource, ...]:
        """The training folders, one or several."""
        if isinstance(self.train, str):
            return (MixedSource(path=self.train, weight=1.0),)
        return self.train
