"""`manifest.json`: the contents of a shard folder, their provenance and their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megavis.config.errors import UserError, counted
from megavis.data.format.files import write_atomically
from megavis.data.format.folders import MANIFEST_NAME
from megavis.data.format.not_shards import what_it_is
from megavis.data.format.shards import MAX_TOKENS

PALETTE_NAME = "palette.npy"
FORMAT_VERSION: Literal[1] = 1

ShardKind = Literal["palette", "jpeg", "pairs", "latents", "ids", "recordings"]
SUFFIXES: Mapping[ShardKind, str] = {
    "palette": "tok",
    "jpeg": "jpg",
    "pairs": "pair",
    "latents": "lat",
    "ids": "ids",
    "recordings": "pcm",
}
"""Suffixes of tar members, after the dot."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TokenizerIdentity(_Strict):
    """The tokenizer that made the tokens; training rejects shards of any other."""

    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] = Field(
        description="`palette`, or the kind of network: `vae`, `vqgan`"
    )
    sha256: Sha256
    num_tokens: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        default=None, description="size of the vocabulary; none for latents"
    )


class TargetMaps(_Strict):
    """Content of the targets of pairs: label maps (`codecs/label_maps.py`), or objects.

    Objects, of kind `instances`, are described in `codecs/instances.py`.
    """

    kind: Literal["panoptic", "depth", "instances"]
    class_names: tuple[str, ...] = Field(
        default=(), description="of a panoptic map or of objects; class 1 is the first"
    )
    things: tuple[bool, ...] = Field(
        default=(), description="for each of these, whether its segments are countable objects"
    )

    @model_validator(mode="after")
    def _check_classes(self) -> TargetMaps:
        if len(self.class_names) != len(self.things):
            raise ValueError("class_names and things differ in length")
        if bool(self.class_names) != (self.kind != "depth"):
            raise ValueError("panoptic maps and objects have classes, and depths have none")
        return self


class Preparation(_Strict):
    """How images were decoded and resized; part of a data set's identity."""

    resize: str = Field(description="resize filter")
    crop: str = Field(description="the part of the image that is kept")
    decoders: dict[str, str] = Field(description="version of each decoding package")


class SourceIdentity(_Strict):
    """The source files of a data set."""

    description: str
    num_files: Count
    sha256: Sha256 = Field(description="SHA-256 of the list of source names and sizes")


class ShardEntry(_Strict):
    """One tar file, with the hashes of the tar and its index."""

    name: FileName
    num_samples: Annotated[int, Field(ge=1)]
    num_bytes: Annotated[int, Field(ge=1)]
    sha256: Sha256
    index_sha256: Sha256


