"""Images of a run: grids of samples, completions, predictions, reconstructions, and `.npz` files.

`megavis train` makes a grid every `training.sample_every` steps, `megavis sample` on demand. Images
are enlarged so that single pixels are visible.

Many images are generated into one `.npz`, the format of the evaluation suite of ADM ("Diffusion
Models Beat GANs on Image Synthesis"), which holds `arr_0`, uint8 `[N, H, W, 3]`. Batches are
distributed over the processes, and each is written to its own file; an interrupted job resumes with
the missing ones.

Legend: b images, n tokens of an image, h and w height and width of an image in pixels, H and W of
the grid; all colours are uint8.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from megavis.composition.model import generator_of
from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.format.files import atomic_writer, flush_folder, write_atomically
from megavis.data.loading.loader import Batch
from megavis.model.inference import Inference
from megavis.parallel.context import set_timeouts
from megavis.sampling.batches import Batches
from megavis.sampling.sampler import Sampler, settings_of

_COLUMNS = 8
_GALLERY_BATCH = 64
"""A gallery may share a GPU with training, whose memory it must not fill."""
_VISIBLE_SIDE = 128
_LINE = 2
_LINE_SHADE = 255
_HIDDEN_SHADE = 127
_SETTINGS = "settings.json"
_PATIENCE = 24 * 3600.0
"""Seconds that a process waits for others, which may have a batch more, or join a large file."""


Draw = Callable[[Tensor], Tensor]
"""Maps indices of images, int64 `[b]`, to images uint8 `[b, H, W, 3]`."""


def hide(images: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Paint images `[b, h, w, 3]` grey where `given`, bool `[h, w]` or `[b, h, w]`, is false."""
    return np.where(given[..., None], images, np.uint8(_HIDDEN_SHADE))


