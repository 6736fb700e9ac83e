"""Base class for the sections of a YAML file, choices that keys and layers share, and sections.

The sections here are `parallel`, `evaluation` and `data`; `schema.py` has the others.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from megavis.config.watching import WATCH_OPTIONS, Measure

ConfigIssue = tuple[str, str]
"""The wrong key, and a sentence on what would be right."""

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Portion = Annotated[float, Field(ge=0, le=1)]

OrderKind = Literal["raster", "nested_raster", "round_robin", "random"]
PositionKind = Literal[
    "none", "learned", "sincos", "learned_sincos", "rope_1d", "rope_2d", "relative_2d"
]
ROTARY: tuple[PositionKind, ...] = ("rope_1d", "rope_2d")
"""Kinds of positions that rotate queries and keys."""
ScaleActivation = Literal["squareplus", "softplus"]
LossAverage = Literal["batch", "images"]
Activation = Literal["quick_gelu", "gelu", "gelu_tanh", "swiglu"]
DecoderKind = Literal["linear", "mlp", "transformer"]
DenoiserKind = Literal["linear", "mlp", "transformer", "modulated_mlp"]
DashboardKind = Literal["tensorboard", "wandb", "mlflow", "jsonl"]
"""Dashboards for a run's metrics; `jsonl` is the record that every run writes."""
Crop = Literal[
    "random_resized", "inception", "scaled", "jittered", "window", "shifted", "center", "none"
]
SourceCrop = Literal[
    "random_resized", "inception", "scaled", "jittered", "shifted", "center", "none"
]
KernelLibrary = Literal["auto", "blocks", "regions", "torch", "apex", "transformer_engine"]


def interpolation(kind: PositionKind | None, trained_side: float, side: float) -> float:
    """Return the factor by which positions are multiplied at another image size.

    It places the last token of a grid, or for `rope_1d` of the sequence in raster order, about
    where training had it: 224² instead of 384² gives 14/24 for each axis, and 196/576 in the
    sequence ("Denoising Autoregressive Representation Learning", section 4.1: "we interpolate the
    positions").
    """
    ratio = trained_side / side
    return ratio**2 if kind == "rope_1d" else ratio


class Section(BaseModel):
    """A group of keys: strict types, no unknown keys, immutable once read."""

    # Strict types reject a list for a tuple, and YAML has only lists: tuples are `strict=False`.
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    sampling_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that affect only sampling, neither weights nor losses."""
    pretraining_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of words that features, and fine-tuning without the paper's own loss, do not depend on.
    """


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections inside unions, tuples and annotations of a key."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in sections_in(each)]


class ParallelConfig(Section):
    """Layout over processes; the data-parallel size is what remains."""

    tensor_model_parallel_size: Positive = 1
    """Processes that share each layer's matrices."""
    sequence_parallel: bool = False
    """Split the norms' and residual's activations over the tensor group as well."""
    context_parallel_size: Positive = 1
    """Processes that share the tokens of the same images; attention exchanges tokens for heads."""
    pipeline_model_parallel_size: Positive = 1
    """Processes that hold consecutive blocks."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO: 1 partitions optimizer states, 2 also gradients, 3 also weights."""
    hierarchical_partition_size: Positive = 1
    """With ZeRO-3: size of ZeRO++'s secondary partition, usually the GPUs of a node. This many
    consecutive processes keep a second copy of the weights, from which all passes of a step except
    the first gather (ZeRO++, section 3.2.2)."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Location of the optimizer states."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Location of ZeRO-3's weights between uses."""
    nvme_path: str | None = None
    """Folder on a fast local disk, for nvme."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`selective` recomputes norms and activation functions, `full` whole blocks."""

    @property
    def model_parallel_size(self) -> int:
        """Processes that train on the same images: tensor × context × pipeline size."""
        return self.head_parts * self.pipeline_model_parallel_size

    @property
    def head_parts(self) -> int:
        """Parts into which attention splits its heads: tensor × context size."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def head_parts_text(self) -> str:
        """`head_parts` by its keys, for messages."""
        text = f"tensor_model_parallel_size {self.tensor_model_parallel_size}"
        if self.context_parallel_size == 1:
            return text
        return f"{text} × context_parallel_size {self.context_parallel_size}"

    @property
    def token_parts(self) -> int:
        """Parts into which the residual stream is split by tokens."""
        return self.head_parts if self.sequence_parallel else self.context_parallel_size


def _watched(name: str) -> Any:
    """Return the field of a key that is an option of `megavis evaluate watch` too."""
    option = WATCH_OPTIONS[name]
    return Field(option.default, description=option.description)


class EvaluationConfig(Section):
    """Evaluation during training: a separate process evaluates checkpoints as they appear."""

    what: Annotated[tuple[Measure, ...], Field(strict=False)] = _watched("what")
    every: Positive = _watched("every")
    train_images: Positive = 2000
    """Training images for fitting classifiers."""
    validation_images: Positive = 1000
    """Held-out images to evaluate on."""
    reference: str | None = _watched("reference")
    inception: str | None = None
    """For `frechet`: a file with Inception's weights, for FID."""
    network: Literal["efficientnet-lite0"] | None = None
    """For `frechet`: a network other than Inception."""
    num_samples: Annotated[int, Field(ge=2)] = _watched("num_samples")
    device: Literal["cpu", "cuda"] = "cpu"
    """Device; cuda shares a GPU with training."""
    threads: Positive = 1
    """Threads of the process."""
    interval: Above0 = _watched("interval")
    finish_within: AtLeast0 = 600.0
    """Seconds to wait at the end of training for the evaluation of the last checkpoint."""


_FORMS = ("one folder", "several folders")


