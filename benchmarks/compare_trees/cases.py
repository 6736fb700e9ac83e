"""Cases: tiny runs of every paper, their data, shipped presets, and invalid commands.

Paths are relative to the folder of a recording (`OUT/old`, `OUT/new`), so that outputs match.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

NUM_STEPS = 10
SAVED_STEP = 5
"""Each run trains to `NUM_STEPS`; another resumes the old tree's run from `SAVED_STEP`."""

_COMMON = f"""\
name: case
output: runs
parallel: {{zero_stage: 0}}
schedule: {{warmup_steps: 2}}
optimizer: {{learning_rate: 3e-3, weight_decay: 0.1, gradient_clipping: 0.5}}
training: {{steps: {NUM_STEPS}, batch_size: 8, micro_batch_size: 4, log_every: 1,
  validate_every: 5, validation_images: 16, sample_every: {NUM_STEPS}, sample_images: 2}}
checkpoint: {{every: {SAVED_STEP}, keep_last: 10}}
"""

_BLOCKS = """\
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, normalization: layer_norm,
  norm_epsilon: 1e-6, activation: gelu, add_bias: true}
"""


def _shards(kind: str, **keys: object) -> str:
    rest = "".join(f", {key}: {value}" for key, value in keys.items())
    return f"data: {{train: ../data/{kind}/train, validation: ../data/{kind}/validation{rest}}}\n"


_IMAGES = _shards("jpeg", image_size=16, crop="random_resized", flip="true")

BASES = {
    "palette": _COMMON
    + _shards("palette", image_size=8)
    + "objective: {name: igpt, vocabulary_size: 64}\n"
    + "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}\n",
    "images": _COMMON + _IMAGES + _BLOCKS,
    "ids": _COMMON + _shards("ids", image_size=16) + _BLOCKS,
    "latents": _COMMON
    + _shards("latents", image_size=16)
    + _BLOCKS
    + "objective: {name: givt, latent_channels: 4, downsampling: 4, num_classes: 10,"
    " num_components: 2, tokenizer: ../data/vae}\n",
    "pairs": _COMMON + _shards("pairs", image_size=16) + _BLOCKS,
    "frames": _COMMON + _shards("speech", frames="[100, 40]") + _BLOCKS,
    "networks": _COMMON + _IMAGES,
}
"""Base configs, which cases change by `key=value` words."""

_SIZES = (
    "multipliers: [1, 1, 1], blocks_per_level: 1, perceptual_weight: 0, discriminator_filters: 8"
)
VAE = f"{{name: vae, latent_channels: 4, filters: 32, {_SIZES}, beta: 1e-4}}"
VQGAN = (
    "{name: vqgan, codebook_size: 12, code_size: 4, filters: 16, latent_channels: 8,"
    f" norm_groups: 4, {_SIZES}}}"
)

DATA: tuple[str, ...] = (
    "data_tools photographs ../data/crops --size 16 --crops 120 --validation-crops 60",
    "data_tools palette fit ../data/crops/train --out ../data/palette.npy --num-colors 64"
    " --pixels 20000 --size 8",
    *(
        f"data_tools palette shards ../data/crops/{part} --palette ../data/palette.npy"
        f" --out ../data/palette/{part} --size 8"
        for part in ("train", "validation")
    ),
    *(
        f"data_tools {verb} ../data/crops/{part} {second} --out ../data/{folder}/{part} --size 16"
        for part in ("train", "validation")
        for verb, second, folder in (
            ("jpeg", "", "jpeg"),
            ("pairs", f"../data/crops/{part} --target-resize bicubic", "pairs"),
        )
    ),
    f"megavis train networks.yaml output=../data name=vae 'objective={VAE}'",
    f"megavis train networks.yaml output=../data name=vqgan 'objective={VQGAN}'",
    *(
        f"data_tools {verb} ../data/jpeg/{part} --tokenizer ../data/{network}"
        f" --out ../data/{verb}/{part} --size 16"
        for part in ("train", "validation")
        for verb, network in (("latents", "vae"), ("ids", "vqgan"))
    ),
    "data_tools words ../data/words --words yes,no --voices 3 --held-out-voices 2 --takes 2",
    "data_tools speech ../data/words --out ../data/speech",
    "megavis train palette.yaml output=../data name=igpt",
    "megavis train images.yaml output=../data name=darl"
    " 'objective={name: darl, patch_size: 4, loss: diffusion, noise_a: 1}'"
    " training.sample_every=0",
    "megavis train images.yaml output=../data name=mp3"
    " 'objective={name: mp3, patch_size: 4}' training.sample_every=0",
)
"""Commands that make the data once with the old tree: shards, tokenizers, runs to fine-tune."""