def image_grid(rows: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Arrange images of equal size in a grid with thin white lines between them.

    Images are enlarged, by a whole number, to a height of about 128 pixels.

    Args:
        rows: uint8 images `[h, w, 3]`; all rows have the same length.

    Returns:
        uint8 `[H, W, 3]`.

    Raises:
        ValueError: there is no image, or the rows are of different lengths.
    """
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError("a grid needs rows of the same length")
    height, width = rows[0][0].shape[:2]
    factor = max(1, _VISIBLE_SIDE // height)
    height, width = height * factor, width * factor
    shape = (len(rows) * (height + _LINE) + _LINE, len(rows[0]) * (width + _LINE) + _LINE, 3)
    canvas = np.full(shape, _LINE_SHADE, np.uint8)
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            top, left = _LINE + r * (height + _LINE), _LINE + c * (width + _LINE)
            enlarged = image.repeat(factor, axis=0).repeat(factor, axis=1)
            canvas[top : top + height, left : left + width] = enlarged
    return canvas


def completion_grid(
    originals: np.ndarray, given: np.ndarray, completions: Sequence[np.ndarray]
) -> np.ndarray:
    """Show completions, one row per image: original | given part | completions.

    Images are uint8 `[b, h, w, 3]`; `given`, bool `[h, w]` or `[b, h, w]`, is true where the
    original was given.
    """
    columns = [originals, hide(originals, given), *completions]
    return image_grid([list(row) for row in zip(*columns, strict=True)])


def sample_grid(images: np.ndarray, *, num_columns: int = _COLUMNS) -> np.ndarray:
    """Arrange images `[b, h, w, 3]` row by row; unused cells are white."""
    return image_grid(_rows(images, num_columns))


def _rows(images: np.ndarray, num_columns: int) -> list[list[np.ndarray]]:
    """Divide images into rows of at most `num_columns`, and fill the last with white ones."""
    num_columns = min(num_columns, len(images))
    blank = np.full((-len(images) % num_columns, *images.shape[1:]), _LINE_SHADE, np.uint8)
    filled = list(np.concatenate([images, blank]))
    return [filled[start : start + num_columns] for start in range(0, len(filled), num_columns)]


def save_png(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 `[H, W, 3]` as a PNG file, atomically. Raises OSError."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


class Gallery:
    """Makes the default image grid of a run.

    Args:
        has_examples: whether grids will have held-out images to start from.

    Raises:
        UserError: models of the run generate no images, or none without held-out ones.
    """

    def __init__(self, objective: Trainable, folder: Path, *, has_examples: bool = True) -> None:
        self.objective, self.folder = objective, folder
        # Check now rather than in `plot`: a run must fail before its first step, not at its first
        # grid.
        if not objective.reconstructs:
            model = generator_of(objective)
            model.check_images(folder)
            for options in model.schedule.columns:
                settings_of(model, options)
        if not has_examples:
            self._check_without_examples()

    def _check_without_examples(self) -> None:
        """Raise UserError if the grid needs held-out images."""
        if self.objective.reconstructs:
            raise UserError("reconstructions need images: give data.validation")
        model = generator_of(self.objective)
        if model.schedule.needs_given:
            raise UserError("completions need images: give data.validation")
        model.condition.defaults(1, None)

    def plot(self, inference: Inference, examples: Batch | None, *, num_images: int) -> np.ndarray:
        """Return a grid uint8 `[H, W, 3]`; collective over all processes of the job.

        Args:
            examples: held-out images to start from, on the model's device; None generates
                unconditionally.

        Raises:
            UserError: the grid needs held-out images and there are none.
        """
        objective = self.objective
        if examples is None:
            self._check_without_examples()
        elif objective.reconstructs:
            return picture_of_reconstructions(inference, objective, examples.inputs)
        columns = generator_of(objective).schedule.columns
        samplers = [Sampler(inference, objective, self.folder, options) for options in columns]
        model = samplers[0].model
        share = 0.0 if examples is None else model.default_share
        return picture(
            samplers, examples, num_images=num_images, share=share, batch_size=_GALLERY_BATCH
        )


def picture(
    samplers: Sequence[Sampler],
    examples: Batch | None,
    *,
    num_images: int,
    share: float = 0.0,
    num_copies: int | None = None,
    conditions: Mapping[str, Tensor] | None = None,
    later: Mapping[str, Tensor] | None = None,
    first_halves: Tensor | None = None,
    num_columns: int = _COLUMNS,
    batch_size: int | None = None,
) -> np.ndarray:
    """Generate images and arrange them in a grid; collective over all processes of the job.

    Args:
        samplers: one per column; a single one without examples.
        examples: held-out images to complete, or to predict others from.
        share: share of each example's tokens, the first in the order, that is given.
        num_copies: samples per sampler and example; the model's default when None.
        conditions: conditions by name; the model's defaults when None.
        later: see `Sampler.sample`.
        first_halves: see `Sampler.sample`.
        num_columns: columns of a grid without examples.
        batch_size: see `Sampler.sample`.

    Returns:
        uint8 `[H, W, 3]`; with examples one row per image: original | given part | completions,
        or image | target | predictions.
    """
    first = samplers[0]
    model = first.model
    if conditions is None:
        is_used = share > 0 or "image" in model.condition.names
        conditions = model.condition.defaults(num_images, examples if is_used else None)
    shown = [] if examples is None else model.condition.shown(examples)
    options: dict[str, Any] = {"conditions": conditions, "batch_size": batch_size}
    if not share and not shown:
        tokens = first.sample(num_images, later=later, first_halves=first_halves, **options)
        return sample_grid(_pixels(first.to_images(tokens)), num_columns=num_columns)
    assert examples is not None
    count = len(examples)
    if share:
        options |= {"originals": examples.inputs, "num_given": round(share * model.num_tokens)}
    copies = model.num_copies if num_copies is None else num_copies
    columns = []
    for sampler in samplers:
        drawn = sampler.to_images(sampler.sample(count * copies, **options))
        columns += [_pixels(model.predicts.shown(part)) for part in drawn.split(count)]
    if shown:
        image, *targets = shown
        known = [image, *map(model.predicts.shown, targets)]
        columns = [*map(_pixels, known), *columns]
        return image_grid([list(row) for row in zip(*columns, strict=True)])
    originals = _pixels(first.to_images(model.tokens_of(examples.inputs)))
    given = first.given_part(count, options["num_given"])
    pixels = pixels_of(given, model.predicts.grid, originals)
    return completion_grid(originals, pixels, columns)


def pixels_of(tokens: Tensor, grid: tuple[int, int], images: np.ndarray) -> np.ndarray:
    """Expand a mask of tokens in raster order, bool `[b, n]`, to pixels `[b, h, w]`.

    `grid` is the rows and columns of tokens, `images` `[b, h, w, 3]` are made of these.
    """
    height, width = images.shape[1:3]
    cells = tokens.view(len(tokens), *grid).cpu().numpy()
    return cells.repeat(height // grid[0], axis=1).repeat(width // grid[1], axis=2)


def picture_of_rounds(sampler: Sampler, conditions: Mapping[str, Tensor], count: int) -> np.ndarray:
    """Return a grid with one row per image: a draw from the prior, then the tokens of each step.

    "GIVT: Generative Infinite-Vocabulary Transformers", figure 15.

    Raises:
        UserError: the model generates one token at a time.
    """
    if sampler.model.schedule.samples_one(sampler.settings.schedule):
        raise UserError("rounds can be shown only for runs that generate many tokens at once")
    images = torch.arange(count, device=sampler.device)
    order = sampler.order_of(images)
    prior = sampler.model.reads.prior(images, seed=sampler.seed)
    columns = [] if prior is None else [sampler.to_images(prior)]
    for tokens in sampler.rounds(images, conditions=conditions):
        columns.append(sampler.to_images(sampler.from_order(tokens, order)))
    rows = np.stack([_pixels(column) for column in columns], 1)
    return sample_grid(rows.reshape(-1, *rows.shape[2:]), num_columns=len(columns))


def picture_of_reconstructions(
    inference: Inference, objective: Trainable, originals: Tensor
) -> np.ndarray:
    """Show samples in the form of the shards above their reconstructions, in pairs of rows.

    Collective over all processes of the job.
    """
    inputs = objective.inputs_from(originals.to(inference.context.device))
    made = objective.reconstruction(inference.predictions(inputs)).cpu().numpy()
    images = objective.shown(originals).cpu().numpy()
    pairs = zip(_rows(images, _COLUMNS), _rows(made, _COLUMNS), strict=True)
    return image_grid([row for pair in pairs for row in pair])


def _pixels(images: Tensor) -> np.ndarray:
    return images.cpu().numpy()


def write_npz(
    path: Path,
    draw: Draw,
    *,
    num_images: int,
    batches: Batches,
    settings: Mapping[str, Any],
) -> None:
    """Generate N images into `path`; collective over all processes of the job.

    Args:
        path: the file; batches are kept in `<path>.parts` until all are complete.
        batches: the batches; if their size is not chosen yet, that of existing batches is used.
        settings: JSON values that determine the images, including the network.

    Raises:
        UserError: existing batches were generated with other settings, or not even one image fits.
        torch.OutOfMemoryError: see `Batches.run`.
    """
    folder, context = path.with_name(f"{path.name}.parts"), batches.context
    if batches.size is None:
        # Parts are named by their first image, so a job that resumes needs the size of the
        # interrupted one.
        batches.size = context.on_main(lambda: _batch_size(folder))
    batch_size = batches.choose(draw, num_images)
    wanted = json.dumps({**settings, "num_images": num_images, "batch_size": batch_size})
    starts = range(0, num_images, batch_size)
    sizes = {start: min(batch_size, num_images - start) for start in starts}
    # One process lists for all, since a node may see an outdated folder: between them they must run
    # all batches, and those that share layers the same ones.
    missing = context.on_main(lambda: _missing(folder, sizes, wanted))
    for start in missing[context.data.rank :: context.data.size]:
        images = batches.run(draw, torch.arange(start, start + sizes[start]))
        if context.tensor.rank == context.context.rank == 0:
            with atomic_writer(_part(folder, start)) as file:
                np.save(file, images.cpu().numpy())
    set_timeouts(_PATIENCE)
    # All parts must exist before the first process reads them.
    context.barrier()
    if context.is_main:
        _join([_part(folder, start) for start in starts], num_images, path)
        # Parts without settings belong to no file, should a signal come before all are deleted.
        (folder / _SETTINGS).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    context.barrier()


def _batch_size(folder: Path) -> int | None:
    """Return the batch size of the parts in a folder; None if no intact settings say it."""
    try:
        return max(1, int(json.loads((folder / _SETTINGS).read_bytes())["batch_size"]))
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def _missing(folder: Path, sizes: Mapping[int, int], wanted: str) -> list[int]:
    """Return the first images of the parts that are not in a folder yet; create it if needed.

    Args:
        sizes: images of each part by its first one.
        wanted: the settings that determine the images, as JSON.

    Raises:
        UserError: the folder holds parts of other settings.
    """
    path = folder / _SETTINGS
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob("*.npy"):
            part.unlink()
        write_atomically(path, wanted.encode())
    kept = path.read_text(errors="replace")
    if kept != wanted:
        raise UserError(
            f"{folder} holds images generated with other settings ({kept}); delete it or choose"
            " another file"
        )
    # Not by asking for each: a network disk then remembers for a while that there is none.
    found = {each.name for each in folder.iterdir()}
    parts = {start: _part(folder, start) for start in sizes}
    return [
        start
        for start, part in parts.items()
        if part.name not in found or not _is_whole(part, sizes[start])
    ]


def _is_whole(part: Path, num_images: int) -> bool:
    """Return whether a file is as long as its header says, which an array of this length begins."""
    with part.open("rb") as file:
        try:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        except ValueError:
            return False
        size = file.tell() + math.prod(shape) * dtype.itemsize
        return shape[:1] == (num_images,) and part.stat().st_size == size


def _join(parts: Sequence[Path], num_images: int, path: Path) -> None:
    """Write what `np.savez` would of the arrays of all parts, with one of them in memory."""
    # Among the parts, so that what an interruption leaves is deleted with them.
    whole = parts[0].with_name(path.name)
    with (
        atomic_writer(whole) as file,
        zipfile.ZipFile(file, "w") as archive,
        archive.open("arr_0.npy", "w", force_zip64=True) as member,
    ):
        for part in parts:
            array = np.load(part)
            if part == parts[0]:
                header = np.lib.format.header_data_from_array_1_0(array)
                header["shape"] = (num_images, *array.shape[1:])
                np.lib.format.write_array_header_1_0(member, header)
            member.write(array.tobytes())
    whole.replace(path)
    flush_folder(path.parent)


def _part(folder: Path, start: int) -> Path:
    return folder / f"{start:09d}.npy"
