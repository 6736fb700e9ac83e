"""RandAR: "RandAR: Decoder-only Autoregressive Visual Generation in Random Orders"."""

from __future__ import annotations

from megavis.config.papers import TOKENIZER, ImportSpec

IMPORTS = (
    ImportSpec(
        "randar",
        help="the generator's weights of the released code, a .safetensors file",
        read="megavis.weights.randar:read_randar",
        options=(TOKENIZER,),
    ),
)