@dataclass(frozen=True)
class Case:
    """A run that both trees train, load, sample and evaluate.

    Attributes:
        name: name of the case and its run folder.
        base: one of `BASES`.
        words: `key=value` overrides, in shell syntax.
        samples: options of `megavis sample`, one command each.
        commands: other commands, with RUN for the run folder.
        layouts: whether to train in several layouts with `--layouts`.
    """

    name: str
    base: str
    words: str = ""
    samples: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    layouts: bool = True

    @property
    def overrides(self) -> list[str]:
        """The overrides, including the run's name."""
        return [f"name={self.name}", *shlex.split(self.words)]


_IDS = (
    "--num-images 3",
    "--num-images 3 --temperature 0.7 --top-k 5 --seed 1",
    "--num-images 3 --top-p 0.9 --step 5",
    "--num-images 2 --temperature 0",
    "--num-images 2 --prefix half --completions 2",
    "--num-images 2 --prefix 0.3 --completions 1 --images ../data/palette/train",
    "--num-images 5 --batch-size 2 --npz NPZ",
    "--num-images 3 --temperature 0.9 --top-p 0.8 --npz NPZ",
)
_PATCHES = (
    "--num-images 2",
    "--num-images 2 --prefix half --completions 2 --seed 2",
    "--num-images 5 --batch-size 2 --npz NPZ",
)
_NOISE = (
    "--num-images 2 --sampling-steps 3",
    "--num-images 2 --sampling-steps 3 --temperature 0.5 --prefix 0.3 --completions 1",
    "--num-images 2 --sampling-steps 2 --temperature 0",
    "--num-images 3 --batch-size 2 --sampling-steps 2 --npz NPZ",
)
_LATENTS = (
    "--num-images 3",
    "--classes 0,3 --per-class 2 --scale 0.9 --probability 1.2 --seed 1",
    "--num-images 5 --batch-size 2 --npz NPZ",
    "--num-images 6 --moments",
)
_CAUSAL = (
    *_LATENTS,
    "--classes 0,3 --per-class 1 --guidance 0.4",
    "--classes 0 --then-classes 5 --per-class 2",
    "--num-images 2 --beams 2 --fans 2",
    "--num-images 2 --fans 3 --npz NPZ",
)
_LIKELIHOOD = ("likelihood RUN --num-images 8",)
_PROBE = ("probe RUN --train-images 60 --validation-images 30 --untrained-networks 1 --no-cache",)
_PICTURES = ("--num-images 2",)
_MIXING = "finetune.mixup=0.8 finetune.cutmix=1.0 finetune.drop_path=0.1"

