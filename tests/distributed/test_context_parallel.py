"""Context parallelism: the all-to-all, evaluation passes, features and dropout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from layout_curves import make_config, with_layout

from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.model.context_parallel import heads_to_tokens, tokens_to_heads
from megavis.model.inference import Inference
from megavis.model.stack import LayerStack, LocalLayers
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import Launch
from megavis.training.engine import Engine
from megavis.training.job import open_job
from megavis.training.trainer import Trainer

BOTH = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}


def features_and_loss(launch: Launch, config: RunConfig) -> tuple[Any, float]:
    """Return the features and the loss of four images with untrained weights."""
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        plans = run.objective.layer_plans()
        stack = LayerStack(plans, run.objective.loss)
        inference = Inference(LocalLayers(plans, list(stack.layers)), context)
        images, _ = run.train_data.read(range(4))
        ids = torch.from_numpy(images.astype("int64"))
        inputs = run.objective.inputs_for_features(ids, None)
        predictions = inference.predictions(run.objective.inputs_from(ids))
        loss = run.objective.loss(predictions, (ids.flatten(1),))
        return inference.features(inputs).numpy(), float(loss)


@pytest.mark.parametrize(("processes", "layout"), [(2, {"context_parallel_size": 2}), (4, BOTH)])
def test_features_are_those_of_one_process(
    run_job: Any, tiny_config: Path, processes: int, layout: dict[str, Any]
) -> None:
    config = make_config(tiny_config)
    [(features, loss)] = run_job(features_and_loss, 1, config)
    for found, other in run_job(features_and_loss, processes, with_layout(config, **layout)):
        assert found == pytest.approx(features, rel=1e-5, abs=1e-6)
        assert other == pytest.approx(loss, rel=1e-6)


def tokens_of_logits(launch: Launch, config: RunConfig) -> list[int]:
    """Take a step; return the tokens for which this process computes logits in each pass."""
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        seen: list[int] = []
        head = engine.layers.modules[-1]
        head.register_forward_hook(lambda *passed: seen.append(len(passed[-1])))
        with run.loader(engine) as loader:
            engine.train_step(loader, 0)
        return seen


@pytest.mark.parametrize(("processes", "layout"), [(2, {"context_parallel_size": 2}), (4, BOTH)])
def test_each_process_has_logits_of_its_own_tokens(
    run_job: Any, tiny_config: Path, processes: int, layout: dict[str, Any]
) -> None:
    """Their values are covered by `test_layouts.py`."""
    config = with_layout(make_config(tiny_config), **layout)
    for seen in run_job(tokens_of_logits, processes, config):
        assert set(seen) == {64 // 2}


def traded(launch: Launch) -> list[torch.Tensor]:
    """Trade rows of 4 tokens, 1 image and 3 · 2 numbers on two processes, and trade them back."""
    context = open_context(launch, ParallelConfig(context_parallel_size=2), device="cpu")
    try:
        whole = torch.arange(24.0).view(4, 1, 6)
        own = whole[2 * launch.rank : 2 * launch.rank + 2].clone().requires_grad_()
        heads = tokens_to_heads(own, context.context.group)
        back = heads_to_tokens(heads, context.context.group)
        (back * own.detach()).sum().backward()
        assert own.grad is not None
        return [heads.detach(), back.detach(), own.grad]
    finally:
        close_context()


@pytest.mark.once
def test_tokens_are_traded_for_heads_and_back(run_job: Any) -> None:
    whole = torch.arange(24.0).view(4, 1, 6)
    for rank, (heads, back, gradient) in enumerate(run_job(traded, 2)):
        own = whole[2 * rank : 2 * rank + 2]
        assert torch.equal(heads, whole[:, :, 3 * rank : 3 * rank + 3])
        assert torch.equal(back, own)
        assert torch.equal(gradient, own)


def draws_of_steps(launch: Launch, config: RunConfig) -> list[torch.Tensor]:
    """Train two steps with dropout; return what torch's generator draws after each."""
    drawn = []
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        with run.loader(engine) as loader:
            for step in range(2):
                engine.train_step(loader, step)
                drawn.append(torch.rand(8))
    return drawn


@pytest.mark.once
def test_processes_of_a_context_group_drop_independently(run_job: Any, tiny_config: Path) -> None:
    config = make_config(tiny_config)
    model = config.model.model_copy(update={"hidden_dropout": 0.5})
    config = with_layout(config.model_copy(update={"model": model}), context_parallel_size=2)
    first, second = run_job(draws_of_steps, 2, config)
    again, _ = run_job(draws_of_steps, 2, config)
    for step in range(2):
        assert not torch.equal(first[step], second[step])
        assert torch.equal(first[step], again[step])
