"""GIVT: "GIVT: Generative Infinite-Vocabulary Transformers", and its variants."""

from __future__ import annotations

import argparse
from pathlib import Path

from megavis.config.arguments import non_negative, non_negative_number, positive
from megavis.config.papers import IMAGE_SIZE, TOKENIZER, FigureSpec, ImportOption, ImportSpec


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--label", type=non_negative, metavar="CLASS", help="only images of this class"
    )


FIGURES = (
    FigureSpec(
        "deviations",
        help="predicted standard deviation by token, with and without class (GIVT, Figure 7)",
        description="Predict each latent token of held-out images from those before it, with and"
        " without the image's class, and plot the standard deviation of the mixture, averaged over"
        " components by their weights, over the channels of a token and over images.",
        num_images=128,
        plot="megavis.papers.givt.deviation_figure:plot_deviations",
        example="runs/givt_causal_default --label 130",
        add_options=_add_options,
        reads_classes=True,
    ),
)

_MODELS, _VAES = "megavis.weights.givt:", "megavis.weights.vaes:"
_BETA = ImportOption(
    "--beta",
    "the β it was trained with; default: the paper's",
    type=non_negative_number,
    metavar="B",
)

IMPORTS = (
    ImportSpec(
        "givt",
        help="an .npz file of one of GIVT's released Transformers",
        read=_MODELS + "read_transformer",
        options=(
            ImportOption("--mode", "default: read from the file", choices=("causal", "maskgit")),
            ImportOption("--num-classes", "default: read from the file", type=positive),
            ImportOption("--adapter", ".npz file of a separate adapter", type=Path),
            TOKENIZER,
        ),
    ),
    ImportSpec(
        "givt-vae",
        help="an .npz file of one of GIVT's released VAEs",
        read=_VAES + "read_vae",
        options=(
            _BETA,
            IMAGE_SIZE,
        ),
    ),
    ImportSpec(
        "givt-label-vae",
        help="an .npz file of one of GIVT's released VAEs of label maps",
        read=_VAES + "read_label_map_vae",
        options=(
            ImportOption(
                "--target",
                "kind of the maps; default: panoptic",
                choices=("panoptic", "depth"),
                default="panoptic",
            ),
            ImportOption(
                "--semantic-channels",
                "channels for classes and void; default: 134",
                type=positive,
                default=134,
            ),
            ImportOption("--latents", "of a map; default: 256", type=positive, default=256),
            _BETA,
        ),
    ),
)
