"""RAR: "Randomized Autoregressive Visual Generation"."""

from __future__ import annotations

from megavis.config.papers import TOKENIZER, ImportSpec

IMPORTS = (
    ImportSpec(
        "rar",
        help="the generator's weights of the released code, such as rar_b.bin",
        read="megavis.weights.rar:read_rar",
        options=(TOKENIZER,),
    ),
)
