"""Greedy generation of 1024 tokens: megavis with a KV cache against `generate` of `transformers`.

    OMP_NUM_THREADS=2 python -m benchmarks.sampling

The ImageGPT has random weights, which megavis converts as in `megavis import`. Both start from the
same first tokens and must choose the same ids. Another line is megavis without a cache, which runs
the whole sequence for each id; `--uncached-tokens` of them are timed, and the rest is extrapolated.
The bound is a lower limit for any implementation in torch: for each id, only its matrix products
and the two of attention with all keys and values so far.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Taken, need_transformers, report, summary, take_turns
from benchmarks.twins import (
    NUM_COLORS,
    copy_weights,
    image_gpt,
    matrix_shapes,
    run_config,
    sized_parser,
    sizes,
)
from megavis.composition.model import Model
from megavis.config.schema import RunConfig
from megavis.model.inference import Inference


def our_model(config: RunConfig, theirs: Any) -> tuple[Inference, Model]:
    """Return megavis's model with the weights of an ImageGPT."""
    from megavis.model.stack import LayerStack, LocalLayers
    from megavis.parallel.context import open_context
    from megavis.parallel.launch import read_launch

    context = open_context(read_launch({}), device="cpu")
    objective = Model(config, context)
    plans = objective.layer_plans()
    layers = LocalLayers(plans, list(LayerStack(plans, objective.loss).layers))
    copy_weights(theirs, layers, config)
    return Inference(layers, context), objective


def their_images(model: Any, first: Tensor, *, use_cache: bool = True) -> Callable[[], Tensor]:
    """Return a function that completes `first` `[b, 1]` to ids `[b, n]`."""
    import transformers

    num_tokens = model.config.n_positions
    start = torch.full_like(first, NUM_COLORS)
    settings = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=num_tokens - 1,
        use_cache=use_cache,
        pad_token_id=NUM_COLORS,
        eos_token_id=None,
    )
    prompt = torch.cat([start, first], dim=1)
    mask = torch.ones_like(prompt)
    return lambda: model.generate(prompt, attention_mask=mask, generation_config=settings)[:, 1:]


def our_images(inference: Inference, objective: Model, first: Tensor) -> Callable[[], Tensor]:
    """Return a function that completes `first` `[b, 1]` to ids `[b, n]`."""
    from megavis.sampling.sampler import Sampler

    sampler = Sampler(inference, objective, Path(), {"temperature": 0.0})
    return lambda: sampler.tokens(torch.arange(len(first)), given=first)


def without_cache(
    inference: Inference, objective: Model, first: Tensor, num_tokens: int
) -> Callable[[], Tensor]:
    """Return a function that runs whole sequences, once for each of `num_tokens` ids."""
    ids = torch.zeros(len(first), objective.num_tokens, dtype=torch.int64)
    ids[:, :1] = first

    def run() -> Tensor:
        for place in range(1, num_tokens + 1):
            logits = objective.outputs(inference.predictions(objective.inputs_from(ids)))
            ids[:, place] = logits[:, place].argmax(-1)
        return ids

    return run


def bare_products(config: RunConfig) -> Callable[[], None]:
    """Return a function that runs the products of all ids on random numbers."""
    model, batch, num_tokens = config.model, config.training.batch_size, config.data.image_size**2
    head_size = model.hidden_size // model.num_attention_heads
    rows = {width: torch.randn(batch, width) for width in (model.hidden_size, model.mlp_size)}
    kept = (batch * model.num_attention_heads, num_tokens, head_size)
    blocks = [
        (
            [(width, torch.randn(width, outputs)) for width, outputs in matrix_shapes(config)],
            torch.randn(kept),
            torch.randn(kept),
        )
        for _ in range(model.num_layers)
    ]
    query, head = torch.randn(kept[0], 1, head_size), torch.randn(model.hidden_size, NUM_COLORS)

    def run() -> None:
        for count in range(1, num_tokens):
            for products, keys, values in blocks:
                for width, weight in products:
                    rows[width] @ weight
                scores = torch.bmm(query, keys[:, :count].transpose(1, 2))
                torch.bmm(scores, values[:, :count])
            rows[model.hidden_size] @ head

    return run


def agreement(ours: Tensor, theirs: Tensor) -> float:
    """Return the fraction of images `[b, n]` whose ids are all equal."""
    return float((ours == theirs).all(dim=1).float().mean())


def main() -> None:
    """Measure and report."""
    arguments = sized_parser(__doc__.splitlines()[0], batch_size=16)
    arguments.add_argument("--uncached-tokens", type=int, default=2, help="0 to skip this")
    options = arguments.parse_args()
    need_transformers()
    config = run_config(options)
    torch.manual_seed(1)
    first = torch.randint(NUM_COLORS, (options.batch_size, 1))
    theirs = image_gpt(config).eval()
    inference, objective = our_model(config, theirs)
    contestants = {
        "megavis": our_images(inference, objective, first),
        "transformers": their_images(theirs, first),
    }
    drawn: dict[str, Tensor] = {}

    def keep(name: str, draw: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: drawn.update({name: draw()})

    taken = take_turns(
        {
            **{name: keep(name, draw) for name, draw in contestants.items()},
            "bound": bare_products(config),
        },
        rounds=options.rounds,
        warmup=0,
    )
    print(f"images with the same ids: {agreement(drawn['megavis'], drawn['transformers']):.0%}")
    if options.uncached_tokens:
        few = without_cache(inference, objective, first, options.uncached_tokens)
        whole = take_turns({"few": few}, rounds=1, warmup=0)["few"][0]
        times = (options.image_size**2 - 1) / options.uncached_tokens
        slow = Taken(whole.wall * times, whole.cpu * times)
        taken["megavis, no cache (extrapolated)"] = [slow] * options.rounds
    report(summary(taken, against="megavis"), options.json, **sizes(config))


if __name__ == "__main__":
    main()
