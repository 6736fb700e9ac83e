"""Synthetic scenes, and shards of their panoptic and depth maps."""

from __future__ import annotations

from pathlib import Path

from data_tools.__main__ import main


def write_scenes(folder: Path, *, size: int = 32, images: int = 12) -> Path:
    """Write scenes, half as many for validation, to `folder / "scenes"`; return that folder."""
    scenes = folder / "scenes"
    words = ["--size", str(size), "--images", str(images), "--validation-images", str(images // 2)]
    assert main(["scenes", str(scenes), *words]) == 0
    return scenes


def write_scene_shards(folder: Path, *, size: int = 32, images: int = 12) -> Path:
    """Write shards `panoptic` and `depth` below `folder`, each with `train` and `validation`."""
    scenes = write_scenes(folder, size=size, images=images)
    for part in ("train", "validation"):
        pictures, out = str(scenes / "images" / part), str(folder / "{}" / part)
        maps, listed = str(scenes / "panoptic" / part), str(scenes / f"panoptic_{part}.json")
        panoptic = [pictures, maps, listed, "--out", out.format("panoptic")]
        assert main(["maps", "panoptic", *panoptic]) == 0
        depths = [pictures, str(scenes / "depth" / part), "--out", out.format("depth")]
        assert main(["maps", "depth", *depths]) == 0
    return folder