class Manifest(_Strict):
    """The content of `manifest.json`. It is written last, so a folder that has one is complete."""

    format_version: Literal[1]
    kind: ShardKind
    image_size: Positive | None = Field(
        description="side in pixels; none for recordings and for images of different sizes"
    )
    num_tokens: Positive | None = Field(
        default=None, description="tokens per sample, for palette and ids"
    )
    latent_shape: Annotated[tuple[Positive, Positive, Positive], Field(strict=False)] | None = (
        Field(default=None, description="channels, height and width of latents")
    )
    flipped: bool = Field(
        default=False, description="whether latents of the mirrored image are stored too"
    )
    frame_shape: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = Field(
        default=None, description="frames per recording, and coefficients per frame"
    )
    target: TargetMaps | None = Field(
        default=None, description="what label maps of pairs show; none where targets are colours"
    )
    tokenizer: TokenizerIdentity | None = Field(
        default=None, description="none for jpeg, pairs and recordings"
    )
    preparation: Preparation
    class_names: tuple[str, ...]
    shards: tuple[ShardEntry, ...]
    index_sha256: Sha256 | None = Field(
        default=None, description="SHA-256 of `samples.index`; set when the folder is finished"
    )
    skipped: dict[str, Count] = Field(description="number of rejected source files by reason")
    seed: Count
    source: SourceIdentity
    tool_version: str

    @property
    def num_samples(self) -> int:
        """Number of samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def size(self) -> str:
        """Numbers of samples and shards, for messages."""
        samples, shards = counted(self.num_samples, "sample"), counted(len(self.shards), "shard")
        return f"{samples} in {shards}"

    @property
    def content(self) -> str:
        """SHA-256 of the samples and their order, in any folder."""
        hashes = "".join(shard.sha256 for shard in self.shards)
        return hashlib.sha256(hashes.encode()).hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """Size of the vocabulary; 0 if samples are not ids."""
        return (self.tokenizer.num_tokens or 0) if self.tokenizer else 0

    @property
    def identity(self) -> str | None:
        """SHA-256 of the tokenizer, if there is one."""
        return self.tokenizer.sha256 if self.tokenizer else None

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in messages."""
        return self.tokenizer.kind if self.tokenizer else "tokenizer"

    def as_palette(self, sha256: str, num_colours: int, *, image_size: int) -> Manifest:
        """Return the manifest of the same images quantized by a palette."""
        identity = TokenizerIdentity(kind="palette", sha256=sha256, num_tokens=num_colours)
        size = {"image_size": image_size, "num_tokens": image_size**2}
        return self.model_copy(update={"kind": "palette", "tokenizer": identity, **size})

    @model_validator(mode="after")
    def _check_kind(self) -> Manifest:
        has_ids = self.kind in ("palette", "ids")
        has_side = {"jpeg": self.image_size is not None, "recordings": False}.get(self.kind, True)
        if self.target is not None:  # originals, of any size
            has_side = False
        present = {
            "tokenizer": (self.tokenizer is not None, self.kind in ("palette", "latents", "ids")),
            "tokenizer.num_tokens": (self.vocabulary_size > 0, has_ids),
            "num_tokens": (self.num_tokens is not None, has_ids),
            "latent_shape": (self.latent_shape is not None, self.kind == "latents"),
            "frame_shape": (self.frame_shape is not None, self.kind == "recordings"),
            "target": (self.target is not None, self.target is not None and self.kind == "pairs"),
            "image_size": (self.image_size is not None, has_side),
        }
        for name, (given, wanted) in present.items():
            if given != bool(wanted):
                verb = "need" if wanted else "take no"
                raise ValueError(f"{self.kind} shards {verb} {name}")
        if self.kind == "palette" and self.vocabulary_size > MAX_TOKENS:
            raise ValueError(f"a palette has at most {MAX_TOKENS} colours")
        return self

    def write(self, directory: Path) -> None:
        """Write `manifest.json` into `directory` atomically. Raises OSError."""
        content = self.model_dump_json(indent=2) + "\n"
        write_atomically(directory / MANIFEST_NAME, content.encode())

    @classmethod
    def read(cls, directory: Path | str) -> Manifest:
        """Read a folder's manifest; raise UserError if it is missing or invalid."""
        path = Path(directory) / MANIFEST_NAME
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(what_it_is(Path(directory))) from None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        return cls.parse(content, path)

    @classmethod
    def parse(cls, content: bytes, path: Path | str) -> Manifest:
        """Return a manifest from its bytes; raise UserError that names `path` if they are not."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise UserError(_explain(path, error)) from None


def hold_other_samples(first: Path | str, second: Path | str) -> bool:
    """Return whether two shard folders are known to differ: False if one cannot be read."""
    try:
        contents = [Manifest.read(folder).content for folder in (first, second)]
    except UserError:
        return False
    return contents[0] != contents[1]


def _explain(path: Path | str, error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if where == "format_version":
        return (
            f"{path} has format version {first['input']}, and this megavis reads "
            f"{FORMAT_VERSION}: write the shards again or use the megavis that wrote them"
        )
    if first["type"] == "json_invalid":
        return f"{path} is not valid JSON ({first['msg']}): write the shards again"
    text = first["msg"].removeprefix("Value error, ")
    return f"{path} is not a shard manifest: {where + ': ' if where else ''}{text}"


def num_images(folder: str) -> int | None:
    """Return the number of samples in a local shard folder, or None if it is not finished.

    Raises UserError if its manifest cannot be read or is invalid.
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        is_finished = path.is_file()
    except PermissionError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return Manifest.read(folder).num_samples if is_finished else None