CASES: tuple[Case, ...] = (
    Case(
        "igpt",
        "palette",
        samples=_IDS,
        commands=(*_LIKELIHOOD, *_PROBE, "figure correlation RUN --num-images 4"),
    ),
    Case(
        "igpt_bert",
        "palette",
        "objective.mode=bert model.positions=rope_2d training.sample_every=0",
        samples=("--num-images 2",),
        commands=_PROBE,
    ),
    Case("igpt_random", "palette", "objective.order=random model.positions=rope_1d", _IDS[1:2]),
    Case("igpt_nested", "palette", "objective.order=nested_raster", (_IDS[4],), _LIKELIHOOD),
    Case("igpt_round", "palette", "objective.order=round_robin model.positions=sincos", _IDS[:1]),
    Case(
        "igpt_dropout",
        "palette",
        "model.hidden_dropout=0.1 model.attention_dropout=0.1 model.mlp_dropout=0.1"
        " optimizer.ema_decay=0.9",
        samples=_IDS[:1],
        layouts=False,
    ),
    Case("givt", "latents", samples=_CAUSAL, commands=(*_LIKELIHOOD, *_PROBE)),
    Case(
        "givt_full",
        "latents",
        "objective.covariance=full objective.num_components=1 objective.label_dropout=0"
        " objective.scale_activation=softplus",
        samples=("--num-images 3", "--num-images 2 --scale 0.9 --guidance 0.4"),
        commands=_LIKELIHOOD,
    ),
    Case("givt_adapter", "latents", "objective.adapter_blocks=2", (_CAUSAL[1], _CAUSAL[4])),
    Case("givt_stacked", "latents", "objective.stacked_latents=2", _CAUSAL[:1]),
    Case(
        "givt_maskgit",
        "latents",
        "objective.name=givt_maskgit",
        samples=(
            *_LATENTS,
            "--classes 1,2 --per-class 1 --guidance 0.1 --rounds 3",
            "--classes 7 --rounds 3 --choice-temperature 5 --show-rounds",
        ),
        commands=_PROBE,
    ),
    Case(
        "givt_encoder",
        "pairs",
        "'objective={name: givt_encoder_decoder, latent_channels: 4, downsampling: 4,"
        " encoder_layers: 1, encoder_patch_size: 4, num_classes: 0, num_components: 2,"
        " tokenizer: ../data/vae}'",
        samples=("--num-images 2 --completions 2", "--num-images 2 --completions 1 --beams 2"),
    ),
    Case(
        "darl_mse",
        "images",
        "'objective={name: darl, patch_size: 4, decoder: mlp, normalize_targets: true}'"
        " training.sample_every=0",
        samples=_PATCHES[:1],
        commands=("figure patches RUN --num-images 8", *_PROBE),
    ),
    Case(
        "darl_mse_drawn",
        "images",
        "'objective={name: darl, patch_size: 4, order: nested_raster}'",
        samples=_PATCHES,
        commands=("figure completions RUN --num-images 4",),
    ),
    Case(
        "darl_diffusion",
        "images",
        "'objective={name: darl, patch_size: 4, loss: diffusion, noise_a: 1,"
        " condition_on_gamma: true, sampling_steps: 4}'",
        samples=_NOISE,
    ),
    Case(
        "darl_diffusion_mlp",
        "images",
        "'objective={name: darl, patch_size: 4, loss: diffusion, decoder: mlp, predicts: noise,"
        " sampling_steps: 4}' model.drop_path=0.2",
        samples=_NOISE[:1],
        layouts=False,
    ),
    Case(
        "darl_diffusion_linear",
        "images",
        "'objective={name: darl, patch_size: 4, loss: diffusion, decoder: linear,"
        " sampling_steps: 4}' model.positions=learned",
        samples=_NOISE[:1],
    ),
    Case(
        "darl_ids",
        "images",
        "'objective={name: darl, patch_size: 4, loss: ids, tokenizer: ../data/vqgan,"
        " vocabulary_size: 12}' training.sample_every=0",
        commands=_PROBE,
    ),
    Case(
        "darl_random",
        "images",
        "'objective={name: darl, patch_size: 4, loss: diffusion, order: random,"
        " two_streams: true, sampling_steps: 4}'",
        samples=(*_NOISE[:2], _NOISE[3]),
    ),
    Case(
        "gvp",
        "images",
        "'objective={name: gvp, patch_size: 4, num_groups: 4, num_condition_tokens: 2}'",
        samples=_PICTURES,
        commands=("figure groups RUN --num-images 4", *_PROBE),
    ),
    Case(
        "gvp_p2d",
        "images",
        "'objective={name: gvp, variant: p2d, patch_size: 4, num_groups: 3, vocabulary_size: 12,"
        " segmentation: random, tokenizer: ../data/vqgan}' training.sample_every=0",
    ),
    Case(
        "gvp_d2d",
        "ids",
        "'objective={name: gvp, variant: d2d, patch_size: 4, num_groups: 4, vocabulary_size: 12,"
        " segmentation: fixed, tokenizer: ../data/vqgan}' training.sample_every=0",
        samples=_PICTURES,
        commands=("figure groups RUN --num-images 4",),
    ),
    Case(
        "gvp_one",
        "images",
        "'objective={name: gvp, patch_size: 4, streams: one, segmentation: fixed, num_groups: 16,"
        " order: raster, normalize_targets: true}' training.sample_every=0",
        samples=_PICTURES,
    ),
    Case(
        "gvp_condition",
        "images",
        "'objective={name: gvp, patch_size: 4, num_groups: 2, segmentation: given,"
        " boundaries: [4, 9], condition_size: 4, tokenizer: ../data/vqgan}'"
        " training.sample_every=0",
        samples=_PICTURES,
    ),
    Case(
        "mp3",
        "images",
        "'objective={name: mp3, patch_size: 4, mask_ratio: 0.5}' training.sample_every=0",
        samples=_PICTURES,
        commands=(
            "figure positions RUN --num-images 8",
            "figure jigsaw RUN --num-images 2",
            "figure attention RUN --num-images 2",
            *_PROBE,
        ),
    ),
    Case(
        "mp3_speech",
        "frames",
        "'objective={name: mp3, given_ratio: 0.1, mask_ratio: 0.5, class_token: false}'"
        " model.positions=sincos training.sample_every=0",
    ),
    Case("vae", "networks", f"'objective={VAE}' optimizer.betas=[0.0,0.99]", layouts=False),
    Case("vqgan", "networks", f"'objective={VQGAN}' optimizer.betas=[0.0,0.99]", layouts=False),
    Case(
        "finetune_igpt",
        "palette",
        "'finetune={num_classes: 10, from_run: ../data/igpt, generative_weight: 1.0}'"
        " training.sample_every=0",
    ),
    Case(
        "finetune_darl",
        "images",
        "'objective={name: darl, patch_size: 4, loss: diffusion, noise_a: 1}'"
        " 'finetune={num_classes: 10, from_run: ../data/darl, visibility: full, read_out: last,"
        f" layer_decay: 0.75, label_smoothing: 0.1}}' {_MIXING} training.sample_every=0",
        layouts=False,
    ),
    Case(
        "finetune_mp3",
        "images",
        "'objective={name: mp3, patch_size: 4}' model.positions=relative_2d"
        " 'finetune={num_classes: 10, from_run: ../data/mp3, visibility: full, read_out: first}'"
        " training.sample_every=0",
    ),
    Case(
        "linear_darl",
        "images",
        "'objective={name: darl, patch_size: 4, loss: diffusion, noise_a: 1}'"
        " 'finetune={num_classes: 10, from_run: ../data/darl, read_out: last,"
        " linear_evaluation: true}' optimizer.algorithm=lars training.sample_every=0"
        " training.micro_batch_size=null",
        layouts=False,
    ),
)

