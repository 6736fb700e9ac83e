"""Released weights of the paper."""

from __future__ import annotations

from pathlib import Path

from megavis.config.arguments import non_negative_number, positive
from megavis.config.declarations import IMAGE_SIZE, ImportOption, ImportSpec

_MODELS, _VAES = "megavis.papers.givt.released_models:", "megavis.papers.givt.released_vaes:"
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
            ImportOption("--tokenizer", "run folder of the VAE", type=Path),
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
