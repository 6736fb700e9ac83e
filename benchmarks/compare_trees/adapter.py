"""Access to a checkout's internals, beyond its commands and `megavis.load`.

If a redesign moves one of these, update this file so that it supports old and new trees. Modules
are imported by name, since the recorded checkout may not be this one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

Parameters = dict[str, dict[str, Any]]


@dataclass
class Training:
    """Recorded values of a training run.

    Attributes:
        parameters: shape, weight decay, learning-rate scale and other options by name.
        sequences: inputs and targets of each micro-batch.
        batches: inputs and labels of each micro-batch.
        step_seconds: CPU time of each step.
    """

    parameters: Parameters = field(default_factory=dict)
    sequences: list[tuple[list[np.ndarray], list[np.ndarray]]] = field(default_factory=list)
    batches: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


@contextlib.contextmanager
def watched_training() -> Iterator[Training]:
    """Record the engine's work while a command trains."""
    engine: Any = importlib.import_module("megavis.training.engine").Engine
    seen, start, step = Training(), engine.__init__, engine.train_step

    def started(self: Any, *given: Any) -> None:
        # The objective alone; in older checkouts, between config and context.
        objective = given[len(given) // 2]
        objective.training_sequence = _kept(objective.training_sequence, seen)
        start(self, *given)
        seen.parameters = _parameters(self)

    def stepped(self: Any, *args: Any) -> Any:
        before = time.process_time()
        result = step(self, *args)
        seen.step_seconds.append(time.process_time() - before)
        return result

    with (
        mock.patch.object(engine, "__init__", started),
        mock.patch.object(engine, "train_step", stepped),
    ):
        yield seen


def _kept(sequence_of: Callable[[Any], Any], seen: Training) -> Callable[[Any], Any]:
    def kept(batch: Any) -> Any:
        sequence = sequence_of(batch)
        seen.batches.append((array(batch.inputs), array(batch.labels)))
        both = [[array(t) for t in part] for part in (sequence.inputs, sequence.targets)]
        seen.sequences.append((both[0], both[1]))
        return sequence

    return kept


def _parameters(engine: Any) -> Parameters:
    groups = engine.deepspeed.optimizer.param_groups
    group_of = {id(p): group for group in groups for p in group["params"]}
    rows = {}
    for name, parameter in engine.layers.named_parameters():
        group = group_of.get(id(parameter), {"frozen": True})
        hidden = ("params", "lr", "initial_lr")
        options = {key: _plain(group[key]) for key in sorted(group) if key not in hidden}
        rows[name] = {"shape": list(parameter.shape), **options}
    return rows


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def resolved_config(path: str) -> str:
    """Return a config file with all its defaults, as YAML."""
    module: Any = importlib.import_module("megavis.config.load")
    options: dict[str, Any] = {}
    if importlib.util.find_spec("megavis.objectives") is not None:
        papers: Any = importlib.import_module("megavis.objectives")
        options["objectives"] = papers.objective_configs()
    return str(module.dump_config(module.load_config(path, **options).config))


def weights(run: Any) -> dict[str, np.ndarray]:
    """Return the weights of an opened run by name."""
    return {name: array(value) for name, value in run.inference.layers.named_parameters()}


def sample_words(words: list[str]) -> list[str]:
    """Translate options of `megavis sample` to those of the checkout."""
    if importlib.util.find_spec("megavis.sampling.sampler") is None:
        return words
    return ["--temperature" if word == "--scale" else word for word in words]


def sampled_tokens(run: Any, **options: Any) -> torch.Tensor:
    """Return sampled tokens before decoding to images, if the checkout supports that."""
    if "tokens" in inspect.signature(run.sample).parameters:
        options["tokens"] = run.config.objective.name == "igpt"
    drawn: torch.Tensor = run.sample(**options)
    return drawn


def close_job() -> None:
    """Leave the job that `megavis.load` joined."""
    module: Any = importlib.import_module("megavis.parallel.context")
    if module.current_context() is not None:
        module.close_context()


def array(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).clone().numpy()
