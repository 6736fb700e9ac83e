"""MAR: "Autoregressive Image Generation without Vector Quantization"."""

from __future__ import annotations

from megavis.config.arguments import positive
from megavis.config.papers import HEADS, TOKENIZER, ImportOption, ImportSpec

IMPORTS = (
    ImportSpec(
        "mar",
        help="a checkpoint of the released code, checkpoint-last.pth, of which the average of the"
        " weights is read",
        read="megavis.weights.mar:read_mar",
        options=(
            HEADS,
            ImportOption(
                "--decoder-heads",
                "attention heads of the decoder; default: as those of the encoder for its width",
                type=positive,
            ),
            TOKENIZER,
        ),
    ),
)
