"""A training step of iGPT: megavis's engine against the ImageGPT of `transformers`.

    OMP_NUM_THREADS=2 python -m benchmarks.training_step

Both have the same weights and see the same images: forward, backward, fused AdamW, no dropout, no
gradient clipping. megavis takes the way of `megavis train`: objective, layers, DeepSpeed's engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.timing import need_transformers, parser, report, summary, take_turns
from benchmarks.twins import NUM_COLORS, after_start, copy_weights, image_gpt, run_config
from megavis.config.schema import RunConfig
from megavis.data.batch import Batch


def our_step(config: RunConfig, theirs: torch.nn.Module, ids: torch.Tensor) -> Callable[[], float]:
    """Return a function that takes one step of megavis's engine and gives the loss."""
    from megavis.objectives import OBJECTIVES
    from megavis.parallel.context import open_context
    from megavis.parallel.launch import read_launch
    from megavis.training.engine import Engine

    context = open_context(read_launch({}), device="cpu")
    engine = Engine(config, OBJECTIVES["igpt"](config, context), context)
    copy_weights(theirs, engine.layers, config)
    # Shards give one byte a pixel or two; the objective widens them.
    batch = Batch(ids.to(torch.int32), torch.full((len(ids),), -1), torch.arange(len(ids)))
    steps = iter(range(config.training.steps))
    return lambda: float(engine.train_step(iter([batch]), next(steps)))


def their_step(config: RunConfig, model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], float]:
    """Return a function that takes one step on the ImageGPT and gives the loss."""
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


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--layers", type=int, default=6)
    arguments.add_argument("--heads", type=int, default=8, help="default: 8, as transformers has")
    arguments.add_argument("--image-size", type=int, default=32, help="tokens are its square")
    arguments.add_argument("--batch-size", type=int, default=4)
    options = arguments.parse_args()
    need_transformers()
    config = run_config(
        hidden_size=options.width,
        num_layers=options.layers,
        num_heads=options.heads,
        image_size=options.image_size,
        batch_size=options.batch_size,
    )
    ids = torch.randint(NUM_COLORS, (options.batch_size, options.image_size**2))
    theirs = image_gpt(config)
    steps = {
        "megavis": our_step(config, theirs, ids),
        "transformers": their_step(config, theirs, ids),
    }
    first = {name: step() for name, step in steps.items()}
    print("  ".join(f"loss of the first step, {name}: {loss:.6f}" for name, loss in first.items()))
    taken = take_turns(steps, rounds=options.rounds)
    report(
        summary(taken, against="megavis"),
        options.json,
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        tokens=options.image_size**2,
        batch=options.batch_size,
    )


if __name__ == "__main__":
    main()
