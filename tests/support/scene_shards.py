"""A few scenes, and shards of their panoptic maps and depths."""

from __future__ import annotations

from pathlib import Path

from data_tools.__main__ import main


def write_scenes(folder: Path, *, size: int = 32, images: int = 12) -> Path:
    """Write scenes below `folder / "scenes"`, half as many for validation; returns that folder."""
    scenes = folder / "scenes"
    words = ["--size", str(size), "--images", str(images), "--validation-images", str(images // 2)]
    assert main(["scenes", str(scenes), *words]) == 0
    return scenes


def write_scene_shards(folder: Path, *, size: int = 32, images: int = 12) -> Path:
    """Write `panoptic` and `depth` below `folder`, with `train` and `validation` in each."""
    scenes = write_scenes(folder, size=size, images=images)
    for part in ("train", "validation"):
        pictures, out = str(scenes / "images" / part), str(folder / "{}" / part)
        maps, listed = str(scenes / "panoptic" / part), str(scenes / f"panoptic_{part}.json")
        panoptic = [pictures, maps, listed, "--out", out.format("panoptic")]
        assert main(["maps", "panoptic", *panoptic]) == 0
        depths = [pictures, str(scenes / "depth" / part), "--out", out.format("depth")]
        assert main(["maps", "depth", *depths]) == 0
    return folder
