"""Golden values of GIVT's released code: small models with random weights and their outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megavis.cli import main

GOLDEN = Path(__file__).parents[1] / "data" / "givt"
MODELS = ["givt_causal", "givt_maskgit", "givt_full_covariance", "givt_encoder_decoder"]


def golden(name: str) -> dict[str, np.ndarray]:
    """Return inputs, outputs and weights (`params/...`) by name."""
    with np.load(GOLDEN / f"{name}.npz") as archive:
        return {key: archive[key] for key in archive.files}


def conditions(values: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the inputs of a model other than tokens."""
    names = ("labels", "mask", "image")
    return {name: torch.from_numpy(values[name]) for name in names if name in values}


def import_file(folder: Path, form: str, file: Path, *words: str) -> str:
    """Import a released file; return the run folder."""
    run = str(folder / "run")
    assert main(["import", form, str(file), run, *words]) == 0
    return run


def import_golden(folder: Path, name: str) -> str:
    """Import the weights of a golden model or the golden VAE; return the run folder."""
    form = "givt-vae" if name == "vae" else "givt"
    words = ["--num-classes", "10"] if "labels" in golden(name) else []
    return import_file(folder, form, GOLDEN / f"{name}.npz", *words)


def causal_weights_of_width_16() -> dict[str, np.ndarray]:
    """Return the causal model's weights with random input and output layers of 16 channels."""
    arrays = {name: array for name, array in golden("givt_causal").items() if "/" in name}
    random = np.random.default_rng(0)
    for name, shape in {
        "EmbedTargets/kernel": (16, 64),
        "decoder/LogitsDense/kernel": (64, 99),
        "decoder/LogitsDense/bias": (99,),
        "decoder/pos_emb": (1, 36, 64),
    }.items():
        arrays[f"params/{name}"] = random.normal(size=shape).astype(np.float32)
    return arrays
