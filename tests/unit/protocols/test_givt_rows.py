"""What GIVT's presets train on, row by row: "GIVT: Generative Infinite-Vocabulary Transformers"."""

import pytest
from protocols import IMAGENET, IMAGENET_LABELS, ROOT, contradictions

from megavis.config.load import load_config
from megavis.papers import build_objective
from megavis.planning.parameters import count_parameters

pytestmark = pytest.mark.once

PAPER = "givt"

# Appendix C.2: crops of 80 to 100 % of the image (squares in the released code), half flipped.
CROPS = {
    "data.crop": "inception",
    "data.scale": (0.8, 1.0),
    "data.aspect": (1.0, 1.0),
    "data.flip": True,
}


def vae(beta, channels=16):
    """Section 4.1: trained on 256² images of ImageNet, also for 512²; Table 6."""
    return {
        **IMAGENET,
        **CROPS,
        "data.image_size": 256,
        "objective.name": "vae",
        "objective.latent_channels": channels,
        "objective.beta": beta,
    }


# Section 4.1: Adam, cosine, 500 epochs with 50 of warm-up, weight decay 1e-4, which follows the
# rate of 1e-3 in the released code; class labels are dropped for guidance (section 3.4).
GIVT = {
    **IMAGENET,
    **CROPS,
    "epochs": 500,
    "warmup_epochs": 50,
    "training.batch_size": 8192,
    "schedule.decay": "cosine",
    "optimizer.algorithm": "adam",
    "optimizer.betas": (0.9, 0.95),
    "optimizer.learning_rate": 1e-3,
    "optimizer.weight_decay": 0.1,
    "objective.num_classes": 1000,
    "objective.adapter_blocks": 0,
    "finetune": None,
}


def givt(name, size, components, shape, dropout, **keys):
    """Return a row of Table 5: resolution, k, width, depth, MLP, heads, dropout."""
    names = ("hidden_size", "num_layers", "mlp_size", "num_attention_heads")
    model = {f"model.{key}": value for key, value in zip(names, shape, strict=True)}
    return {
        **GIVT,
        **model,
        "objective.name": name,
        "data.image_size": size,
        "objective.num_components": components,
        "model.mlp_dropout": dropout,
        **keys,
    }


# Table 5: preset and its rows, whose VAEs have β = 5e-5 (Default) or 1e-5 (Large).
BASE, DEFAULT, LARGE = (768, 12, 3072, 12), (1024, 24, 4096, 16), (1536, 48, 8192, 16)
# The released code trains MaskGIT without weight decay.
MASKGIT = {"optimizer.weight_decay": 0.0}
ADAPTER = {"objective.adapter_blocks": 8}
PAIRS = {"objective.stacked_latents": 2}
MODELS = {
    "causal_base": [vae(5e-5), givt("givt", 256, 16, BASE, 0.1)],
    "causal_default": [vae(5e-5), givt("givt", 256, 16, DEFAULT, 0.2)],
    "causal_large": [vae(1e-5), givt("givt", 256, 16, LARGE, 0.3)],
    "causal_large_adapter": [vae(1e-5), givt("givt", 256, 16, LARGE, 0.3, **ADAPTER)],
    "causal_large_512": [vae(1e-5), givt("givt", 512, 32, LARGE, 0.1, **PAIRS)],
    "causal_large_512_adapter": [
        vae(1e-5),
        givt("givt", 512, 32, LARGE, 0.1, **PAIRS, **ADAPTER),
    ],
    "maskgit": [vae(5e-5), givt("givt_maskgit", 256, 16, DEFAULT, 0.4, **MASKGIT)],
    "maskgit_512": [vae(5e-5), givt("givt_maskgit", 512, 16, DEFAULT, 0.4, **MASKGIT)],
    "causal_unconditional": [
        vae(5e-5),
        givt("givt", 256, 16, DEFAULT, 0.2, **{"objective.num_classes": 0}),
    ],
}

