"""Training of VQGANs."""

from __future__ import annotations

from megavis.config.papers import IMAGE_SIZE, ImportSpec

IMPORTS = (
    ImportSpec(
        "vqgan",
        help="a checkpoint of taming-transformers, or the VQGAN that MAGE released",
        read="megavis.weights.vqgan:read_vqgan",
        options=(IMAGE_SIZE,),
    ),
)
