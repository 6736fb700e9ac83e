"""Two-stream attention: keys and values of content only, against all tokens with a mask.

    OMP_NUM_THREADS=2 python -m benchmarks.two_streams

The model is GVP's ViT-B at 196 patches and one condition token. The plain variant computes queries,
keys and values of all 393 tokens in every layer and applies a dense mask.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import parser, report, summary, take_turns
from megavis.composition.model import Model
from megavis.config.load import load_config
from megavis.data.loading.loader import Batch
from megavis.model.attention import Attention, projected_heads
from megavis.model.core import Block
from megavis.model.layer_state import LayerState
from megavis.model.visibility import AttentionContext
from megavis.papers import OBJECTIVES
from megavis.parallel.context import open_context
from megavis.parallel.launch import read_launch

CONFIG = Path(__file__).parents[1] / "yaml_configs/gvp/vit_b_p2p.yaml"


def plainly(block: Block) -> None:
    """Switch a block to the plain variant, with its own weights."""
    block.is_last = False
    attention = block.self_attention
    assert isinstance(attention, Attention)

    def forward(
        hidden_states: Tensor, attention_mask: AttentionContext, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = projected_heads(
            attention.linear_qkv(hidden_states), attention.head_size
        )
        count, content = len(hidden_states), attention_mask.visibility.num_content
        mask = attention_mask.visibility.mask(count, content)
        assert mask is not None
        mask = F.pad(mask, (0, count - content))
        # Softmax over no keys is NaN: let such rows attend to themselves, and zero the result.
        blind = ~mask.any(-1, keepdim=True)
        seen = mask | blind & torch.eye(count, dtype=torch.bool)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
        mixed = mixed.masked_fill(blind[:, None], 0.0)
        return attention.linear_proj(mixed.permute(2, 0, 1, 3).flatten(2))

    attention.forward = forward  # type: ignore[method-assign]


def step_of(objective: Model, layers: list[nn.Module], batch: Batch) -> Callable[[], list[Tensor]]:
    """Return a function that returns loss and gradients of one forward and backward pass."""
    parameters = [p for layer in layers for p in layer.parameters()]

    def step() -> list[Tensor]:
        sequence = objective.sequence(batch)
        state = sequence.inputs
        for layer in layers[:-1]:
            state = layer(state)
        stream = LayerState.unpack(state, objective.carried_names)
        queries = objective.num_tokens
        predictions = layers[-1](stream.with_hidden(stream.hidden[-queries:]).pack())
        loss = objective.loss(predictions, sequence.targets)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return step


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--batch-size", type=int, default=2)
    options = arguments.parse_args()
    words = [f"model.num_layers={options.layers}", "parallel.zero_stage=0"]
    words += ["training.precision=float32", "data.train=none", "data.validation=null"]
    config = load_config(CONFIG, words).config
    context = open_context(read_launch({}), device="cpu")
    objective = OBJECTIVES["gvp"](config, context)
    assert isinstance(objective, Model)
    built = [[plan.build() for plan in objective.layer_plans()] for _ in range(2)]
    for ours, theirs in zip(*built, strict=True):
        theirs.load_state_dict(ours.state_dict())
        if isinstance(theirs, Block):
            plainly(theirs)
    side = config.data.image_size
    images = torch.randint(256, (options.batch_size, side, side, 3), dtype=torch.uint8)
    batch = Batch(images, torch.full((len(images),), -1), torch.arange(len(images)))
    steps = {
        "content's keys": step_of(objective, built[0], batch),
        "all tokens' keys": step_of(objective, built[1], batch),
    }
    numbers = [step() for step in steps.values()]
    difference = max(
        float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(*numbers, strict=True)
    )
    seconds = take_turns(steps, rounds=options.rounds)
    about = {"layers": options.layers, "batch": options.batch_size, "difference": difference}
    report(summary(seconds, against="content's keys"), options.json, **about)


if __name__ == "__main__":
    main()
