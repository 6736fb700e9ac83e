"""One file a paper, and the list of them."""

from __future__ import annotations

from collections.abc import Mapping

from megavis.config.schema import ObjectiveConfig, RunConfig
from megavis.objectives.base import Objective
from megavis.objectives.classification import Classification
from megavis.objectives.darl import DARL
from megavis.objectives.givt import GIVT
from megavis.objectives.givt_encoder_decoder import GIVTEncoderDecoder
from megavis.objectives.givt_maskgit import GIVTMaskGIT
from megavis.objectives.gvp import GVP
from megavis.objectives.igpt import IGPT
from megavis.objectives.mp3 import MP3
from megavis.objectives.trainable import Trainable
from megavis.objectives.vae import VAEObjective
from megavis.objectives.vqgan import VQGANObjective
from megavis.parallel.context import ParallelContext

OBJECTIVES: Mapping[str, type[Trainable]] = {
    "darl": DARL,
    "givt": GIVT,
    "givt_encoder_decoder": GIVTEncoderDecoder,
    "givt_maskgit": GIVTMaskGIT,
    "gvp": GVP,
    "igpt": IGPT,
    "mp3": MP3,
    "vae": VAEObjective,
    "vqgan": VQGANObjective,
}


def build_objective(config: RunConfig, context: ParallelContext) -> Trainable:
    """Return the config's paper, with classes on top in a fine-tuning run."""
    paper = OBJECTIVES[config.objective.name](config, context)
    if config.finetune is None:
        return paper
    assert isinstance(paper, Objective), "the config's checks want one with blocks"
    return Classification(config, context, paper)


def objective_configs() -> dict[str, type[ObjectiveConfig]]:
    """Return the config class of each paper by name, as the config loader wants it."""
    return {name: objective.config_type for name, objective in OBJECTIVES.items()}
