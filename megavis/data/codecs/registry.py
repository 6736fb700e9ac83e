"""The codec of each kind of shard.

Codecs that need Pillow or SciPy are imported only when a folder needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from megavis.config.errors import Remedy, UserError
from megavis.data.codecs.codec import (
    Codec,
    IdsCodec,
    LatentsCodec,
    PaletteCodec,
    PaletteLike,
)
from megavis.data.codecs.transforms import CropKind, Transform
from megavis.data.format.manifest import Manifest, ShardKind, TargetMaps

_WHOLE = ("none", "shifted")
"""Crops that keep the stored size."""
_WINDOWS = ("random_resized", "inception")
"""Crops that resize a random window."""
_PADDED = ("jittered", "fitted")
"""Crops that resize the image and pad it."""
_FIXED = "whose pixels cannot be changed"


def codec_of(
    manifest: Manifest, transform: Transform | None = None, *, palette: PaletteLike | None = None
) -> Codec:
    """Return the codec that reads a shard folder.

    Args:
        transform: crop and augmentation; if None, images are read as stored.
        palette: maps the pixels of JPEG shards to ids, if given.

    Raises:
        UserError: the kind of shard does not support the transform or the palette.
    """
    # Images stored at the final size would be enlarged to `crop_size` and reduced again, which
    # blurs them.
    if transform is not None and transform.crop == "scaled_center":
        was_resized = manifest.image_size == transform.image_size
        transform = replace(transform, crop="none") if was_resized else transform
    if palette is None:
        return _CODECS[manifest.kind](manifest, transform)
    if manifest.kind == "jpeg":
        return _jpeg(manifest, transform, palette)
    if manifest.kind != "palette":
        raise UserError(
            f"holds {manifest.kind} shards, which no palette can read: remove data.palette"
        )
    if manifest.identity != palette.sha256:
        raise UserError("was made with another palette than data.palette")
    return _palette(manifest, transform)


def _palette(manifest: Manifest, transform: Transform | None) -> Codec:
    if transform is not None:
        _require_no_augmentation(f"{manifest.kind} shards, {_FIXED}", transform)
        _require_crop_of_stored_pixels(manifest, transform)
    return PaletteCodec(
        manifest.num_tokens or 0, vocabulary_size=manifest.vocabulary_size, transform=transform
    )


def _ids(manifest: Manifest, transform: Transform | None) -> Codec:
    _require_as_stored(manifest, transform, may_flip=False)
    return IdsCodec(manifest.num_tokens or 0, vocabulary_size=manifest.vocabulary_size)


def _latents(manifest: Manifest, transform: Transform | None) -> Codec:
    assert manifest.latent_shape is not None
    _require_as_stored(manifest, transform, may_flip=manifest.flipped)
    return LatentsCodec(manifest.latent_shape, flipped=manifest.flipped, transform=transform)


def _recordings(manifest: Manifest, transform: Transform | None) -> Codec:
    from megavis.data.codecs.sound import RecordingsCodec

    assert manifest.frame_shape is not None
    _require_as_stored(manifest, transform, may_flip=False)
    return RecordingsCodec(manifest.frame_shape, transform)


def _jpeg(
    manifest: Manifest, transform: Transform | None, palette: PaletteLike | None = None
) -> Codec:
    from megavis.data.codecs.jpeg import JpegCodec

    stored = manifest.image_size
    if transform is None and stored is not None:
        transform = Transform(image_size=stored)
    as_stored = transform is not None and transform.crop in _WHOLE
    if transform is None or (as_stored and transform.image_size != stored):
        wanted = f", not {transform.image_size}x{transform.image_size}" if transform else ""
        crops = "random_resized, inception, scaled, jittered, window or center"
        if stored is not None:
            fault = f"holds images of {stored}x{stored} pixels{wanted}"
            raise UserError(fault, remedy=_crop(crops))
        again = (
            ", or write the shards again with `data_tools jpeg --size`, which keeps JPEG files of"
            " that size unchanged"
        )
        raise UserError(f"holds images of any size{wanted}", remedy=_crop(crops + again))
    return JpegCodec(transform, palette=palette)


def _pairs(manifest: Manifest, transform: Transform | None) -> Codec:
    from megavis.data.codecs.jpeg import PairsCodec

    if manifest.target is not None and manifest.target.kind == "instances":
        return _instances(transform)
    if manifest.target is not None:
        return _label_maps(manifest.target, transform)
    assert manifest.image_size is not None
    if transform is None:
        return PairsCodec(Transform(image_size=manifest.image_size))
    _require_no_augmentation(f"{manifest.kind} shards, {_FIXED}", transform)
    _require_crop_of_stored_pixels(manifest, transform)
    if transform.crop in _WHOLE and transform.image_size != manifest.image_size:
        stored, wanted = manifest.image_size, transform.image_size
        raise UserError(
            f"holds images of {stored}x{stored} pixels, not {wanted}x{wanted}",
            remedy=_crop("window for smaller crops"),
        )
    return PairsCodec(transform)


def _instances(transform: Transform | None) -> Codec:
    """Return the codec of images with objects, where resize factors apply to the longer side."""
    from megavis.data.codecs.instances import InstancesCodec, require_dense

    require_dense("a folder of images with objects")
    remedy = _crop("jittered, or to center, which resizes and pads whole images here")
    held = "holds images of many sizes with objects"
    if transform is None:
        raise UserError(held, remedy=remedy)
    _require_no_augmentation(
        "objects, which must fit their images", replace(transform, colors=None)
    )
    if transform.crop not in (*_PADDED, "center", "whole"):
        raise UserError(f"{held}, which the crop {transform.crop} does not fit", remedy=remedy)
    if transform.image_size % 8:
        raise UserError(
            f"holds objects, whose masks need a data.image_size that is a multiple of 8, not"
            f" {transform.image_size}"
        )
    crop: CropKind = "fitted" if transform.crop == "center" else transform.crop
    return InstancesCodec(replace(transform, crop=crop, fits=True))


def _label_maps(target: TargetMaps, transform: Transform | None) -> Codec:
    """Return the codec of images and label maps of any size, resized to a square if not cropped."""
    from megavis.data.codecs.jpeg import PairsCodec

    assert target.kind != "instances"
    remedy = _crop(
        "inception, random_resized or jittered, or to center, which resizes whole images here"
    )
    held = f"holds {target.kind} maps of many sizes"
    if transform is None:
        raise UserError(held, remedy=remedy)
    shown = transform if target.kind == "depth" else replace(transform, colors=None)
    _require_no_augmentation(f"{target.kind} maps, which must fit their images", shown)
    if transform.crop not in (*_WINDOWS, *_PADDED, "center", "whole"):
        raise UserError(f"{held}, which the crop {transform.crop} does not fit", remedy=remedy)
    crop: CropKind = transform.crop if transform.crop in (*_WINDOWS, *_PADDED) else "whole"
    changed = replace(transform, crop=crop, smoothing="bilinear")
    return PairsCodec(changed, target=target.kind)


def _crop(value: str) -> Remedy:
    return Remedy("data.crop", value)


def _require_no_augmentation(held: str, transform: Transform) -> None:
    changes: dict[str, object] = {
        "rand_augment": transform.augment,
        "random_erasing": transform.erase,
        "color_distortion": transform.colors,
    }
    for key in (key for key, change in changes.items() if change is not None):
        raise UserError(f"holds {held}: remove data.{key}")


def _require_crop_of_stored_pixels(manifest: Manifest, transform: Transform) -> None:
    side, size = manifest.image_size or 0, transform.image_size
    if transform.crop in (*_WINDOWS, "scaled", "center", "scaled_center"):
        raise UserError(
            f"holds {manifest.kind} shards, which cannot be resized",
            remedy=_crop("none, shifted or window, or crop when they are made"),
        )
    if transform.crop not in _WHOLE and side < size:
        raise UserError(
            f"holds images of {side}x{side} pixels: too small for data.image_size {size}"
        )


def _require_as_stored(manifest: Manifest, transform: Transform | None, *, may_flip: bool) -> None:
    if transform is None:
        return
    _require_no_augmentation(f"{manifest.kind} shards, {_FIXED}", transform)
    if transform.crop != "none":
        raise UserError(
            f"holds {manifest.kind} shards, which cannot be cropped",
            remedy=_crop("none, or crop when they are made"),
        )
    if transform.flip and not may_flip:
        raise UserError(
            f"holds {manifest.kind} shards without mirrored images: set data.flip to false"
        )


_Build = Callable[[Manifest, Transform | None], Codec]
_CODECS: Mapping[ShardKind, _Build] = {
    "palette": _palette,
    "jpeg": _jpeg,
    "pairs": _pairs,
    "latents": _latents,
    "ids": _ids,
    "recordings": _recordings,
}