class MixedSource(Section):
    """One of several shard folders to mix in training."""

    path: str
    """Folder of shards."""
    weight: Above0
    """Share of the training images from this folder; weights need not sum to 1."""
    crop: SourceCrop | None = None
    """Crop of this folder's images instead of `data.crop`; `center` is the centre crop of
    validation (iGPT, section 3.1: web images are not augmented)."""


def _form(train: object) -> str:
    return _FORMS[isinstance(train, list | tuple)]


TrainData = Annotated[
    Annotated[str, Tag(_FORMS[0])]
    | Annotated[tuple[MixedSource, ...], Field(strict=False), Tag(_FORMS[1])],
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
    """Local folder that caches data sets read from a URL; all runs of a machine can share it."""
    cache_gib: Above0 | None = None
    """Size limit of `cache` in GiB, above which the least recently opened shards are deleted; two
    windows of `window_shards` are a good size; default: no limit."""
    image_size: NonNegative = 0
    """Side of the square images in pixels; without a crop it must equal the shards'. Frames
    have none."""
    frames: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = None
    """Frames of 10 ms per recording and coefficients per frame, if shards hold recordings instead
    of images."""
    time_shift: AtLeast0 = 0.0
    """Recordings only: maximum shift of a training recording in seconds, filled with silence."""
    background_noise: str | None = None
    """Recordings only: file of noises, written by `data_tools speech`; a random part of one is
    mixed into four of five training recordings, at a volume of up to 0.1."""
    normalize_frames: bool = False
    """Recordings only: standardise each coefficient over the frames of a recording, which removes
    loudness and the stationary effects of microphone and room; not in TC-ResNet's preparation."""
    palette: str | None = None
    """Palette for reading JPEG shards as colours: a file written by `data_tools palette fit`.
    Images are augmented as in JPEG shards."""
    crop: Crop = "none"
    """Crop applied when images are read. For JPEG shards only: `random_resized`, a random region,
    resized (torchvision's rule, as in MAE's recipe); `inception`, a random region by TensorFlow's
    rule (GIVT's released code), which is the whole image if no region fits; `scaled`, a random
    square of `crop_size` after resizing the shorter side to a random length in `short_sides`,
    resized (iGPT, section 3.1); `center`, the centre, resized. For palette shards too: `window`, a
    random square of larger stored images, and `shifted`, which shifts training images by up to 4
    pixels. `jittered`: a random square after resizing the shorter side to `image_size` times a
    random factor of `jitter`, padded with the mean colour, and with void in label maps. `none`: no
    crop. Validation uses the centre. Pairs with label maps support `inception`, `random_resized`,
    `jittered` and `center`, which resizes the whole image to the square, as does their validation,
    except with `jittered`, where it crops the centre."""
    border: Literal["reflect", "zeros"] = "reflect"
    """With `shifted`: padding at the border, the image's reflection or zeros (black; for palette
    shards the first colour)."""
    short_sides: Annotated[tuple[Positive, Positive], Field(strict=False)] = (256, 384)
    """With `scaled`: minimum and maximum length of the shorter side."""
    crop_size: Positive = 224
    """With `scaled`: side of the square in pixels before resizing to `image_size`; in validation
    also the length of the shorter side."""
    jitter: Annotated[tuple[Above0, Above0], Field(strict=False)] = (0.5, 2.0)
    """With `jittered`: minimum and maximum of the factor."""
    scale: Annotated[tuple[Share, Share], Field(strict=False)] = (0.2, 1.0)
    """Minimum and maximum share of an image's area for a `random_resized` or `inception` crop."""
    aspect: Annotated[tuple[Above0, Above0], Field(strict=False)] = (3 / 4, 4 / 3)
    """Minimum and maximum aspect ratio (width / height) of such a crop."""
    short_side: Positive | None = None
    """Length of the shorter side before the centre crop; default: `image_size`."""
    flip: bool = False
    """Mirror half of the training images at random; not supported for ids, and latents must include
    mirror images."""
    rand_augment: (
        Annotated[tuple[Annotated[float, Field(ge=0, le=10)], AtLeast0], Field(strict=False)] | None
    ) = None
    """RandAugment for training images, for JPEG shards only: magnitude out of 10, and its standard
    deviation between operations; default: none."""
    color_distortion: bool = False
    """Change brightness, contrast, saturation and hue of training images at random, as in
    mmsegmentation's recipes; for JPEG shards, and images with label maps."""
    random_erasing: Fraction = 0.0
    """Probability of replacing a rectangle of a training image by noise, for JPEG shards only,
    after all other augmentation."""
    repeats: Positive = 1
    """Repeated Augmentation: number of samples with separate draws from one image, 32 samples
    apart; an epoch then covers the corresponding share of the images."""
    images_per_class: Positive | None = None
    """Train on only this many images per class, drawn by `seed`; default: all (iGPT,
    section 4.7)."""
    window_shards: Positive | None = None
    """For training data with more shards than files may be open: each epoch reads its shards in a
    random order, and mixes the samples of at most this many shards at a time; default: all."""
    may_change: bool = False
    """Allow resuming a run on training data other than it was started with. Rejected by default,
    since the sample order depends on the data."""
    threads: Positive = 4
    """Threads per process that read and decode ahead; affects only speed."""

    @property
    def cache_limit(self) -> int | None:
        """Bytes of `cache`."""
        return None if self.cache_gib is None else int(self.cache_gib * 2**30)

    @property
    def train_sources(self) -> tuple[MixedSource, ...]:
        """The training folders, one or several."""
        if isinstance(self.train, str):
            return (MixedSource(path=self.train, weight=1.0),)
        return self.train

    @property
    def training_crops(self) -> tuple[Crop, ...]:
        """The crop of each training folder."""
        return tuple(source.crop or self.crop for source in self.train_sources)
