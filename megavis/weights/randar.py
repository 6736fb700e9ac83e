"""Released weights of RandAR: "Decoder-only Autoregressive Visual Generation in Random Orders".

A `.safetensors` file of the generator's weights. Sizes are inferred from the tensors, except the
width of a head, 64, and the ids of an image, 16², which are the same in all released models.

Legend: n heads, h hidden size, f width of the MLP.
"""

from __future__ import annotations

import argparse

import torch

from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig
from megavis.papers.randar.config import RandARConfig
from megavis.weights.released import Released, ReleasedTensors
from megavis.weights.tables import BATCHED, Layout, Row, Table, count, joined_heads
from megavis.weights.vqgan import with_tokenizer

_HEAD_SIZE, _GRID = 64, 16
_BLOCKS = "layers."
# Rows of gates and of values, `[f, h]` each, alternate as `swiglu` has them: `[2 f, h]`.
_GATED = Layout(
    lambda gates, values: torch.stack([gates, values], dim=1).flatten(0, 1),
    lambda rows: rows.unflatten(0, (-1, 2)).unbind(1),
)


def randar_table(*, num_layers: int, num_heads: int) -> Table:
    """Map the tensors of a run to the released names."""
    table = [
        Row("embedding.content.weight", "tok_embeddings.weight"),
        Row("embedding.start.weight", "cls_embedding.embedding_table.weight"),
        Row("embedding.query", "pos_instruct_embeddings", BATCHED),
        Row("head.norm.weight", "norm.weight"),
        Row("head.linear.weight", "output.weight"),
    ]
    for number in range(num_layers):
        ours, theirs = f"blocks.{number}", f"{_BLOCKS}{number}"
        table += [
            Row(f"{ours}.input_layernorm.weight", f"{theirs}.attention_norm.weight"),
            Row(
                f"{ours}.self_attention.linear_qkv.weight",
                f"{theirs}.attention.wqkv.weight",
                joined_heads(num_heads, parts=1),
            ),
            Row(f"{ours}.self_attention.linear_proj.weight", f"{theirs}.attention.wo.weight"),
            Row(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.ffn_norm.weight"),
            Row(
                f"{ours}.mlp.linear_fc1.weight",
                (f"{theirs}.feed_forward.w1.weight", f"{theirs}.feed_forward.w3.weight"),
                _GATED,
            ),
            Row(f"{ours}.mlp.linear_fc2.weight", f"{theirs}.feed_forward.w2.weight"),
        ]
    return table


def read_randar(args: argparse.Namespace) -> Released:
    """Read a file of the generator's weights.

    `--tokenizer` names the run of the VQGAN, which gives the pixels of an id, by default 16².

    Raises:
        UserError: the file is not of such a generator.
    """
    tensors = ReleasedTensors.of_file(args.source, model="RandAR")
    vocabulary_size, width = tensors["output.weight"].shape
    classes = len(tensors["cls_embedding.embedding_table.weight"]) - 1
    if classes < 1 or width % _HEAD_SIZE:
        raise UserError(
            f"{args.source}: a width of {width} and {classes} classes are no sizes of RandAR, whose"
            f" heads have a width of {_HEAD_SIZE}"
        )
    paper = RandARConfig(vocabulary_size=vocabulary_size, num_classes=classes)
    paper = with_tokenizer(paper, args.tokenizer)
    layers, heads = count(tensors, _BLOCKS), width // _HEAD_SIZE
    return Released(
        paper,
        tensors,
        randar_table(num_layers=layers, num_heads=heads),
        image_size=_GRID * paper.patch_size,
        sections={
            "model": ModelConfig(
                num_layers=layers,
                hidden_size=width,
                ffn_hidden_size=len(tensors["layers.0.feed_forward.w1.weight"]),
                num_attention_heads=heads,
                activation="swiglu",
                # For further training.
                embedding_dropout=0.1,
                hidden_dropout=0.1,
            )
        },
    )
