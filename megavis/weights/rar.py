"""Released weights of RAR: "Randomized Autoregressive Visual Generation".

A file of the generator's weights (`rar_b.bin`, `rar_l.bin`, `rar_xl.bin`, `rar_xxl.bin`). Sizes are
inferred from the tensors.

The released code adds to the class, as a token, the vector of a position, which is part of the
class's vector and of the vectors of rows here; and its last norm has no gain and bias, which are 1
and 0 here. Both give the same functions.

Legend: h width, n ids of an image.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig
from megavis.papers.rar.config import RARConfig
from megavis.weights.released import Released, ReleasedTensors
from megavis.weights.tables import Layout, Row, Table, count, layer
from megavis.weights.vits import TIMM
from megavis.weights.vqgan import with_tokenizer

_SPARE_PLACES, _SPARE_STEPS = 1024, 100
"""Unused rows of the released tables of positions and of steps."""
_FRONT = 2
"""Positions that precede the ids': the learned token's and the class's."""


def rar_table(*, num_ids: int, vocabulary_size: int, num_layers: int, num_heads: int) -> Table:
    """Map the tensors of a run to the released names; an image has `num_ids` ids."""
    last = "adaln_before_head.adaLN_modulation.1"
    table = [
        Row(
            (
                "embedding.content.weight",
                "embedding.start.weight",
                "embedding.sink",
                "embedding.positions.weight",
                "embedding.row_vectors",
            ),
            ("embeddings.weight", "cls_token", "pos_embed", "timesteps_embeddings"),
            _front(num_ids, vocabulary_size),
        ),
        Row("embedding.asked_positions.weight", "target_aware_pos_embed", _asked(num_ids)),
        Row("head.modulation.linear.weight", f"{last}.weight", _SWAPPED),
        Row(
            ("head.modulation.linear.bias", "head.norm.weight", "head.norm.bias"),
            f"{last}.bias",
            _SWAPPED_BESIDE_PLAIN_NORM,
        ),
        *layer("head.linear", "lm_head"),
    ]
    for number in range(num_layers):
        block = f"blocks.{number}"
        table += TIMM.block(block, block, num_heads)
        table += layer(f"{block}.self_attention.query_norm", f"{block}.attn.q_norm")
        table += layer(f"{block}.self_attention.key_norm", f"{block}.attn.k_norm")
        table += layer(f"{block}.modulation.linear", f"{block}.adaLN_modulation.1")
    return table


def _swapped(rows: Tensor) -> Tensor:
    """Exchange the halves: shift, then scale here, and scale, then shift there."""
    return torch.cat(rows.chunk(2)[::-1])


_SWAPPED = Layout(_swapped, _swapped)
_SWAPPED_BESIDE_PLAIN_NORM = Layout(
    lambda bias: (_swapped(bias), torch.ones(len(bias) // 2), torch.zeros(len(bias) // 2)),
    lambda bias, gain, shift: _swapped(bias),
)


def _front(num_ids: int, vocabulary_size: int) -> Layout:
    """Return the layout of embeddings, positions and the vectors of rows.

    One table embeds the ids, a mask that is not used, the classes and no class.
    """

    def read(rows: Tensor, token: Tensor, places: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        first, second = places[0, 0], places[0, 1]
        return (
            rows[:vocabulary_size],
            rows[vocabulary_size + 1 :] + second,
            token[0, 0] + first,
            places[0, _FRONT : _FRONT + num_ids],
            steps[0, : num_ids + 1] - second,
        )

    def write(
        ids: Tensor, classes: Tensor, token: Tensor, places: Tensor, steps: Tensor
    ) -> tuple[Tensor, ...]:
        return (
            torch.cat([F.pad(ids, (0, 0, 0, 1)), classes]),
            token.view(1, 1, -1),
            F.pad(places, (0, 0, _FRONT, _SPARE_PLACES - _FRONT))[None],
            F.pad(steps, (0, 0, 0, _SPARE_STEPS - 1))[None],
        )

    return Layout(read, write)


def _asked(num_ids: int) -> Layout:
    """Return the layout of the positions of the ids to predict."""
    return Layout(
        lambda places: places[0, _FRONT : _FRONT + num_ids],
        lambda places: F.pad(places, (0, 0, _FRONT, _SPARE_PLACES - _FRONT))[None],
    )


def read_rar(args: argparse.Namespace) -> Released:
    """Read a file of the generator's weights.

    `--tokenizer` names the run of the VQGAN, which gives the pixels of an id, by default 16².

    Raises:
        UserError: the file is not of such a generator.
    """
    tensors = ReleasedTensors.of_file(args.source, model="RAR")
    vocabulary_size, width = tensors["lm_head.weight"].shape
    num_ids, head = _num_ids(tensors), len(tensors["blocks.0.attn.q_norm.weight"])
    classes = len(tensors["embeddings.weight"]) - vocabulary_size - 2
    if classes < 1 or width % head:
        raise UserError(
            f"{args.source}: a width of {width} with heads of {head}, and {classes} classes beside"
            f" {vocabulary_size} ids, are no sizes of RAR"
        )
    # Training has ended with raster order.
    paper = RARConfig(vocabulary_size=vocabulary_size, num_classes=classes, randomness=(0.0, 0.0))
    paper = with_tokenizer(paper, args.tokenizer)
    layers, heads = count(tensors, TIMM.blocks), width // head
    return Released(
        paper,
        tensors,
        rar_table(
            num_ids=num_ids,
            vocabulary_size=vocabulary_size,
            num_layers=layers,
            num_heads=heads,
        ),
        image_size=math.isqrt(num_ids) * paper.patch_size,
        sections={
            "model": ModelConfig(
                num_layers=layers,
                hidden_size=width,
                ffn_hidden_size=len(tensors["blocks.0.mlp.fc1.bias"]),
                num_attention_heads=heads,
                normalization="layer_norm",
                norm_epsilon=1e-6,
                activation="gelu",
                add_bias=True,
                qk_norm=True,
                # For further training.
                hidden_dropout=0.1,
                attention_dropout=0.1,
                mlp_dropout=0.1,
            )
        },
    )


def _num_ids(tensors: ReleasedTensors) -> int:
    """Return how many ids an image has; raise UserError if they tile no square."""
    places, steps = (tensors[name].shape[1] for name in ("pos_embed", "timesteps_embeddings"))
    found = places - _SPARE_PLACES
    if found < 1 or found != steps - _SPARE_STEPS or math.isqrt(found) ** 2 != found:
        raise UserError(
            f"{tensors.source}: pos_embed has {places} and timesteps_embeddings {steps} rows; RAR"
            f" has {_SPARE_PLACES} and {_SPARE_STEPS} more than the ids of a square image"
        )
    return found
