"""Checks between the keys of a fine-tuning run and others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from megavis.config.schema import ConfigIssue, FinetuneConfig, RunConfig

NO_NULL_LABEL = (
    "is 0: the model has no null label and requires the class of an image, which features"
    " must not include; train with a value above 0"
)
"""Error for the key `null_label_key` when such a model is fine-tuned."""


def check_null_label(config: RunConfig) -> Iterator[ConfigIssue]:
    """Check that features exist, and that a class-conditional model has a null label for them."""
    key = config.objective.null_label_key(config)
    measures = set(config.evaluation.what if config.evaluation else ()) & {"probe", "neighbors"}
    if (config.finetune is not None or measures) and key is not None:
        yield key, NO_NULL_LABEL
    if config.finetune is not None and not config.finetune.gives_features and measures:
        text = "needs features of whole images, which finetune.task"
        yield "evaluation.what", f"{min(measures)} {text} {config.finetune.task} does not give"


def check_finetuning(config: RunConfig) -> Iterator[ConfigIssue]:
    """Check that a step can be selected by accuracy, and that no token sees its own target."""
    settings = config.finetune
    yield from _check_patience(config)
    if settings is None:
        return
    if not config.objective.has_blocks:
        yield "finetune", f"{config.objective.name} has no Transformer blocks to fine-tune"
    if config.data.validation is None:
        yield "data.validation", "must name labelled shards: the best step is chosen on them"
    if config.training.validate_every == 0:
        text = "must be 1 or more: steps between measurements of the accuracy"
        yield "training.validate_every", text
    if settings.visibility == "full" and settings.generative_weight:
        yield (
            "finetune.visibility",
            "full shows tokens their own targets; set finetune.generative_weight to 0, or"
            " this to kept",
        )
    if settings.from_step is not None and settings.from_run is None:
        yield "finetune.from_step", "selects a checkpoint of finetune.from_run, which is absent"
    yield from _check_task(settings)
    if settings.task != "classes":
        checks = {"segments": _check_segments, "instances": _check_instances}
        yield from checks[settings.task](config, settings)
        return
    yield from _check_layer(config, settings)
    if settings.mixing_batch % 2:
        text = f"{settings.mixing_batch} is odd, and images are mixed in pairs; make it even"
        yield "finetune.mixing_batch", text
    if settings.linear_evaluation:
        yield from _check_linear_evaluation(config, settings)
    else:
        yield from _check_whole_tuning(config, settings)


_OF_CLASSES: tuple[str, ...] = (
    "generative_weight",
    "read_out",
    "layer",
    "concatenate",
    "classifier_std",
    "label_smoothing",
    "mixup",
    "cutmix",
    "mixing",
    "mixing_batch",
    "linear_evaluation",
    "standardize",
)
_TASKS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_OF_CLASSES, ("classes",)),
    **dict.fromkeys(("layers", "head_dropout", "auxiliary_weight"), ("segments",)),
    "head_width": ("segments", "instances"),
    **dict.fromkeys(
        ("detector", "regions", "window", "global_blocks", "relative_positions"), ("instances",)
    ),
}
"""The tasks to which a key applies; all others apply to every task."""


def _check_task(settings: FinetuneConfig) -> Iterator[ConfigIssue]:
    """Check that no key belongs to another task."""
    for key, tasks in _TASKS.items():
        changed = getattr(settings, key) != type(settings).model_fields[key].default
        if changed and settings.task not in tasks:
            text = f"applies only to finetune.task {' and '.join(tasks)}; remove it"
            yield f"finetune.{key}", text


def _check_segments(config: RunConfig, settings: FinetuneConfig) -> Iterator[ConfigIssue]:
    """Check that the four features exist, and that one process group holds all of them."""
    last, layers = config.model.num_layers, settings.layers
    if layers is not None and (
        len(layers) != 4 or list(layers) != sorted(layers) or layers[-1] > last
    ):
        text = f"{list(layers)} must be four numbers from 1 to {last}, the lowest first"
        yield "finetune.layers", text
    yield from _check_tuned_blocks(config, settings)
    why = "for finetune.task segments, whose head reads several blocks"
    yield from _check_undivided(config, why, _STAGES)


_STAGES = ("pipeline_model_parallel_size", "context_parallel_size")


def _check_undivided(config: RunConfig, why: str, keys: Iterable[str]) -> Iterator[ConfigIssue]:
    for key in keys:
        if getattr(config.parallel, key) > 1:
            yield f"parallel.{key}", f"must be 1 {why}"


def _check_instances(config: RunConfig, settings: FinetuneConfig) -> Iterator[ConfigIssue]:
    """Check that windows cover the image, that blocks exist, and that images are not split."""
    last, blocks = config.model.num_layers, settings.global_blocks
    if blocks is not None and (
        not blocks or list(blocks) != sorted({*blocks}) or blocks[-1] > last
    ):
        text = f"{list(blocks)} must be different numbers from 1 to {last}, the lowest first"
        yield "finetune.global_blocks", text
    elif blocks is not None and settings.window is None:
        yield "finetune.global_blocks", "applies only to finetune.window; remove it"
    elif settings.window is not None and len(settings.blocks_without_window(last)) == last:
        text = f"{settings.window} limits no block, since all {last} attend to all patches"
        yield "finetune.window", f"{text}; remove it, or name fewer in finetune.global_blocks"
    if config.model.hidden_size % 4:
        text = f"{config.model.hidden_size} must be a multiple of 4 for the pyramid of instances"
        yield "model.hidden_size", text
    if config.data.crop not in ("jittered", "center"):
        text = f"{config.data.crop} must be jittered for finetune.task instances, or center"
        yield "data.crop", text
    yield from _check_tuned_blocks(config, settings)
    why = "for finetune.task instances, which takes images one by one"
    yield from _check_undivided(config, why, (*_STAGES, "tensor_model_parallel_size"))


def _check_patience(config: RunConfig) -> Iterator[ConfigIssue]:
    """Check that pre-training that may stop early is validated."""
    if not config.training.patience:
        return
    if config.finetune is not None:
        yield "training.patience", "is for pre-training: set it to 0, and finetune.patience"
    elif config.data.validation is None or not config.training.validate_every:
        missing = "training.validate_every" if config.data.validation else "data.validation"
        yield "training.patience", f"needs {missing}: the best step is chosen by accuracy"


def _check_whole_tuning(config: RunConfig, settings: FinetuneConfig) -> Iterator[ConfigIssue]:
    """Check that every layer is trained, and that no key of linear evaluation is set."""
    if config.model.features == "blocks":
        text = "blocks leaves out the last norm, which would not be trained; fine-tune on norms"
        yield "model.features", f"{text}, or set finetune.linear_evaluation"
    yield from _check_tuned_blocks(config, settings)
    for key in ("concatenate", "average", "standardize"):
        if getattr(settings, key) != type(settings).model_fields[key].default:
            yield f"finetune.{key}", "applies only to finetune.linear_evaluation; remove it"


def _check_tuned_blocks(config: RunConfig, settings: FinetuneConfig) -> Iterator[ConfigIssue]:
    """Check that some blocks are frozen, and that the layout supports it."""
    tuned = settings.tuned_blocks
    if tuned is None:
        return
    count = config.model.num_layers if settings.layer is None else settings.layer
    if tuned > count:
        yield "finetune.tuned_blocks", f"is {tuned}; there are {count} blocks to train"
    if settings.generative_weight:
        text = "freezes layers of the paper's own loss; set finetune.generative_weight to 0"
        yield "finetune.tuned_blocks", text
    if config.parallel.zero_stage == 3:
        # DeepSpeed frees the weights of a layer before its backward pass if its input has no
        # gradient.
        text = "must be 2 or less for finetune.tuned_blocks: 3 needs a gradient in every layer"
        yield "parallel.zero_stage", text
    yield from _check_frozen_layers(config, "finetune.tuned_blocks")


def _check_frozen_layers(config: RunConfig, key: str) -> Iterator[ConfigIssue]:
    """Check that no pipeline or recomputation needs gradients of layers that `key` freezes."""
    if config.parallel.pipeline_model_parallel_size > 1:
        text = f"must be 1 for {key}: a frozen stage has no gradient to send"
        yield "parallel.pipeline_model_parallel_size", text
    if config.parallel.activation_checkpointing != "none":
        text = f"must be none for {key}, whose frozen layers keep no activations"
        yield "parallel.activation_checkpointing", text


def _check_layer(config: RunConfig, settings: FinetuneConfig) -> Iterator[ConfigIssue]:
    """Check that the layers to read exist, and that those above are not needed."""
    last = config.model.num_layers
    layer, around = last if settings.layer is None else settings.layer, settings.concatenate // 2
    if layer > last:
        yield "finetune.layer", f"is {layer}; the model has layers 0 to {last}"
        return
    if settings.concatenate % 2 == 0:
        text = f"{settings.concatenate} layers have no middle: use an odd number"
        yield "finetune.concatenate", text
    elif not around <= layer <= last - around:
        text = f"{settings.concatenate} layers around layer {layer} are not within 0 to {last}"
        yield "finetune.concatenate", f"{text}; change finetune.layer"
    if settings.average > layer + 1:
        text = f"{settings.average} layers up to layer {layer} are not within 0 to {last}"
        yield "finetune.average", f"{text}; use at most {layer + 1}, or change finetune.layer"
    elif settings.average > 1 and settings.concatenate > 1:
        text = "averages layers that finetune.concatenate puts side by side; set one of them to 1"
        yield "finetune.average", text
    if layer < last and settings.generative_weight:
        text = "drops blocks that the paper's own loss needs; set finetune.generative_weight to 0"
        yield "finetune.layer", text
    stages = config.parallel.pipeline_model_parallel_size
    if stages > max(1, layer):
        text = f"{layer} blocks below finetune.layer cannot fill {stages} pipeline stages"
        yield "parallel.pipeline_model_parallel_size", f"{text}; use at most {max(1, layer)}"


def _check_linear_evaluation(config: RunConfig, settings: FinetuneConfig) -> Iterator[ConfigIssue]:
    """Check that only the classifier has gradients, and that nothing below it is random."""
    wrong = {
        "generative_weight": settings.generative_weight != 0,
        "layer_decay": settings.layer_decay != 1,
        "tuned_blocks": settings.tuned_blocks is not None,
    }
    for key in (key for key, is_wrong in wrong.items() if is_wrong):
        yield f"finetune.{key}", "applies to trained layers; linear_evaluation freezes them"
    if config.drop_path:
        text = f"must be 0, not {config.drop_path}: linear_evaluation freezes the layers"
        yield "finetune.drop_path", text
    if config.model.has_dropout:
        text = "has dropout, which finetune.linear_evaluation does not allow; set its dropouts to 0"
        yield "model", text
    yield from _check_frozen_layers(config, "finetune.linear_evaluation")


def check_finetuning_batch(
    config: RunConfig, micro: int, data_parallel: int
) -> Iterator[ConfigIssue]:
    """Yield problems with a micro-batch of `micro` images on each of `data_parallel` processes."""
    settings = config.finetune
    if settings is None:
        return
    if max(settings.mixup, settings.cutmix) > 0 and micro % 2:
        text = f"the micro-batch has {micro} images, and mixup and cutmix mix pairs: make it even"
        yield "training.micro_batch_size", text
    if settings.linear_evaluation and micro * data_parallel != config.training.batch_size:
        yield (
            "training.micro_batch_size",
            "remove it under finetune.linear_evaluation: features are standardised over the"
            " whole batch, which all processes must hold at once",
        )
