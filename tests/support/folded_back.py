"""Runs that are trained again on all images, the held-out ones included, and how.

"Generative Pretraining from Pixels", section 3.1; DARL's "Denoising Autoregressive Representation
Learning", appendix A.4, does the same for VTAB.
"""

import importlib
import re

import pytest
from preset_headers import ROOT, commands_of, megavis_words

from megavis.config.load import load_config

# Another paper's protocol, and one whose four images a class are drawn anew for every seed.
NOT_FOLDED = ("igpt_mnist", "igpt_l_32_finetune_cifar10_40")


def folded_runs():
    """Yield the runs of iGPT's paper, those of docs/papers with a sentence, and DARL's of VTAB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/scripts"))
        known = importlib.import_module("paper_claims").known_runs()
    for run in known.values():
        is_shipped = "demo" not in run.path.stem and not re.search(r"_\d+x\d", run.path.stem)
        is_igpt = run.path.parent.name == "igpt" and is_shipped
        is_igpt = is_igpt and (run.about or not run.words)
        if run.config.name == "darl_vit_l16_diff_vtab" or (
            is_igpt and run.config.name not in NOT_FOLDED
        ):
            yield run


def retraining(run):
    """Return the config that trains a run on all training images, and its overridden keys.

    A header has the command for its own config. Other runs of that config take the same words after
    their own, or have a command there.
    """
    commands = [
        each
        for each in commands_of(run.path)
        if each.loads == str(run.path.relative_to(ROOT))
        and megavis_words(each.words)[0] in ("train", "finetune")
        and each.config.data.train != load_config(run.path).config.data.train
    ]
    names = [f"{run.config.name}_all", f"{run.config.name}_retrained"]
    for command in commands:
        if command.config.name in names:
            return command.config, command.overrides
    assert run.words, "its header has no command"
    words = [*run.words, *commands[0].overrides, f"name={names[0]}"]
    if run.config.finetune:
        before = run.config.finetune.from_run
        words.append(f"finetune.from_run={f'{before}_all' if before else 'null'}")
    return load_config(run.path, words).config, words
