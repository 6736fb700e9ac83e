"""Images of 1024 tokens, greedily: megavis with its cache against `generate` of `transformers`.

    OMP_NUM_THREADS=2 python -m benchmarks.sampling

The ImageGPT has random weights; megavis has the same ones, as `megavis import` makes them. Both are
given the same first token each and must choose the same ids. A further line is megavis without a
cache: the whole sequence again for each id, of which `--uncached-tokens` are timed and the rest is
extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Taken, need_transformers, parser, report, summary, take_turns
from benchmarks.twins import NUM_COLORS, copy_weights, image_gpt, run_config
from megavis.config.schema import RunConfig
from megavis.model.runner import Runner
from megavis.objectives.igpt import IGPT


def our_model(config: RunConfig, theirs: Any) -> tuple[Runner, IGPT]:
    """Return megavis's model with the weights of an ImageGPT."""
    from megavis.model.stack import LocalLayers, Stack
    from megavis.parallel.context import open_context
    from megavis.parallel.launch import read_launch

    context = open_context(read_launch({}), device="cpu")
    objective = IGPT(config, context)
    plans = objective.layer_plans()
    layers = LocalLayers(plans, list(Stack(plans, objective.loss).layers))
    copy_weights(theirs, layers, config)
    return Runner(layers, context), objective


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


def our_images(runner: Runner, objective: IGPT, first: Tensor) -> Callable[[], Tensor]:
    """Return a function that completes `first` `[b, 1]` to ids `[b, n]`."""
    from megavis.sampling.autoregressive import generate

    return lambda: generate(runner, objective, batch_size=len(first), prefix=first, temperature=0.0)


def without_cache(
    runner: Runner, objective: IGPT, first: Tensor, num_tokens: int
) -> Callable[[], Tensor]:
    """Return a function that runs whole sequences, once for each of `num_tokens` ids."""
    ids = torch.zeros(len(first), objective.num_tokens, dtype=torch.int64)
    ids[:, :1] = first

    def run() -> Tensor:
        for place in range(1, num_tokens + 1):
            logits = objective.outputs(runner.predictions(objective.inputs_from(ids)))
            ids[:, place] = logits[:, place].argmax(-1)
        return ids

    return run


def agreement(ours: Tensor, theirs: Tensor) -> float:
    """Return the share of images `[b, n]` whose ids are all the same."""
    return float((ours == theirs).all(dim=1).float().mean())


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--width", type=int, default=256)
    arguments.add_argument("--layers", type=int, default=6)
    arguments.add_argument("--heads", type=int, default=8)
    arguments.add_argument("--image-size", type=int, default=32, help="tokens are its square")
    arguments.add_argument("--batch-size", type=int, default=16)
    arguments.add_argument("--uncached-tokens", type=int, default=2)
    options = arguments.parse_args()
    need_transformers()
    config = run_config(
        hidden_size=options.width,
        num_layers=options.layers,
        num_heads=options.heads,
        image_size=options.image_size,
        batch_size=options.batch_size,
    )
    torch.manual_seed(1)
    first = torch.randint(NUM_COLORS, (options.batch_size, 1))
    theirs = image_gpt(config).eval()
    runner, objective = our_model(config, theirs)
    contestants = {
        "megavis": our_images(runner, objective, first),
        "transformers": their_images(theirs, first),
    }
    drawn: dict[str, Tensor] = {}

    def keep(name: str, draw: Callable[[], Tensor]) -> Callable[[], None]:
        return lambda: drawn.update({name: draw()})

    taken = take_turns(
        {name: keep(name, draw) for name, draw in contestants.items()},
        rounds=options.rounds,
        warmup=0,
    )
    print(f"images with the same ids: {agreement(drawn['megavis'], drawn['transformers']):.0%}")
    few = without_cache(runner, objective, first, options.uncached_tokens)
    whole = take_turns({"few": few}, rounds=1, warmup=0)["few"][0]
    times = (options.image_size**2 - 1) / options.uncached_tokens
    slow = Taken(whole.wall * times, whole.cpu * times)
    taken["megavis, no cache (extrapolated)"] = [slow] * options.rounds
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
