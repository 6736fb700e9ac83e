"""Papers on patches in several layouts match one process."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_curves import TOLERANCE, largest_difference, make_config, with_layout
from small_configs import SMALL
from small_vqgan import write_untrained_run

from megavis.composition.model import model_of
from megavis.config.schema import RunConfig
from megavis.model.inference import Inference
from megavis.papers import build_objective
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import Launch
from megavis.planning.layouts import is_legal
from megavis.planning.parameters import stage_bounds
from megavis.sampling.sampler import Sampler
from megavis.training.engine import Engine
from megavis.training.job import open_job
from megavis.training.parity import Curve, train_briefly
from megavis.training.trainer import Trainer

STEPS = 3
# One of each kind of block depends on the version of Megatron-Core; other words do not.
EVERY_VERSION = ("compose_memory", "mp3_relative")
NAMES = [
    name
    if small.in_every_pair or name in EVERY_VERSION
    else pytest.param(name, marks=pytest.mark.once)
    for name, small in SMALL.items()
    if small.data == "images"
]
SPLIT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
# Tensor parallelism depends on the version of Megatron-Core, ZeRO-3 does not.
LAYOUTS = [
    pytest.param(4, {**SPLIT, "sequence_parallel": True}, id="tp2-pp2-sp"),
    pytest.param(
        4, {"context_parallel_size": 2, "zero_stage": 3}, marks=pytest.mark.once, id="cp2-dp2-zero3"
    ),
]


@pytest.fixture(scope="module")
def patch_config(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Configs on JPEG shards of photographs, by name."""
    from data_tools.__main__ import main

    folder = tmp_path_factory.mktemp("patches")
    for part in ("train", "validation"):
        source, target = str(shards / "crops" / part), str(folder / part)
        assert main(["jpeg", source, "--out", target, "--size", "16"]) == 0
    tokenizer = write_untrained_run(tmp_path_factory.mktemp("vqgan"))

    def config(name: str) -> Path:
        path = folder / f"{name}.yaml"
        path.write_text(
            f"""\
name: {name}
output: {folder}/runs
objective: {SMALL[name].objective.replace("TOKENIZER", str(tokenizer))}
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  normalization: layer_norm
  add_bias: true
  {SMALL[name].model}
data:
  train: {folder}/train
  validation: {folder}/validation
  image_size: {SMALL[name].image_size}
  crop: random_resized
  flip: true
optimizer: {{learning_rate: 1e-3}}
training: {{steps: {STEPS}, batch_size: 8, micro_batch_size: 2, validate_every: 1}}
{SMALL[name].rest}
"""
        )
        return path

    return config


@pytest.fixture(scope="module")
def reference(run_job: Any, patch_config: Any) -> Callable[[str], Curve]:
    """Curves of one process by config name, each trained once."""

    @functools.cache
    def curve(name: str) -> Curve:
        config = make_config(patch_config(name))
        slow = config.optimizer.model_copy(update={"learning_rate": 1e-12})
        at_rest = config.model_copy(update={"optimizer": slow})
        found, still = (run_job(train_briefly, 1, each, STEPS)[0] for each in (config, at_rest))
        assert abs(found[-1][0] - still[-1][0]) > 1e-3, "the steps change nothing"
        return found

    return curve


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_layouts_match_one_process(
    run_job: Any,
    patch_config: Any,
    reference: Callable[[str], Curve],
    name: str,
    processes: int,
    layout: dict[str, Any],
) -> None:
    config = with_layout(make_config(patch_config(name)), **layout)
    # These split rows, of which one in front of the tokens can make the number odd.
    if not is_legal(config, processes):
        assert name in ("compose_class_denoised", "compose_modulated_queries")
        whole = {"sequence_parallel": False, "context_parallel_size": 1}
        config = with_layout(config, **{**layout, **whole})
    curves = run_job(train_briefly, processes, config, STEPS)
    assert largest_difference(curves, reference(name)) <= TOLERANCE


def guided_samples(launch: Launch, config: RunConfig) -> tuple[list[list[int]], list[list[int]]]:
    """Train; return the ids of five images with guidance that grows, and with constant guidance."""
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        with run.loader(engine) as loader:
            for step in range(STEPS):
                engine.train_step(loader, step)
        inference, labels = Inference(engine.layers, context), torch.tensor([0, 3, 9, 3, 1])
        growing, constant = (
            Sampler(inference, run.objective, Path(), {"guidance": 5.0, **power}, seed=3).tokens(
                torch.arange(5), conditions={"labels": labels}
            )
            for power in ({"guidance_power": 1.0}, {})
        )
        return growing.tolist(), constant.tolist()


def test_growing_guidance_samples_the_same_in_every_layout(run_job: Any, patch_config: Any) -> None:
    config = make_config(patch_config("rar"), "optimizer.learning_rate=3e-2")
    ((growing, constant),) = run_job(guided_samples, 1, config)
    assert growing != constant
    for processes, layout in (
        (4, {**SPLIT, "sequence_parallel": True, "zero_stage": 0}),
        (4, {"context_parallel_size": 2, "zero_stage": 3}),
    ):
        for found in run_job(guided_samples, processes, with_layout(config, **layout)):
            assert found == (growing, constant), layout


