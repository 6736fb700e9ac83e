"""The same iGPT in `transformers` and in megavis, with equal weights."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import parser
from megavis.config.schema import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from megavis.config.section import DataConfig
from megavis.papers.igpt.config import IGPTConfig
from megavis.weights.imagegpt import from_imagegpt

NUM_COLORS = 512


def sized_parser(description: str, *, batch_size: int) -> argparse.ArgumentParser:
    """Return a parser with options for the model's size; `batch_size` is the default."""
    made = parser(description)
    made.add_argument("--width", type=int, default=256)
    made.add_argument("--layers", type=int, default=6)
    made.add_argument("--heads", type=int, default=8, help="default: 8, as in transformers")
    made.add_argument("--image-size", type=int, default=32, help="tokens are its square")
    made.add_argument("--batch-size", type=int, default=batch_size)
    return made


def sizes(config: RunConfig) -> dict[str, int]:
    """Return the sizes of a model and its batch, for reports."""
    return {
        "width": config.model.hidden_size,
        "layers": config.model.num_layers,
        "heads": config.model.num_attention_heads,
        "tokens": config.data.image_size**2,
        "batch": config.training.batch_size,
    }


def run_config(options: argparse.Namespace) -> RunConfig:
    """Return a config with the sizes of `sized_parser`, for one process in float32."""
    return RunConfig(
        name="benchmark",
        objective=IGPTConfig(vocabulary_size=NUM_COLORS),
        model=ModelConfig(
            num_layers=options.layers,
            hidden_size=options.width,
            num_attention_heads=options.heads,
        ),
        data=DataConfig(train="", image_size=options.image_size),
        parallel=ParallelConfig(zero_stage=0),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        training=TrainingConfig(steps=1000, batch_size=options.batch_size),
    )


def matrix_shapes(config: RunConfig) -> list[tuple[int, int]]:
    """Return inputs and outputs of a block's matrices: fused attention projections and MLP."""
    width, inner = config.model.hidden_size, config.model.mlp_size
    return [(width, 3 * width), (width, width), (width, inner), (inner, width)]


def image_gpt(config: RunConfig, *, dropout: float = 0.0) -> Any:
    """Return the ImageGPT of `transformers` in the same sizes, with random weights.

    Its projections have biases, zero as in the released weights. It has a single implementation of
    attention (without `attn_implementation`): matrices of scores, mask, softmax.

    Args:
        config: config of the run.
        dropout: dropout of residuals, embeddings and attention; `transformers` uses 0.1 by default,
            the paper and megavis none.
    """
    import transformers

    model = config.model
    settings = transformers.ImageGPTConfig(
        vocab_size=NUM_COLORS + 1,
        n_positions=config.data.image_size**2,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_attention_heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    torch.manual_seed(config.seed)
    made = transformers.ImageGPTForCausalImageModeling(settings)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            # Large enough for the most likely id to lead by more than rounding errors.
            parameter.normal_(std=0.0 if name.endswith("bias") else 0.05)
            if "ln_" in name:
                parameter.fill_(1.0)
    return made


def copy_weights(theirs: Any, layers: Any, config: RunConfig) -> None:
    """Copy the weights of an ImageGPT to megavis's layers."""
    released = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    weights = from_imagegpt(released, num_heads=config.model.num_attention_heads)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights, f"left over: {list(weights)}"


def after_start(ids: Tensor) -> Tensor:
    """Return ImageGPT's inputs for ids `[b, n]`: the start token, then all but the last."""
    start = torch.full((len(ids), 1), NUM_COLORS)
    return torch.cat([start, ids[:, :-1]], dim=1)