LAYOUTS: dict[str, tuple[int, str]] = {
    "tp2": (2, "parallel.tensor_model_parallel_size=2"),
    "pp2": (2, "parallel.pipeline_model_parallel_size=2"),
    "tp2-pp2-sp": (
        4,
        "parallel.tensor_model_parallel_size=2 parallel.pipeline_model_parallel_size=2"
        " parallel.sequence_parallel=true",
    ),
    "zero3": (2, "parallel.zero_stage=3"),
}
"""Number of processes and overrides of each layout, for `--layouts`."""

REFUSALS: tuple[str, ...] = (
    "train nowhere.yaml",
    "train palette.yaml model.hiden_size=64",
    "train palette.yaml objective.mask_ration=0.2",
    "train palette.yaml batch_size=4",
    "train palette.yaml objective.name=igtp",
    "train palette.yaml objective=null",
    "train palette.yaml training.steps=ten",
    "train palette.yaml optimizer.learning_rate=-1",
    "train palette.yaml optimizer.betas=[0.9]",
    "train palette.yaml model.num_attention_heads=5",
    "train palette.yaml objective.order=spiral",
    "train palette.yaml objective.order=nowhere.npy",
    "train palette.yaml objective.order=[0,0,1]",
    "train palette.yaml objective.order=round_robin objective.order_block=3",
    "train palette.yaml model.positions=relative_2d",
    "train palette.yaml parallel.tensor_model_parallel_size=2 parallel.sequence_parallel=true"
    " objective.vocabulary_size=63 data.image_size=9",
    "train palette.yaml parallel.pipeline_model_parallel_size=2 parallel.zero_stage=3",
    "train palette.yaml data.image_size=16",
    "train palette.yaml objective.vocabulary_size=32",
    "train palette.yaml data.train=nowhere",
    "train palette.yaml objective.mode=bert",
    "train palette.yaml 'finetune={num_classes: 10}' data.validation=null",
    "train images.yaml 'objective={name: darl, patch_size: 5}'",
    "train images.yaml 'objective={name: darl, patch_size: 4, order: random}'",
    "train images.yaml 'objective={name: darl, patch_size: 4, decoder: transformer}'",
    "train images.yaml 'objective={name: darl, patch_size: 4, loss: ids}'",
    "train images.yaml 'objective={name: gvp, patch_size: 4, num_groups: 40}'",
    "train images.yaml 'objective={name: gvp, patch_size: 4, segmentation: given,"
    " boundaries: [4, 4, 20]}'",
    "train images.yaml 'objective={name: gvp, patch_size: 4, streams: one}'",
    "train images.yaml 'objective={name: gvp, patch_size: 4, variant: d2d}'",
    "train images.yaml 'objective={name: mp3, patch_size: 4}' model.positions=rope_2d",
    "train latents.yaml objective.covariance=full",
    "train latents.yaml objective.adapter_blocks=2 objective.latent_channels=5",
    "train latents.yaml objective.downsampling=5",
    "train latents.yaml objective.tokenizer=nowhere",
    "train networks.yaml 'objective={name: vae, filters: 33}'",
    f"train networks.yaml 'objective={VQGAN}' parallel.tensor_model_parallel_size=2",
    "train frames.yaml 'objective={name: igpt}'",
    "plan palette.yaml --gpus 3",
    "params palette.yaml --processes 3",
    "train palette.yaml --processes 2",
    "finetune palette.yaml",
    "sample nowhere",
    "sample ../data/igpt --num-images 0",
    "sample ../data/igpt --prefix 2",
    "sample ../data/igpt --step 3",
    "sample ../data/igpt --top-k 0",
    "sample ../data/igpt --top-p 2",
    "sample ../data/igpt --temperature -1",
    "sample ../data/mp3 --npz x.npz",
    "sample ../data/darl --sampling-steps 0",
    "probe nowhere",
    "likelihood ../data/mp3",
    "megalomania",
)
"""Commands that must fail with a one-sentence message."""