def encoder_passes(launch: Launch, config: RunConfig) -> tuple[int, int]:
    """Return the backward passes of an encoder's last norm in a step, and the micro-batches."""
    counts = []
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        for name, parameter in engine.layers.named_parameters():
            if name == "embedding.encoder.norm.weight":
                parameter.register_hook(lambda gradient: counts.append(1))
        blank = model_of(run.objective).blank_batch(engine.micro_batch_size, context.device)
        engine.train_step(itertools.repeat(blank), 0)
        return len(counts), engine.accumulation_steps


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stage_inputs_have_one_backward_pass(run_job: Any, patch_config: Any, zero: int) -> None:
    layout = {"pipeline_model_parallel_size": 2, "zero_stage": zero}
    config = with_layout(make_config(patch_config("compose_memory")), **layout)
    first, _ = run_job(encoder_passes, 2, config)
    assert first == (4, 4)


def last_of_first_stage(launch: Launch, config: RunConfig) -> str:
    """Return the name of the last layer of the first of two stages."""
    context = open_context(launch, device="cpu")
    try:
        plans = build_objective(config, context).layer_plans()
        return plans[stage_bounds(plans, 2)[1] - 1].name
    finally:
        close_context()


@pytest.mark.parametrize(
    ("name", "words", "last"),
    [
        ("mae", ["objective.decoder.num_layers=3", "objective.decoder.hidden_size=32"], "decoder."),
        # The cut inside the encoder: rows for later blocks are passed along.
        (
            "compose_memory",
            [
                "objective.memory.num_layers=3",
                "objective.memory.patch_size=2",
                "objective.memory.hidden_size=48",
            ],
            "embedding.encoder.blocks.",
        ),
        # The decoder belongs to the head, so the last stage has it and one block.
        ("darl", ["model.num_layers=3"], "blocks."),
    ],
)
def test_second_stack_layouts_match_one_process(
    run_job: Any, patch_config: Any, name: str, words: list[str], last: str
) -> None:
    config = make_config(patch_config(name), *words)
    assert run_job(last_of_first_stage, 1, config)[0].startswith(last)
    reference = run_job(train_briefly, 1, config, STEPS)[0]
    stages = {"pipeline_model_parallel_size": 2}
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    full = {"activation_checkpointing": "full"}
    for processes, layout in (
        (2, {"zero_stage": 3} | full),
        (4, split | stages | full),
        (4, stages | {"zero_stage": 3} | full),
    ):
        curves = run_job(train_briefly, processes, with_layout(config, **layout), STEPS)
        assert largest_difference(curves, reference) <= TOLERANCE, layout


@pytest.mark.parametrize("name", ["mae", "compose_memory"])
def test_stages_in_both_stacks_match_one_process(
    run_job: Any, patch_config: Any, reference: Callable[[str], Curve], name: str
) -> None:
    config = with_layout(make_config(patch_config(name)), pipeline_model_parallel_size=3)
    assert config.model.num_layers == 2, "three stages must need blocks of both stacks"
    assert is_legal(config, 3)
    curves = run_job(train_briefly, 3, config, STEPS)
    assert largest_difference(curves, reference(name)) <= TOLERANCE


def positions_decoded(launch: Launch, config: RunConfig) -> set[int]:
    """Take a step; return the numbers of positions of an image that the decoder decodes at once."""
    decoded = set()
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        head = engine.layers.modules[-1]
        head.decoder.register_forward_hook(lambda _, given, out: decoded.add(out.shape[1]))
        with run.loader(engine) as loader:
            engine.train_step(loader, 0)
        return decoded


@pytest.mark.once
@pytest.mark.parametrize("name", ["darl", "darl_mse"])
def test_decoder_runs_on_own_positions(
    run_job: Any, patch_config: Any, reference: Callable[[str], Curve], name: str
) -> None:
    layout = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    split = {"sequence_parallel": True, "activation_checkpointing": "full"}
    config = with_layout(make_config(patch_config(name)), **layout, **split)
    assert run_job(positions_decoded, 4, config) == [{16 // 2}] * 4
    curves = run_job(train_briefly, 4, config, STEPS)
    assert largest_difference(curves, reference(name)) <= TOLERANCE


def dropped(launch: Launch, config: RunConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the outputs of DARL's decoder in a step, and masks.

    Of embedded tokens in the step, and of tokens of the first block.
    """
    decoded, embedded = [], []
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        reader, block, *_, head = engine.layers.modules
        embed = reader.embed_content

        def recorded(tokens: torch.Tensor) -> torch.Tensor:
            embedded.append(embed(tokens))
            return embedded[-1]

        reader.embed_content = recorded
        head.decoder.register_forward_hook(lambda _, given, out: decoded.append(out.detach()))
        blank = run.objective.backbone.blank_batch(engine.micro_batch_size, context.device)
        engine.train_step(itertools.repeat(blank), 0)
        ones = torch.ones(8, 2, 32)
        added = block.mlp_bda(True, False)((ones, None), torch.zeros_like(ones), 0.0)
        masks = [(each == 0).numpy() for each in (torch.stack(embedded).detach(), added)]
        return torch.stack(decoded).numpy(), masks[0], masks[1]


def test_dropout_under_sequence_parallelism(run_job: Any, patch_config: Any) -> None:
    """Blocks mask the tokens of each process independently; decoder and first layer all alike."""
    config = make_config(patch_config("darl"))
    config = with_layout(config, tensor_model_parallel_size=2, sequence_parallel=True)
    model = config.model.model_copy(update={"hidden_dropout": 0.5, "embedding_dropout": 0.5})
    first, second = run_job(dropped, 2, config.model_copy(update={"model": model}))
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert 0.4 < first[1].mean() < 0.6
    # Two independent masks agree on half of the elements.
    assert 0.4 < (first[2] == second[2]).mean() < 0.6
