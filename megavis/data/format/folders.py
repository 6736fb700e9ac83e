"""What a path of a user holds: shards, images, tars, or none of them."""

from __future__ import annotations

_SUFFIXES = "jpg jpeg jpe jfif png webp gif bmp dib tif tiff ppm pgm pbm pnm jp2 j2k"
IMAGE_SUFFIXES = frozenset(f".{suffix}" for suffix in _SUFFIXES.split())
"""Of image files, in lower case; images with other names are known by their first bytes."""
