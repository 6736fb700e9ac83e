"""`inputs_from`: the options that each paper accepts, their effect and their errors."""

import pytest
import torch
from small_batches import photographs
from tiny import VIT, tiny

from megavis.config.errors import UserError
from megavis.schedules.orders import gather_tokens

PATCHES = "patch_size: 4"
LATENTS = "latent_channels: 4, downsampling: 4, num_classes: 3, num_components: 2"
COMPOSED = (
    "name: compose, reads: {kind: patches, patch_size: 4},"
    " condition: {kind: labels, num_classes: 3}"
)
PAPERS = {
    # name: objective, kind of its inputs, options accepted besides sample_index
    "igpt": ("{name: igpt, vocabulary_size: 12}", "ids", {"order"}),
    "bert": ("{name: igpt, vocabulary_size: 12, mode: bert}", "ids", {"mask"}),
    "givt": (f"{{name: givt, {LATENTS}}}", "latents", {"order", "labels"}),
    "adapter": (f"{{name: givt, {LATENTS}, adapter_blocks: 1}}", "latents", {"labels"}),
    "maskgit": (f"{{name: givt_maskgit, {LATENTS}}}", "latents", {"mask", "labels"}),
    "darl": (f"{{name: darl, {PATCHES}}}", "images", {"order"}),
    "diffusion": (f"{{name: darl, {PATCHES}, loss: diffusion}}", "images", {"order", "gamma"}),
    "gvp": (f"{{name: gvp, {PATCHES}, num_groups: 3}}", "images", {"order", "boundaries"}),
    "mp3": (f"{{name: mp3, {PATCHES}}}", "images", {"mask_ratio"}),
    "mae": (f"{{name: mae, {PATCHES}, decoder: {{hidden_size: 16}}}}", "images", set()),
    "composed": (
        f"{{{COMPOSED}, schedule: {{kind: one_by_one, order: random}},"
        " asks: {kind: query}, density: {kind: diffusion}}",
        "images",
        {"order", "gamma", "labels"},
    ),
    "composed_groups": (
        f"{{{COMPOSED}, schedule: {{kind: groups, num_groups: 3}},"
        " asks: {kind: query}, density: {kind: squared_error}}",
        "images",
        {"order", "boundaries", "labels"},
    ),
    "vae": (
        "{name: vae, latent_channels: 4, multipliers: [1, 1, 1], filters: 32, blocks_per_level: 1,"
        " perceptual_weight: 0, adversarial_weight: 0}",
        "images",
        set(),
    ),
    "label_maps": (
        "{name: vae_label_maps, semantic_channels: 6, instance_channels: 8, patch_size: 4,"
        " downsampling: 4, latent_channels: 4, decoder_layers: 1}",
        "images",
        set(),
    ),
    "classes": (
        f"{{name: darl, {PATCHES}}}\nfinetune: {{num_classes: 3}}\nschedule: {{warmup_steps: 1}}",
        "images",
        set(),
    ),
}
MODELS = {"label_maps": VIT}
VALUES = {
    "order": torch.randperm(9, generator=torch.Generator().manual_seed(0)).expand(4, -1),
    "mask": torch.arange(36).view(4, 9) % 3 == 0,
    "mask_ratio": 0.5,
    "gamma": 0.25,
    "boundaries": (3, 5),
    "labels": torch.tensor([0, 2, 1, 0]),
}


@pytest.fixture
def make(build_paper):
    """Build a small model and four inputs of nine tokens."""

    def make(name):
        objective, kind, _ = PAPERS[name]
        size = 3 if kind == "ids" else 12
        text = tiny(
            objective,
            model=None if name == "vae" else {**MODELS.get(name, {}), "num_layers": 1},
            data={"image_size": size},
            training={"validate_every": int(name == "classes")},
            validates=True,
        )
        inputs = photographs(4, size)
        if kind == "ids":
            inputs = inputs[..., 0].flatten(1).long() % 12
        elif kind == "latents":
            inputs = torch.rand(4, 2, 4, 3, 3, generator=torch.Generator().manual_seed(0)).half()
        return build_paper(text)[0], inputs

    return make


@pytest.mark.parametrize("name", list(PAPERS))
def test_inapplicable_options_raise_and_list_the_applicable(make, name):
    objective, inputs = make(name)
    known = PAPERS[name][2]
    plain = objective.inputs_from(inputs, sample_index=torch.arange(4))
    for option, value in VALUES.items():
        if option in known:
            chosen = objective.inputs_from(inputs, sample_index=torch.arange(4), **{option: value})
            assert any(
                a.shape != b.shape or not torch.equal(a, b)
                for a, b in zip(plain, chosen, strict=True)
            )
            continue
        with pytest.raises(UserError, match=f"take no {option}; ") as refused:
            objective.inputs_from(inputs, **{option: value})
        listed = str(refused.value).rpartition("they take ")[2].split(", ")
        assert set(listed) == known | {"sample_index"}


