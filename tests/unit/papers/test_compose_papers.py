"""Compositions that equal a paper."""

import pytest
import torch
import torch.nn.functional as F
from compositions import (
    ADAPTER,
    BRIDGE,
    CATEGORICAL,
    CLASSES,
    CONTENT,
    CONTEXT,
    DIFFUSION,
    ERROR,
    FEATURES,
    FRAMES,
    ITSELF,
    LATENTS,
    MEMORY,
    MIXTURE,
    ONE_BY_ONE,
    PALETTE,
    PATCHES,
    PLACE,
    QUERY,
    RANDOM,
    SHIFT,
    SPEECH,
    config,
)
from small_batches import batch_of, photographs
from small_vqgan import write_untrained_run

IGPT = "{name: igpt, vocabulary_size: 32"
PAPERS = {
    "igpt": (IGPT + "}", [PALETTE, ONE_BY_ONE, SHIFT, CATEGORICAL]),
    "bert": (
        IGPT + ", mode: bert}",
        [
            PALETTE,
            "schedule: {kind: masked}",
            "asks: {kind: mask, filler: zero_embedding}",
            CATEGORICAL,
        ],
    ),
    "darl": (
        "{name: darl, patch_size: 4}",
        [PATCHES, ONE_BY_ONE, CONTENT, ERROR],
    ),
    "darl_random": (
        "{name: darl, patch_size: 4, order: random, two_streams: true}",
        [PATCHES, RANDOM, QUERY, ERROR],
    ),
    "darl_diffusion": (
        "{name: darl, patch_size: 4, loss: diffusion, noise_a: 1}",
        [PATCHES, ONE_BY_ONE, CONTENT, DIFFUSION],
    ),
    "givt": (
        "{name: givt, latent_channels: 4, downsampling: 4, num_classes: 3, num_components: 3}",
        [LATENTS, ONE_BY_ONE, SHIFT, MIXTURE, CLASSES],
    ),
    "givt_adapter": (
        "{name: givt, latent_channels: 4, downsampling: 4, num_classes: 3, num_components: 3,"
        " adapter_blocks: 2}",
        [LATENTS, ONE_BY_ONE, SHIFT, MIXTURE, CLASSES, ADAPTER],
    ),
    "givt_encoder_decoder": (
        "{name: givt_encoder_decoder, latent_channels: 4, downsampling: 4, num_components: 3,"
        " encoder_layers: 2, encoder_patch_size: 8, tokenizer: vae}",
        [LATENTS.replace("}", ", tokenizer: vae}"), ONE_BY_ONE, SHIFT, MIXTURE, MEMORY],
    ),
    "gvp_features": (
        "{name: gvp, patch_size: 4, num_groups: 3, segmentation: mixed, condition_size: 4,"
        " tokenizer: VQGAN}",
        [PATCHES, "schedule: {kind: groups, length: mixed, num_groups: 3}", QUERY, ERROR, FEATURES],
    ),
    "mp3": (
        "{name: mp3, patch_size: 4, mask_ratio: 0.5}",
        [PATCHES, CONTEXT, ITSELF, PLACE],
    ),
    "mp3_speech": (
        "{name: mp3, mask_ratio: 0.5, given_ratio: 0.25, class_token: false}",
        [FRAMES, CONTEXT, "asks: {kind: self, given_ratio: 0.25, class_token: false}", PLACE],
    ),
    "mae": (
        "{name: mae, patch_size: 4, mask_ratio: 0.5,"
        " decoder: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}}",
        [PATCHES, CONTEXT, BRIDGE, "density: {kind: squared_error, normalize: true}"],
    ),
}
OPTIONS = {
    "mp3_speech": ("model.positions=learned", *SPEECH),
    **dict.fromkeys(("mae", "gvp_features"), ("model.positions=learned",)),
    **dict.fromkeys(("darl", "darl_random", "darl_diffusion"), ("model.positions=rope_2d",)),
}


def samples_of(name):
    if name in ("igpt", "bert"):
        ids = torch.randint(32, (3, 256), generator=torch.Generator().manual_seed(0))
        return batch_of(ids)
    if name == "givt_encoder_decoder":
        return batch_of(photographs(6, 16).view(3, 2, 16, 16, 3))
    if name.startswith("givt"):
        moments = torch.rand(3, 2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
        return batch_of(moments.half())
    if name == "mp3_speech":
        return batch_of(torch.rand(3, 12, 5, generator=torch.Generator().manual_seed(0)))
    return batch_of(photographs(3, 16))


class Means:
    """A VAE stub: its latents are the mean colours of patches of 4², with zero deviation."""

    def to(self, device):
        return self

    def encode(self, images):
        means = F.avg_pool2d(images.movedim(-1, 1).float() / 255, 4)
        means = torch.cat([means, means[:, :1]], 1)
        return torch.stack([means, torch.zeros_like(means)], 1)


@pytest.fixture(scope="module")
def vqgan(tmp_path_factory):
    return str(write_untrained_run(tmp_path_factory.mktemp("vqgan")))


@pytest.mark.parametrize("name", list(PAPERS))
def test_composition_equals_paper(build_paper, build_composition, name, vqgan):
    """With the paper's weights, which have the same names, the losses are bit-identical."""
    objective, words = PAPERS[name]
    objective = objective.replace("VQGAN", vqgan)
    words = [word.replace("VQGAN", vqgan) for word in words]
    more = OPTIONS.get(name, ())
    paper, paper_runner = build_paper(config(objective), *more, std=0.3)
    composed, runner = build_composition(*words, more=more)
    weights = dict(paper_runner.layers.named_parameters())
    own = dict(runner.layers.named_parameters())
    assert {name: tensor.shape for name, tensor in own.items()} == {
        name: tensor.shape for name, tensor in weights.items()
    }
    with torch.no_grad():
        for key, parameter in own.items():
            parameter.copy_(weights[key])
    losses = []
    for each, run in ((paper, paper_runner), (composed, runner)):
        each.reads.__dict__.update({"tokenizer": Means()} if "tokenizer: vae" in objective else {})
        sequence = each.sequence(samples_of(name))
        losses.append(each.loss(run.predictions(sequence.inputs), sequence.targets))
    assert torch.equal(losses[0], losses[1])
