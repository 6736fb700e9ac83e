"""AIM: "Scalable Pre-training of Large Autoregressive Image Models"."""

from __future__ import annotations

from megavis.config.papers import ImportSpec

IMPORTS = (
    ImportSpec(
        "aim",
        help="an AIM folder from the Hub (model.safetensors and config.json), or a file with the"
        " trunk's weights; the run has an attentive probe, which can be evaluated and trained",
        read="megavis.weights.aim:read_aim",
    ),
)
