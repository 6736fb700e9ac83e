"""`has_random_features` and `has_random_sequence` match the randomness of each paper's inputs."""

import pytest
import torch
from small_batches import photographs
from tiny import tiny

from megavis.data.loading.loader import Batch

GIVT = "latent_channels: 4, downsampling: 4, num_classes: 3, num_components: 2"
PATCHES = "patch_size: 4"
MODELS = {
    # name: objective, kind of its inputs, random training sequence, random features
    "igpt": ("{name: igpt, vocabulary_size: 12}", "ids", False, False),
    "bert": ("{name: igpt, vocabulary_size: 12, mode: bert}", "ids", True, True),
    "givt": (f"{{name: givt, {GIVT}}}", "latents", True, True),
    "maskgit": (f"{{name: givt_maskgit, {GIVT}}}", "latents", True, True),
    "darl": (f"{{name: darl, {PATCHES}}}", "images", False, False),
    "diffusion": (f"{{name: darl, {PATCHES}, loss: diffusion}}", "images", False, False),
    "darl_random": (
        f"{{name: darl, {PATCHES}, order: random, two_streams: true}}",
        "images",
        True,
        False,
    ),
    "gvp": (f"{{name: gvp, {PATCHES}, num_groups: 3}}", "images", True, False),
    "gvp_random_order": (
        f"{{name: gvp, {PATCHES}, num_groups: 3, segmentation: fixed}}",
        "images",
        True,
        False,
    ),
    "gvp_random_groups": (
        f"{{name: gvp, {PATCHES}, num_groups: 3, order: raster}}",
        "images",
        True,
        False,
    ),
    "gvp_fixed": (
        f"{{name: gvp, {PATCHES}, num_groups: 3, order: raster, segmentation: fixed}}",
        "images",
        False,
        False,
    ),
    "gvp_given": (
        f"{{name: gvp, {PATCHES}, num_groups: 2, order: raster, segmentation: given,"
        " boundaries: [2, 4]}",
        "images",
        False,
        False,
    ),
    "mp3": (f"{{name: mp3, {PATCHES}}}", "images", True, False),
    "mp3_all_seen": (f"{{name: mp3, {PATCHES}, mask_ratio: 0}}", "images", False, False),
}
JOINT = (
    "finetune={num_classes: 3, generative_weight: 1}",
    "data.validation=shards/validation",
    "training.validate_every=1",
)
ALONE = (*JOINT, "finetune.generative_weight=0", "finetune.drop_path=0.3")


@pytest.fixture
def make(build_paper):
    """Build a small model and four of its inputs."""

    def make(name, *words):
        objective, kind, *_ = MODELS[name]
        text = tiny(objective, model={"normalization": "layer_norm"}, data={"image_size": 12})
        inputs = photographs(4, 12)
        if kind == "ids":
            inputs = inputs[..., 0].flatten(1).long() % 12
        elif kind == "latents":
            inputs = torch.rand(4, 2, 4, 3, 3, generator=torch.Generator().manual_seed(0)).half()
        return (*build_paper(text, *words), inputs)

    return make


def differs(read, inputs):
    """Return whether `read` differs between views of the same samples."""
    labels, index = torch.zeros(len(inputs), dtype=torch.int64), torch.arange(len(inputs))
    views = [read(Batch(inputs, labels, index + 100 * view)) for view in range(3)]
    return any(not torch.allclose(views[0], other, rtol=1e-3, atol=1e-4) for other in views[1:])


@pytest.mark.parametrize("name", list(MODELS))
def test_declared_randomness_of_features(make, name):
    objective, inference, inputs = make(name)
    found = differs(lambda batch: inference.features(objective.feature_inputs(batch)), inputs)
    assert objective.has_random_features is found is MODELS[name][3]


@pytest.mark.parametrize("words", [JOINT, ALONE], ids=["joint", "alone"])
@pytest.mark.parametrize("name", list(MODELS))
def test_declared_randomness_of_classes(make, name, words):
    """Without a generative loss, classes are read from features, also with drop path."""
    objective, inference, inputs = make(name, *words)

    def logits(batch):
        return objective.outputs(inference.predictions(objective.sequence(batch).inputs))

    expected = MODELS[name][2 if words is JOINT else 3]
    assert objective.has_random_sequence is differs(logits, inputs) is expected
