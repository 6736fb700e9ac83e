"""What planning has to know of a model: sizes, tokens, parameters, and what its ends keep.

Blocks are the same for every paper, so what they keep for the backward pass is arithmetic
(`memory.py`). Embedding, head and loss are the paper's own: they are run once on the meta device,
where tensors have shapes and no numbers, and what autograd saves is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megavis.config.errors import UserError
from megavis.config.schema import RunConfig
from megavis.model.flops import Workload
from megavis.model.stream import State, Stream
from megavis.model.visibility import Kind
from megavis.objectives.base import Objective, Sequence
from megavis.planning.parameters import Layers, count_parameters

_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Two images, so that a dimension of one image is not taken for one that is shared by all.
_IMAGES = 2


@dataclass(frozen=True)
class ModelShape:
    """A model as planning sees it.

    Attributes:
        layers: parameters.
        hidden_size: width of the residual stream.
        mlp_size: width of the MLP.
        num_heads: attention heads.
        work: tokens of an image, by what is computed for them.
        visibility: who sees whom.
        is_rotary: queries and keys are turned by where they stand.
        is_layer_norm: norms subtract the mean.
        mlp_dropout: something is dropped inside the MLP.
        residual_dropouts: halves of a block whose result is dropped from, 0 to 2.
        precision: `float32`, `bf16` or `fp16`.
        keeps_average: a moving average of the weights is kept.
        embedding_bytes: what autograd saves in the first layer, an image.
        head_bytes: in the last layer and the loss, an image.
        flops: operations of a training step for one image, recomputation not counted.
    """

    layers: Layers
    hidden_size: int
    mlp_size: int
    num_heads: int
    work: Workload
    visibility: Kind
    is_rotary: bool
    is_layer_norm: bool
    mlp_dropout: bool
    residual_dropouts: int
    precision: str
    keeps_average: bool
    embedding_bytes: float
    head_bytes: float
    flops: float

    @property
    def num_layers(self) -> int:
        """Blocks."""
        return self.layers.num_blocks

    @property
    def number_size(self) -> int:
        """Bytes of a number in the compute precision."""
        return number_size(self.precision)


def shape_of(objective: Objective) -> ModelShape:
    """Measure the model of an objective, in a context of one process, without allocating it.

    Raises:
        UserError: its blocks attend to an encoder, which the arithmetic of plans leaves out.
    """
    config = objective.config
    if objective.workload().num_memory:
        raise UserError(
            f"plans leave out encoders, and {config.objective.name} has one; `megavis params`"
            " counts its parameters"
        )
    model = config.model
    embedding_bytes, head_bytes = _saved_by_ends(objective)
    return ModelShape(
        layers=Layers.of(count_parameters(objective), model.num_layers),
        hidden_size=model.hidden_size,
        mlp_size=model.mlp_size,
        num_heads=model.num_attention_heads,
        work=objective.workload(),
        visibility=objective.visibility_kind,
        is_rotary="coordinates" in objective.carries,
        is_layer_norm=model.normalization == "layer_norm",
        mlp_dropout=bool(model.mlp_dropout),
        residual_dropouts=bool(model.residual_dropout) + bool(model.hidden_dropout),
        precision=config.training.precision,
        keeps_average=bool(config.optimizer.ema_decay),
        embedding_bytes=embedding_bytes,
        head_bytes=head_bytes,
        flops=objective.flops_per_image(),
    )


def number_size(precision: str) -> int:
    """Return the bytes of a number in a compute precision."""
    return _DTYPES[precision].itemsize


def require_blocks(config: RunConfig) -> None:
    """Refuse what planning has no arithmetic for.

    Raises:
        UserError: the config has no Transformer, or fine-tunes one.
    """
    if not config.objective.has_blocks:
        name = config.objective.name
        raise UserError(
            f"a {name} has no Transformer blocks to lay out; it trains data-parallel, so start it"
            " on as many GPUs as divide training.batch_size"
        )
    if config.finetune is not None:
        raise UserError("plans are of pre-training; leave the finetune section away")


def saved_bytes(run: Callable[[], Any], modules: Iterable[nn.Module] = ()) -> tuple[int, Any]:
    """Return what autograd saves while `run` runs, each storage once, and what it returned.

    Args:
        run: a forward pass.
        modules: whose parameters are not counted: they are there anyway.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    # Kept until the end: a storage that is freed would leave its name to another.
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()._cdata
        # Asked each time: ZeRO-3 gives a parameter another storage whenever it gathers it.
        if all(place != parameter.untyped_storage()._cdata for parameter in parameters):
            saved.setdefault(place, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()), result


def _saved_by_ends(objective: Objective) -> tuple[float, float]:
    """Return the bytes an image that first layer, and last layer with the loss, save."""
    dtype = _DTYPES[objective.config.training.precision]
    first_plan, *_, last_plan = objective.layer_plans()
    with torch.device("meta"):
        first, last = (plan.build().to(dtype).train() for plan in (first_plan, last_plan))
    sequence = objective.blank_sequence(_IMAGES, torch.device("meta"))
    at_first, state = saved_bytes(lambda: first(sequence.inputs), [first])
    at_last, _ = saved_bytes(lambda: _score(objective, last, state, sequence), [last])
    return at_first / _IMAGES, at_last / _IMAGES


def _score(objective: Objective, head: nn.Module, state: State, sequence: Sequence) -> Tensor:
    """Run the head on what would come out of the last block, and the loss."""
    stream = Stream.unpack(state, objective.carries)
    read = stream.hidden[-objective.workload().num_read :]
    left = stream.with_hidden(read.detach().requires_grad_()).pack()
    return objective.loss(head(left), sequence.targets)