TABLE_1 = {
    **{10: "maskgit", 11: "maskgit", 16: "causal_default", 17: "causal_default"},
    **{18: "causal_large_adapter", 19: "causal_large_adapter"},
}
# Items without rows, by model: samples of it, or its size.
ITEMS = {
    "Figure 1": ["causal_large_512_adapter"],  # "from GIVT-Causal-L+A" (section 5.1)
    "Figure 5": ["causal_large"],
    "Figure 7": ["causal_default"],
    "Table 2": ["causal_large_512_adapter", "maskgit_512"],
    "Table 5": sorted(MODELS.keys() - {"causal_unconditional", "causal_large_512_adapter"}),
    "Table 7": ["causal_unconditional"],
    "Figure 9": ["causal_unconditional"],
    "Figure 10": ["causal_large"],
    "Figure 13": ["causal_default", "maskgit"],
    "Figure 14": ["causal_default"],
    "Figure 15": ["maskgit"],
    "Figure 16": ["causal_large_adapter"],
    "Figure 17": ["maskgit"],
    "Figure 18": ["maskgit_512"],
    "Figure 19": ["causal_default"],
}
ROWS = {
    **{f"Table 1, {row}": MODELS[name] for row, name in TABLE_1.items()},
    **{f"{item}: givt_{name}": MODELS[name] for item, names in ITEMS.items() for name in names},
    "Table 6: givt_vae": [vae(5e-5)],
    "Figure 12: givt_vae": [vae(5e-5)],
}

# Figure 4: β of 2.5e-5 to 2e-4, k of 1 to 32, Base. Figure 8: loss of the same models.
ROWS |= {
    "Figure 4: givt_vae_1e-4": [vae(1e-4)],
    "Figure 4: givt_causal_base_1e-4_8": [vae(1e-4), givt("givt", 256, 8, BASE, 0.1)],
    "Figure 8: givt_causal_base_8": [vae(5e-5), givt("givt", 256, 8, BASE, 0.1)],
}
# Figure 5: k of 1 and 16, with and without adapter.
for suffix, keys in (("", {}), ("_adapter", ADAPTER)):
    ROWS[f"Figure 5: givt_causal_large{suffix}_1"] = [
        vae(1e-5),
        givt("givt", 256, 1, LARGE, 0.3, **keys),
    ]

# Table 4: layer 18, "the full ImageNet training set", mean over the sequence (appendix F).
ROWS["Table 4: givt_causal_unconditional_linear"] = [
    *MODELS["causal_unconditional"],
    {
        **IMAGENET_LABELS,
        "data.image_size": 256,
        "finetune.layer": 18,
        "finetune.linear_evaluation": True,
        "finetune.read_out": "mean",
    },
]

# Table 3, section 4.2: UViM at 512² with d = 16, 6 and 12 layers of the VAE, the Default decoder
# (appendix B) behind a ViT-L/16. The released configs: 500 and 200 epochs of the VAE, 200 and 50
# of GIVT; COCO's 118,287 training images less 4,096, NYU's 47,584.
TASKS = {
    "coco_panoptic": (2.5e-4, 118_287 - 4096, 500, 200),
    "nyu_depth": (2e-4, 47_584, 200, 50),
}
for task, (beta, images, first, second) in TASKS.items():
    maps = {
        "data.train": f"shards/{task}/train",
        "data.validation": f"shards/{task}/validation",
        "images": images,
        "data.image_size": 512,
        "data.crop": "inception",
        "data.flip": True,
        "optimizer.learning_rate": 1e-3,
    }
    first_stage = {
        **maps,
        "objective.name": "vae_label_maps",
        "objective.beta": beta,
        "objective.latent_channels": 16,
        "model.num_layers": 6,
        "objective.decoder_layers": 12,
        "epochs": first,
        "training.batch_size": 1024,
    }
    second_stage = {
        **maps,
        "objective.name": "givt_encoder_decoder",
        "objective.num_components": 1,
        "objective.encoder_layers": 24,
        "objective.encoder_patch_size": 16,
        "objective.encoder_from_run": "runs/vit_l16_in21k",
        "model.num_layers": 24,
        "model.hidden_size": 1024,
        "epochs": second,
        "training.batch_size": 512,
    }
    ROWS[f"Table 3: givt_vae_{task}"] = [first_stage]
    ROWS[f"Table 3: givt_encoder_decoder_{task}"] = [first_stage, second_stage]
    figure = {"coco_panoptic": "Figure 20", "nyu_depth": "Figure 21"}[task]
    ROWS[f"{figure}: givt_encoder_decoder_{task}"] = [first_stage, second_stage]


