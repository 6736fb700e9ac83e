"""GIVT: sampling with and without KV cache or guidance, and the loss's share of a step.

    OMP_NUM_THREADS=2 python -m benchmarks.givt --what cache

The model is GIVT-Causal at 256 tokens; `--layers` reduces the number of blocks. All matrices are
random, even the head's, which is normally initialised to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import parser, report, summary, take_turns
from megavis.composition.model import Model
from megavis.config.load import load_config
from megavis.data.loading.loader import Batch
from megavis.model.inference import Inference
from megavis.model.stack import LayerStack, LocalLayers
from megavis.papers import OBJECTIVES
from megavis.parallel.context import open_context
from megavis.parallel.launch import read_launch
from megavis.sampling.sampler import Sampler

CONFIGS = Path(__file__).parents[1] / "yaml_configs/givt"
Contestants = dict[str, Callable[[], object]]


def build(preset: str, layers: int, device: str) -> tuple[Model, Inference]:
    """Return a model with random weights."""
    words = [f"model.num_layers={layers}"] if layers else []
    config = load_config(CONFIGS / f"{preset}.yaml", words).config
    context = open_context(read_launch({}), device=device)
    objective = OBJECTIVES["givt"](config, context)
    assert isinstance(objective, Model)
    plans = objective.layer_plans()
    built = LocalLayers(plans, list(LayerStack(plans, objective.loss).layers))
    head = dict(built.named_parameters())["head.linear.weight"]
    torch.manual_seed(0)
    nn.init.normal_(head, std=0.02)
    for layer in built.modules:
        layer.to(context.device)
    return objective, Inference(built, context)


def sampler(
    objective: Model, inference: Inference, count: int, **options: object
) -> Callable[[], Tensor]:
    """Return a function that samples images."""
    guidance = float(str(options.get("guidance", 0.0)))
    chosen = {"temperature": 0.95, "guidance": guidance}
    drawing = Sampler(inference, objective, Path(), chosen)
    images, cached = torch.arange(count), bool(options.get("cached", True))
    return lambda: drawing.tokens(images, conditions={"labels": images}, cached=cached).cpu()


def training(objective: Model, inference: Inference, count: int) -> Contestants:
    """Return functions for forward and backward pass of a full step, and of the loss only."""
    layers, device = inference.layers.modules, inference.context.device
    moments = torch.rand(count, *objective.reads.sample_shape)
    batch = Batch(moments, torch.zeros(count, dtype=torch.int64), torch.arange(count)).to(device)
    sequence = objective.sequence(batch)
    parameters = [p for layer in layers for p in layer.parameters()]
    shape = (count, objective.num_tokens, objective.density.num_outputs)
    outputs = torch.randn(shape, device=device, requires_grad=True)

    def step() -> float:
        state: Any = sequence.inputs
        for layer in layers:
            state = layer(state)
        gradients = torch.autograd.grad(objective.loss(state, sequence.targets), parameters)
        return float(gradients[0].sum())

    def loss() -> float:
        value = objective.loss(outputs, sequence.targets)
        return float(torch.autograd.grad(value, outputs)[0].sum())

    return {"loss alone": loss, "whole step": step}


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--what", choices=("cache", "guidance", "loss"), default="cache")
    arguments.add_argument("--preset", default="causal_default")
    arguments.add_argument("--layers", type=int, default=0, help="blocks; default: the preset's")
    arguments.add_argument("--batch-size", type=int, default=1)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = arguments.parse_args()
    objective, inference = build(options.preset, options.layers, options.device)
    count = options.batch_size
    if options.what == "cache":
        contestants: Contestants = {
            "cached": sampler(objective, inference, count),
            "not cached": sampler(objective, inference, count, cached=False),
        }
    elif options.what == "guidance":
        contestants = {
            "no guidance": sampler(objective, inference, count),
            "DB-CFG 0.4": sampler(objective, inference, count, guidance=0.4),
        }
    else:
        contestants = training(objective, inference, count)
    about: dict[str, object] = {"what": options.what, "preset": options.preset, "images": count}
    if options.what == "cache":
        drawn = [run() for run in contestants.values()]
        assert all(isinstance(tokens, Tensor) for tokens in drawn)
        about["difference"] = float((drawn[0] - drawn[1]).abs().max())  # type: ignore[operator]
    seconds = take_turns(contestants, rounds=options.rounds)
    report(summary(seconds, against=next(iter(contestants))), options.json, **about)


if __name__ == "__main__":
    main()