@pytest.mark.parametrize("name", list(PAPERS))
def test_none_is_the_default_of_every_option(make, name):
    """Passing None equals omitting the option."""
    objective, inputs = make(name)
    plain = objective.inputs_from(inputs)
    chosen = objective.inputs_from(inputs, **dict.fromkeys(PAPERS[name][2]))
    assert all(torch.equal(a, b) for a, b in zip(plain, chosen, strict=True))


@pytest.mark.parametrize("name", sorted(PAPERS.keys() - {"igpt", "bert"}))
def test_sample_index_of_the_host_suits_inputs_on_a_gpu(make, fake_gpu, name):
    """Fake CUDA tensors carry a device and no data; ids are left out, as their values are read."""
    objective, inputs = make(name)
    with fake_gpu:
        on_gpu = fake_gpu.from_tensor(inputs).to("cuda")
        found = objective.inputs_from(on_gpu, sample_index=torch.arange(4))
    assert {part.device.type for part in found} == {"cuda"}


def test_latents_without_sample_index_are_means(make):
    objective, inputs = make("givt")
    tokens = objective.reads.sequence(inputs[:, 0].float())
    assert torch.equal(objective.inputs_from(inputs)[0], tokens[:, :-1])


def test_maskgit_hides_nothing_without_sample_index_or_mask(make):
    objective, inputs = make("maskgit")
    assert not objective.inputs_from(inputs)[2].any()
    drawn = objective.inputs_from(inputs, sample_index=torch.arange(4))[2]
    assert torch.equal(drawn, objective.schedule.draw_hidden(torch.arange(4)))
    chosen = objective.inputs_from(inputs, mask=VALUES["mask"])[2]
    assert torch.equal(chosen, VALUES["mask"])


def test_mp3_masks_without_sample_index(make):
    """mask_ratio 1/3 leaves six of nine patches and the class token as context."""
    objective, inputs = make("mp3")
    assert objective.inputs_from(inputs)[1].shape == (4, 10)
    assert objective.inputs_from(inputs, mask_ratio=1 / 3)[1].shape == (4, 7)


@pytest.mark.parametrize("name", ["gvp", "composed_groups"])
def test_every_patch_has_a_query(make, name):
    """Content and queries follow the order; groups 0 to 2 have 3, 2 and 4 patches."""
    objective, inputs = make(name)
    order = VALUES["order"]
    rows = objective.inputs_from(inputs, order=order, boundaries=(3, 5))
    patches, groups = objective.reads.of(inputs), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    front = int(name == "composed_groups")  # the start token
    assert torch.equal(rows[0], gather_tokens(patches, order))
    assert torch.equal(rows[1], order)
    assert torch.equal(rows[2][:, front:], groups.expand(4, -1))
    assert torch.equal(rows[3], order)
    assert torch.equal(rows[4], groups.clamp(min=1).expand(4, -1))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("darl", {"order": torch.zeros(4, 9, dtype=torch.int64)}, "not a permutation of the 9"),
        ("darl", {"order": VALUES["order"][:2]}, "there are 2 orders for 4 images: give one"),
        ("gvp", {"order": VALUES["order"][:3]}, "there are 3 orders for 4 images: give one"),
        ("gvp", {"boundaries": torch.tensor([3, 3])}, r"boundaries \[3, 3\] does not increase"),
        ("gvp", {"boundaries": (0.5, 3)}, "boundaries must be a list of whole numbers, not"),
        ("bert", {"mask": torch.zeros(4, 8, dtype=torch.bool)}, r"mask has shape \[4, 8\]"),
        ("mp3", {"mask_ratio": 1.5}, r"mask_ratio must be in \[0, 1\]"),
        ("mp3", {"mask_ratio": torch.tensor([0.5, 0.5])}, r"mask_ratio must be in \[0, 1\]"),
        ("diffusion", {"gamma": -0.5}, r"gamma must be in \[0, 1\]"),
        (
            "diffusion",
            {"gamma": torch.zeros(4, 9)},
            r"gamma has shape \[4, 9\]; it must be a number, or \[4, 9, 1\]",
        ),
        ("givt", {"labels": torch.tensor([3, 0, 0, 0])}, "labels must be in 0..2"),
        ("givt", {"labels": torch.tensor([2, 0])}, "labels has 2 rows for 4 inputs: give one"),
    ],
)
def test_invalid_values_raise(make, name, options, message):
    objective, inputs = make(name)
    with pytest.raises(UserError, match=message):
        objective.inputs_from(inputs, **options)


def test_ids_outside_the_vocabulary_raise(make):
    objective, inputs = make("igpt")
    with pytest.raises(UserError, match="range from 0 to 12; objective.vocabulary_size 12"):
        objective.inputs_from(inputs.clone().fill_(0).index_fill(1, torch.tensor([4]), 12))
