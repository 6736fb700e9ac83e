"""AIM: "Scalable Pre-training of Large Autoregressive Image Models"."""

from __future__ import annotations

from pathlib import Path

from megavis.config.papers import ImportOption, ImportSpec

IMPORTS = (
    ImportSpec(
        "aim",
        help="an AIM folder from the Hub (model.safetensors and config.json), or a file with the"
        " trunk's weights; the run has an attentive probe, which can be evaluated and trained",
        read="megavis.weights.aim:read_aim",
        options=(
            ImportOption(
                "--head",
                "released probe, if it is in a separate file from the trunk",
                type=Path,
                metavar="FILE",
            ),
            ImportOption(
                "--head-layers",
                "blocks whose mean the probe reads: last (six), best (as the released probes of the"
                " best layers), or adjacent numbers from 0, such as 14,15,16; default: as in"
                " config.json, or the last six",
                metavar="LAYERS",
            ),
        ),
    ),
)
