"""A training step of iGPT: megavis's engine against the ImageGPT of `transformers`.

    OMP_NUM_THREADS=2 python -m benchmarks.training_step

Both have the same weights and see the same images: forward, backward, fused AdamW, no dropout, no
gradient clipping. megavis runs as in `megavis train`: objective, layers, DeepSpeed's engine. The
bound is a lower limit for any implementation in torch: only matrix products, in the library that
megavis uses, and attention, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.timing import need_transformers, report, summary, take_turns
from benchmarks.twins import (
    NUM_COLORS,
    after_start,
    copy_weights,
    image_gpt,
    matrix_shapes,
    run_config,
    sized_parser,
    sizes,
)
from megavis.config.schema import RunConfig
from megavis.data.loading.loader import Batch


def our_step(config: RunConfig, theirs: torch.nn.Module, ids: torch.Tensor) -> Callable[[], float]:
    """Return a function that takes one step of megavis's engine and returns the loss."""
    from megavis.papers import OBJECTIVES
    from megavis.parallel.context import open_context
    from megavis.parallel.launch import read_launch
    from megavis.training.engine import Engine

    context = open_context(read_launch({}), device="cpu")
    engine = Engine(OBJECTIVES["igpt"](config, context))
    copy_weights(theirs, engine.layers, config)
    # Shards have one or two bytes per pixel; the objective widens them.
    batch = Batch(ids.to(torch.int32), torch.full((len(ids),), -1), torch.arange(len(ids)))
    steps = iter(range(config.training.steps))
    return lambda: float(engine.train_step(iter([batch]), next(steps)))


def their_step(config: RunConfig, model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], float]:
    """Return a function that takes one step on the ImageGPT and returns the loss."""
    rate, betas = config.optimizer.learning_rate, config.optimizer.betas
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=betas, weight_decay=0.0, fused=True
    )
    inputs = after_start(ids)
    model.train()

    def step() -> float:
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def bare_step(config: RunConfig) -> Callable[[], None]:
    """Return a function that runs the products and attentions of a step on random numbers.

    All blocks share one set of tensors, which stay in the processor's cache if they fit.
    """
    model, batch, tokens = config.model, config.training.batch_size, config.data.image_size**2
    head_size = model.hidden_size // model.num_attention_heads
    of_block = [_product(batch * tokens, *shape) for shape in matrix_shapes(config)]
    of_head = _product(batch * tokens, model.hidden_size, NUM_COLORS)
    shape = (batch, model.num_attention_heads, tokens, head_size)
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape)

    def step() -> None:
        for _ in range(model.num_layers):
            for run in of_block:
                run()
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(mixed, (query, key, value), gradient)
        of_head()

    return step


def _product(rows: int, num_inputs: int, num_outputs: int) -> Callable[[], None]:
    """Return a function with the matrix products of a linear layer, forward and backward."""
    inputs, gradient = torch.randn(rows, num_inputs), torch.randn(rows, num_outputs)
    weight = torch.randn(num_outputs, num_inputs)

    def run() -> None:
        inputs @ weight.t()
        gradient @ weight
        gradient.t() @ inputs

    return run


def main() -> None:
    """Measure and report."""
    options = sized_parser(__doc__.splitlines()[0], batch_size=4).parse_args()
    need_transformers()
    config = run_config(options)
    ids = torch.randint(NUM_COLORS, (options.batch_size, options.image_size**2))
    theirs = image_gpt(config)
    steps = {
        "megavis": our_step(config, theirs, ids),
        "transformers": their_step(config, theirs, ids),
    }
    first = {name: step() for name, step in steps.items()}
    print("  ".join(f"loss of the first step, {name}: {loss:.6f}" for name, loss in first.items()))
    taken = take_turns({**steps, "bound": bare_step(config)}, rounds=options.rounds)
    report(summary(taken, against="megavis"), options.json, **sizes(config))


if __name__ == "__main__":
    main()