def test_every_claimed_row_has_a_protocol(rows):
    assert set(rows) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row_trains_as_the_paper_says(rows, row):
    assert not contradictions(rows[row], ROWS[row])


# Table 1's inference: t, DB-CFG and t_C.
INFERENCE = {
    10: {"choice_temperature": 35, "guidance": None},
    11: {"choice_temperature": 60, "guidance": 0.1},
    16: {"temperature": 0.9, "guidance": None},
    17: {"temperature": 0.95, "guidance": 0.4},
    18: {"temperature": 0.9, "guidance": None},
    19: {"temperature": 0.95, "guidance": 0.4},
}
# "for the same 10 ImageNet classes as in Fig. 1", one of them twice.
CLASSES = [130, 130, 138, 144, 933, 145, 360, 207, 829, 248]
FIGURES = {
    "Figure 1": {"classes": CLASSES},
    "Figure 12": {"draws": 4},
    "Figure 13": [
        {"classes": [980], "guidance": None},
        {"classes": [980], "guidance": None, "choice_temperature": 35.0},
    ],
    "Figure 14": {"classes": CLASSES, "temperature": 0.95, "guidance": 0.4},
    "Figure 15": {"classes": [947, 94], "show_rounds": True},
    "Figure 16": {"classes": CLASSES, "temperature": 0.95, "guidance": 0.4},
    "Figure 17": {"classes": CLASSES, "choice_temperature": 60, "guidance": 0.1},
    "Figure 18": {"classes": CLASSES, "choice_temperature": 140, "guidance": None},
    "Figure 19": {
        # The first column has the same class in both halves.
        "classes": [207, 207, 207, 207, 448, 448, 448, 448],
        "then_classes": [207, 360, 366, 355, 448, 449, 437, 415],
        "per_class": 1,
    },
}


@pytest.mark.parametrize("row", INFERENCE)
def test_table_1_samples_50_000_images_as_it_says(commands, row):
    """Section 4.1: "a balanced set of 50k images covering all ImageNet classes"."""
    (args,) = commands[f"Table 1, {row}"]
    options = {"num_images": 50_000, "classes": None, **INFERENCE[row]}
    assert {key: getattr(args, key) for key in options} == options


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_draw_what_the_captions_say(commands, figure):
    wanted = FIGURES[figure] if isinstance(FIGURES[figure], list) else [FIGURES[figure]]
    for args, options in zip(commands[figure], wanted, strict=True):
        found = {key: getattr(args, key) for key in options}
        for key in {"classes", "then_classes"} & found.keys():
            found[key] = [int(number) for number in found[key]]
        assert found == options


@pytest.fixture(scope="module")
def count(context):
    """Return a function that counts the parameters of a preset on the meta device."""

    def count_preset(name, *words):
        config = load_config(ROOT / "yaml_configs" / "givt" / f"{name}.yaml", words).config
        matrices = count_parameters(build_objective(config, context))
        # Discriminators are no part of a model.
        return sum(m.parameters for m in matrices if m.part != "discriminator")

    return count_preset


# Table 5; "encoder and decoder have a combined 53.5M parameters" (section 4.1).
SIZES = {
    "causal_base": 86e6,
    "causal_default": 304e6,
    "causal_large": 1.67e9,
    "causal_large_512": 1.67e9,
    "maskgit": 304e6,
    "maskgit_512": 304e6,
    "vae": 53.5e6,
}


@pytest.mark.parametrize("name", SIZES)
def test_models_have_the_printed_sizes(count, name):
    assert count(name) == pytest.approx(SIZES[name], rel=0.01)


def test_adapters_add_112_000_parameters(count):
    """Section 4.1: "resulting in 112k additional parameters for d = 16"."""
    added = count("causal_default", "objective.adapter_blocks=8") - count("causal_default")
    assert added == pytest.approx(112e3, rel=0.01)
