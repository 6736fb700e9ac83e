"""MAR: "Autoregressive Image Generation without Vector Quantization"."""

from __future__ import annotations

from megavis.config.arguments import positive
from megavis.config.papers import HEADS, TOKENIZER, ImportOption, ImportSpec

IMPORTS = (
    ImportSpec(
        "mar",
        help="a checkpoint of the released code, checkpoint-last.pth, from which the averaged"
        " weights are read",
        read="megavis.weights.mar:read_mar",
        options=(
            HEADS,
            ImportOption(
                "--decoder-heads",
                "attention heads of the decoder; default: from its width, as in the encoder",
                type=positive,
            ),
            TOKENIZER,
        ),
    ),
)
