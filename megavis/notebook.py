"""Load a trained run for interactive use; returned by `megavis.load`.

    run = megavis.load("runs/igpt_demo")
    images = run.sample(8, originals=photographs, given=0.5, top_p=0.95)
    plt.imshow(images[0])

Checkpoints of any layout open on one process. Inside a job of several processes, all of them make
the same calls together.

Legend: b images, n tokens of an image, L blocks, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from megavis.checkpoint.format.folder import checkpoint_to_open
from megavis.checkpoint.format.manifest import read_manifest
from megavis.checkpoint.state.restore import load_weights
from megavis.composition.condition import Condition
from megavis.composition.encoded_image import EncodedImage
from megavis.composition.model import Model, model_of
from megavis.config.checks import check_config
from megavis.config.errors import UserError
from megavis.config.load import load_run_config
from megavis.config.schema import RunConfig
from megavis.config.section import interpolation
from megavis.data.format.manifest import PALETTE_NAME
from megavis.data.loading.loader import Batch
from megavis.grammar.same_run import check_same_words
from megavis.model.inference import Inference
from megavis.model.kernel_compiler import require_compiled
from megavis.model.stack import LayerStack, LocalLayers
from megavis.papers import build_objective
from megavis.parallel.context import (
    ParallelContext,
    current_context,
    open_context,
    require_device,
)
from megavis.parallel.device import DTYPES
from megavis.parallel.launch import read_launch
from megavis.sampling.arguments import (
    as_tensor,
    check_index,
    check_rows,
    check_sides,
    checked_seed,
    is_real,
    is_whole,
)
from megavis.sampling.sampler import Sampler
from megavis.tokenizers.palette import Palette

# Images whose features are computed at once.
_AT_ONCE = 256
# Options of `Model.inputs_from` that may be one number.
_NUMBERS = ("prefix", "mask_ratio", "gamma")


class Run:
    """A trained network with its config and its palette; `checkpoint` None: with initial weights.

    Attributes:
        config: the resolved config of the run.
        folder: the run folder.
        checkpoint: folder of the weights; None for fresh ones.
        step: optimizer steps of the weights; 0 for fresh ones.
        classes: names, by label, of the classes that it was trained to read or predict; empty if
            there are none, for fresh weights, and for released ones without names.
        objective: the model.
        context: ranks and groups of this process.
        dtype: data type of the weights.
        inference: computes the network.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        folder: Path,
        checkpoint: Path | None,
        context: ParallelContext,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.folder, self.context = config, folder, context
        self.objective = build_objective(config, context)
        plans = self.objective.layer_plans()
        layers = LocalLayers(plans, list(LayerStack(plans, self.objective.loss).layers))
        self.checkpoint, self.step = checkpoint, 0
        self.classes: tuple[str, ...] = ()
        if checkpoint is not None:
            manifest = load_weights(checkpoint, layers, context)
            self.step, self.classes = manifest.step, manifest.classes
            self._check_tokenizer(manifest.tokenizer)
        for layer in layers.modules:
            layer.to(device=context.device, dtype=dtype)
        self.dtype = dtype
        self.inference = Inference(layers, context)

    @classmethod
    def open(
        cls,
        run_folder: str | Path,
        *,
        step: int | None = None,
        device: str | None = None,
        dtype: torch.dtype | str = torch.float32,
        image_size: int | None = None,
    ) -> Run:
        """Open a run folder.

        Args:
            run_folder: `runs/<name>`, as written by `megavis train`.
            step: step of the checkpoint; default: the one that fine-tuning chose, or the newest.
            device: `cpu` or `cuda`; default: the best available.
            dtype: data type of the weights: `torch.bfloat16` or `bf16`, for example.
            image_size: side of the input images; default: as in training. Positions for another
                size are interpolated: rotary ones are scaled, learned ones resized.

        Raises:
            UserError: an argument is of another type or out of range, the folder holds no run or
                no such checkpoint, its paper means other words than in training, or this
                process's job splits layers.
        """
        if not isinstance(run_folder, str | Path):
            raise UserError(f"run_folder must be a path such as 'runs/NAME', not {run_folder!r}")
        kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if kind is None or kind not in DTYPES.values():
            raise UserError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
        folder = Path(run_folder)
        checkpoint = checkpoint_to_open(folder, step)
        config = load_run_config(folder)
        check_same_words(checkpoint, read_manifest(checkpoint).words, config)
        if image_size is not None:
            config = at_image_size(config, image_size)
        return cls(
            config, folder=folder, checkpoint=checkpoint, context=_context(device), dtype=kind
        )

    def _check_tokenizer(self, trained_with: str | None) -> None:
        """Reject tokens with another meaning than in training."""
        if trained_with is None:
            return
        given = self.objective.backbone.tokenizer_identity
        if given not in (None, trained_with):
            raise UserError(
                f"{self.folder} was trained with the tokenizer {trained_with[:12]}, but"
                f" objective.tokenizer is now {str(given)[:12]}"
            )

    def untrained(self, seed: int | None = None) -> Run:
        """Return the same network with fresh weights of a seed, by default the run's own.

        Raises:
            UserError: the seed is not a whole number from 0 to 2⁶⁴ - 1.
        """
        update = {} if seed is None else {"seed": checked_seed(seed)}
        return Run(
            self.config.model_copy(update=update),
            folder=self.folder,
            checkpoint=None,
            context=self.context,
            dtype=self.dtype,
        )

    @property
    def last_layer(self) -> int:
        """The last layer l with features; fine-tuning may have dropped those above it."""
        return len(self.inference.layers.feature_layers()) - 1

    @property
    def palette(self) -> Palette:
        """The colours of the ids; raises UserError if the run has none."""
        return Palette.load(self.folder / PALETTE_NAME)

    def outputs(self, inputs: Any, **options: Any) -> Tensor:
        """Return the head's raw outputs for inputs in the model's own form.

        Args:
            inputs: in the model's own form: ids `[b, n]` in raster order, patches, latents; if
                the run has a palette also photographs, as for `to_ids`.
            **options: options of the model by name; see `Model.inputs_from`. For example `mask`,
                bool `[b, n]`, for iGPT's BERT mode.

        Returns:
            The outputs of the model's head; for iGPT logits `[b, n, v]` in the run's order.

        Raises:
            UserError: an option does not apply; the message lists those that do.
        """
        given = {name: self._option(name, value) for name, value in options.items()}
        own = self._own_form(inputs)
        if (index := given.get("sample_index")) is not None:
            check_index(index, len(own))
        sequence_inputs = self.objective.inputs_from(own, **given)
        return self.objective.outputs(self.inference.predictions(sequence_inputs))

    def _option(self, name: str, value: Any) -> Any:
        """Return a number as it is, classes by number, and anything else as a tensor."""
        if isinstance(value, Tensor) and not value.ndim and name in _NUMBERS:
            value = value.item()
        if value is None or (is_real(value) and name in _NUMBERS):
            return value
        return self._labels(value) if name == "labels" else as_tensor(value, name)

    def features(
        self, inputs: Any, layer: int | None = None, *, sample_index: Any = None
    ) -> Tensor:
        """Return the mean over tokens of each norm's output (iGPT, section 2.4).

        Args:
            inputs: as in shards of the run's kind (`Batch.inputs`); if the run has a palette
                also photographs, as for `to_ids`.
            layer: l in 0 .. L, negative from the end; default: all.
            sample_index: as for `loss`.

        Returns:
            float32 `[b, h]`, or `[L + 1, b, h]` for all layers.

        Raises:
            UserError: there is no such layer, the model requires a class, or it was fine-tuned for
                another task than classes.
        """
        self.objective.check_features()
        last = self.last_layer
        if layer is not None and not (is_whole(layer) and -last - 1 <= layer <= last):
            raise UserError(f"layer {layer!r} is not one of 0 to {last}")
        whole = self._batch(inputs, sample_index)
        parts = zip(
            *(each.split(_AT_ONCE) for each in (whole.inputs, whole.labels, whole.sample_index)),
            strict=True,
        )
        inputs_of = self.objective.backbone.feature_inputs
        found = [self.inference.features(inputs_of(Batch(*part))) for part in parts]
        features = torch.cat(found, dim=1)
        return features if layer is None else features[layer]

    @torch.no_grad()
    def loss(self, inputs: Any, *, labels: Any = None, sample_index: Any = None) -> float:
        """Return the objective's loss, for iGPT in nats per token.

        Args:
            inputs: as for `features`.
            labels: classes `[b]`, by number or name, for a run with classes; needed by one that
                was fine-tuned to predict them. Default: no class.
            sample_index: int64 `[b]`, which drives random masks; default: 0 .. b - 1.

        Raises:
            UserError: the model requires a class or has no such class, or it was fine-tuned for
                another task.
        """
        tuned = self.config.finetune
        if labels is None and tuned is not None:
            raise UserError("the loss of a fine-tuned run needs labels; `outputs` needs none")
        if tuned is not None and tuned.task != "classes":
            raise UserError(f"the loss of finetune.task {tuned.task} needs more than labels")
        if labels is None:
            self.objective.backbone.check_unlabelled()
        batch = self._batch(inputs, sample_index, labels)
        if labels is not None:
            self._check_range(batch.labels)
        sequence = self.objective.sequence(batch)
        predictions = self.inference.predictions(sequence.inputs)
        return float(self.objective.loss(predictions, sequence.targets))

    def sampler(
        self, *, seed: int = 0, spell: Callable[[str], str] = str, **options: Any
    ) -> Sampler:
        """Return a sampler of this run with fixed options.

        Args:
            seed: random seed, a whole number from 0 to 2⁶⁴ - 1.
            spell: formats option names as the user typed them, for errors.
            **options: options of the model's density, schedule and search: temperature, top_k,
                top_p, sampling_steps, probability, guidance, guidance_power, guidance_schedule,
                beams, fans, rounds, choice_temperature, groups. None leaves an option to the model.

        Raises:
            UserError: the model generates no images, an option does not apply, or a value is of
                another type or out of range.
        """
        return Sampler(
            self.inference,
            self.objective,
            self.folder,
            options,
            seed=checked_seed(seed, spell("seed")),
            spell=spell,
        )

    def sample(
        self,
        num_images: int | None = None,
        *,
        originals: Any = None,
        given: float = 0.0,
        labels: Any = None,
        image: Any = None,
        tokens: bool = False,
        seed: int = 0,
        batch_size: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Generate images, or complete images from their first part.

        Args:
            num_images: default: as many as `originals`, `labels` or `image`.
            originals: images to complete, in the form of `outputs`.
            given: given share of the tokens, first in the run's order, in [0, 1].
            labels: int64 `[b]`, classes, if the run has any; repeated if fewer than images.
            image: uint8 `[b, H, W, 3]`, input of the encoder, if the run has one.
            tokens: return tokens instead of images.
            seed: random seed, a whole number from 0 to 2⁶⁴ - 1.
            batch_size: images generated at once; default: as many as fit on a GPU, 64 on a CPU.
            **options: as for `sampler`.

        Returns:
            Images uint8 `[b, H, W, 3]`. With `tokens`, or without a decoder, tokens in
            raster order: ids int64 `[b, n]`, patches `[b, n, d]`, latents `[b, c, h, w]`.

        Raises:
            UserError: the model does not support this, or a number is out of range.
            torch.OutOfMemoryError: a batch of `batch_size` images does not fit.
        """
        if not is_real(given) or not 0 <= given <= 1:
            raise UserError(f"the given share must lie in [0, 1], not {given!r}")
        if not isinstance(tokens, bool):
            raise UserError(f"tokens must be True or False, not {tokens!r}")
        for name, number in (("num_images", num_images), ("batch_size", batch_size)):
            if number is not None and not (is_whole(number) and number >= 1):
                raise UserError(f"{name} must be a whole number of at least 1, not {number!r}")
        sampler = self.sampler(seed=seed, **options)
        known = {} if labels is None else {"labels": self._labels(labels)}
        if image is not None:
            known["image"] = as_tensor(image, "image")
            if not len(known["image"]):
                raise UserError("image holds no image")
        inputs = None if originals is None else self._own_form(originals)
        rows = [len(each) for each in (inputs, *known.values()) if each is not None]
        drawn = sampler.sample(
            max(rows, default=1) if num_images is None else num_images,
            conditions=known,
            originals=inputs,
            num_given=round(given * sampler.model.num_tokens),
            batch_size=batch_size,
        )
        return drawn if tokens or not self._has_decoder(sampler) else sampler.to_images(drawn)

    def _has_decoder(self, sampler: Sampler) -> bool:
        try:
            sampler.model.check_images(self.folder)
        except UserError:
            return False
        return True

    def images(self, tokens: Any) -> np.ndarray:
        """Return the pixels of tokens in raster order: uint8 `[b, h, w, 3]`; needs a decoder.

        Raises:
            UserError: they are not tokens of this run, or there is no decoder.
        """
        model, found = model_of(self.objective), as_tensor(tokens, "the tokens")
        wanted = model.reads.of(model.blank_batch(1, torch.device("cpu")).inputs).shape[1:]
        if found.shape[1:] != wanted:
            shape = ", ".join(map(str, wanted))
            raise UserError(f"the tokens have shape {list(found.shape)}, not [b, {shape}]")
        if not len(found):
            raise UserError("the tokens hold no image")
        model.reads.check_values(found)
        return model.to_images(found.to(self.context.device), self.folder).cpu().numpy()

    def _batch(self, inputs: Any, sample_index: Any, labels: Any = None) -> Batch:
        own = self._own_form(inputs)
        classes = torch.full((len(own),), -1) if labels is None else self._labels(labels)
        index = (
            torch.arange(len(own))
            if sample_index is None
            else as_tensor(sample_index, "sample_index")
        )
        check_rows("labels", classes, len(own))
        check_index(index, len(own))
        return Batch(own, classes, index).to(self.context.device)

    def _check_range(self, labels: Tensor) -> None:
        """Raise UserError unless labels are classes that the model predicts or reads."""
        tuned, backbone = self.config.finetune, self.objective.backbone
        if tuned is None:
            condition = backbone.condition if isinstance(backbone, Model) else Condition()
            if isinstance(condition, EncodedImage):
                condition = condition.others
            condition.given({"labels": labels}, len(labels), labels.device)
        elif int(labels.min()) < 0 or int(labels.max()) >= tuned.num_classes:
            raise UserError(f"labels must be in 0..{tuned.num_classes - 1}")

    def _labels(self, labels: Any) -> Tensor:
        """Return classes given by number or name as int64 `[b]`."""
        given = [labels] if isinstance(labels, str) or np.ndim(labels) == 0 else list(labels)
        numbers = {name: label for label, name in enumerate(self.classes)}
        unknown = [each for each in given if isinstance(each, str) and each not in numbers]
        if unknown:
            known = ", ".join(self.classes) or "recorded: give numbers"
            raise UserError(f"labels: there is no class {unknown[0]!r}; classes are {known}")
        found = as_tensor(
            [numbers[each] if isinstance(each, str) else each for each in given], "labels"
        )
        if found.ndim != 1 or found.is_floating_point() or found.dtype == torch.bool:
            raise UserError("labels must be whole numbers or names of classes [b]")
        return found.long()

    def _own_form(self, inputs: Any) -> Tensor:
        """Return inputs on the run's device, as ids if the run has a palette."""
        found = as_tensor(inputs)
        if not len(found):
            raise UserError("the inputs hold no image")
        if (self.folder / PALETTE_NAME).exists():
            return self.to_ids(found)
        backbone = self.objective.backbone
        if isinstance(backbone, Model):
            if found.ndim == 2:
                backbone.reads.check_values(found)
        else:
            own = backbone.blank_batch(1, torch.device("cpu")).inputs.shape
            check_sides(found, own, self.config.objective)
        return found.to(self.context.device)

    def to_ids(self, inputs: Any) -> Tensor:
        """Return ids int64 `[b, n]` on the run's device.

        `inputs` are ids `[b, n]`, or photographs uint8 `[b, h, w, 3]` of the run's image size;
        anything else raises UserError.
        """
        array = as_tensor(inputs)
        side = self.config.data.image_size
        if array.dtype == torch.uint8 and array.shape[1:] == (side, side, 3):
            codes = self.palette.encode(array.cpu().numpy()).astype(np.int64)
            array = torch.from_numpy(codes).flatten(1)
        if array.ndim != 2 or array.shape[1] != side * side or array.is_floating_point():
            raise UserError(
                f"the inputs have shape {list(array.shape)} and type {array.dtype}; a run of"
                f" {side}² pixels takes ids [b, {side * side}], or uint8 [b, {side}, {side}, 3]"
            )
        if not len(array):
            raise UserError("the inputs hold no image")
        ids = array.long()
        model_of(self.objective).reads.check_values(ids)
        return ids.to(self.context.device)

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles: a run belongs to the process groups of its process."""
        raise UserError(
            f"a run can be neither copied nor pickled; open {self.folder} again with megavis.load"
        )


def at_image_size(config: RunConfig, image_size: int) -> RunConfig:
    """Return the config for images of another size, with interpolated rotary positions.

    Raises UserError if the model does not support images of that size.
    """
    if not is_whole(image_size) or image_size < 1:
        raise UserError(f"image_size must be a whole number of at least 1, not {image_size!r}")
    ratio = image_size / config.data.image_size
    short_side = config.data.short_side and round(config.data.short_side * ratio)
    data = {"image_size": image_size, "short_side": short_side}
    factor = interpolation(config.model.positions, config.data.image_size, image_size)
    scale = {"position_scale": config.model.position_scale * factor}
    changed = config.model_copy(
        update={
            "data": config.data.model_copy(update=data),
            "model": config.model.model_copy(update=scale),
        }
    )
    for key, complaint in check_config(changed):
        raise UserError(f"images of {image_size}² do not fit: {key}: {complaint}")
    return changed


def _context(device: str | None) -> ParallelContext:
    """Reuse this process's job, or create one with a single process."""
    context = current_context()
    if context is None:
        # Not os.environ: a launcher's variables would make it wait for other processes.
        context = open_context(read_launch({}), device=device)
        require_compiled(context)
        return context
    if device is not None:
        require_device(device)
    if context.pipeline.size > 1:
        raise UserError("a run cannot be opened inside a job with pipeline stages")
    return context
