"""Training of VQGANs."""

from __future__ import annotations

from megavis.config.papers import IMAGE_SIZE, ImportSpec

IMPORTS = (
    ImportSpec(
        "vqgan",
        help="a VQGAN of taming-transformers or LlamaGen, or MaskGIT's as MAGE or RAR released it",
        read="megavis.weights.vqgan:read_vqgan",
        options=(IMAGE_SIZE,),
    ),
)
