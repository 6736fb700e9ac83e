"""Small configs for the tests of layouts; a new paper adds an entry."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from golden_givt import import_golden
from latent_shards import write_latent_shards
from scene_shards import write_scene_shards
from small_vqgan import write_untrained_run

# Overrides for presets of GIVT's encoder-decoder: 64 tokens attend to the 64 patches of an image.
SMALL_ENCODER = [
    "data.image_size=32",
    "objective.encoder_patch_size=4",
    "objective.encoder_layers=2",
    "objective.downsampling=4",
    "model.hidden_size=64",
    "model.ffn_hidden_size=256",
]


@dataclass(frozen=True)
class SmallConfig:
    """A model of two blocks of 32 channels.

    Attributes:
        objective: the section, with `TOKENIZER` in place of a frozen tokenizer's run.
        data: `images`, `palette`, `latents`, `encoded` (images that `VAE` encodes) or `label_maps`
            (scenes with panoptic maps).
        model: keys of the model other than its size.
        rest: further sections.
        in_every_pair: test checkpoints from each layout to each other.
        image_size: side of `images`, which are 16² pixels, after they are cropped.
    """

    objective: str
    data: str = "images"
    model: str = ""
    rest: str = ""
    in_every_pair: bool = False
    image_size: int = 16


MAE = (
    "{name: mae, patch_size: 4, class_token: false,"
    " decoder: {num_layers: 2, hidden_size: 16, num_attention_heads: 4}}"
)

# Configs with `in_every_pair` draw random numbers in each step or for each image: masks, noise,
# orders, crops.
SMALL = {
    "igpt": SmallConfig(
        "{name: igpt, vocabulary_size: 64, mode: bert}", data="palette", in_every_pair=True
    ),
    "givt": SmallConfig(
        "{name: givt, latent_channels: 4, downsampling: 4, num_classes: 3, num_components: 2,"
        " adapter_blocks: 2}",
        data="latents",
        in_every_pair=True,
    ),
    "givt_maskgit": SmallConfig(
        "{name: givt_maskgit, latent_channels: 4, downsampling: 4, num_classes: 3,"
        " num_components: 2}",
        data="latents",
    ),
    "givt_encoder_decoder": SmallConfig(
        "{name: givt_encoder_decoder, latent_channels: 8, downsampling: 4, encoder_layers: 1,"
        " encoder_patch_size: 4, tokenizer: VAE}",
        data="encoded",
    ),
    "darl_mse": SmallConfig(
        "{name: darl, patch_size: 4, decoder: mlp, order: random, two_streams: true}"
    ),
    "darl": SmallConfig(
        "{name: darl, patch_size: 4, loss: diffusion, noise_a: 1, condition_on_gamma: true}",
        in_every_pair=True,
    ),
    "mp3": SmallConfig(
        "{name: mp3, patch_size: 4, mask_ratio: 0.5, class_token: false}", in_every_pair=True
    ),
    # Relative biases split over heads, with a class head.
    "mp3_relative": SmallConfig(
        "{name: mp3, patch_size: 4, class_token: false}",
        model="positions: relative_2d",
        rest="finetune: {num_classes: 10, visibility: full}",
    ),
    "gvp": SmallConfig(
        "{name: gvp, patch_size: 4, num_groups: 4, num_condition_tokens: 2}",
        model="drop_path: 0.4",
        in_every_pair=True,
    ),
    "gvp_d2d": SmallConfig(
        "{name: gvp, variant: d2d, patch_size: 4, num_groups: 4, vocabulary_size: 12,"
        " num_condition_tokens: 2, tokenizer: TOKENIZER}"
    ),
    "aim": SmallConfig(
        "{name: aim, patch_size: 4, head: {num_layers: 2, hidden_size: 24}}", in_every_pair=True
    ),
    # Nine ids and the row before the class are ten rows; of an even number of ids, sequence and
    # context parallelism could not split the rows.
    "rar": SmallConfig(
        "{name: rar, patch_size: 4, vocabulary_size: 12, num_classes: 10, tokenizer: TOKENIZER}",
        model="qk_norm: true",
        in_every_pair=True,
        image_size=12,
    ),
    "randar": SmallConfig(
        "{name: randar, patch_size: 4, vocabulary_size: 12, num_classes: 10, tokenizer: TOKENIZER}",
        model="activation: swiglu",
        in_every_pair=True,
    ),
    # An encoder in which the number of known tokens is drawn; head and noise above a bridge.
    "mar": SmallConfig(
        "{name: mar, latent_channels: 4, downsampling: 4, num_classes: 3, class_rows: 4,"
        " decoder: {num_layers: 2, hidden_size: 16, num_attention_heads: 4},"
        " denoiser_layers: 2, denoiser_width: 24, noises_per_token: 2, sampling_steps: 4}",
        data="latents",
        in_every_pair=True,
    ),
    "mae": SmallConfig(MAE, in_every_pair=True),
    # The encoder with drop path and layer-wise learning rates.
    "mae_classes": SmallConfig(
        MAE, rest="finetune: {num_classes: 10, layer_decay: 0.7, drop_path: 0.3}"
    ),
    # Features of two blocks, each at two scales, with drop path.
    "mae_segments": SmallConfig(
        MAE,
        data="label_maps",
        rest="finetune: {task: segments, num_classes: 5, head_width: 8, head_dropout: 0,"
        " layer_decay: 0.7, drop_path: 0.3}",
    ),
    "vae_label_maps": SmallConfig(
        "{name: vae_label_maps, semantic_channels: 6, instance_channels: 8, patch_size: 4,"
        " downsampling: 8, latent_channels: 4, decoder_layers: 2}",
        data="label_maps",
        model="activation: gelu",
        in_every_pair=True,
    ),
    "compose": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4},"
        " schedule: {kind: one_by_one, order: random}, asks: {kind: shift, place: both},"
        " density: {kind: gaussian_mixture, num_components: 2},"
        " condition: {kind: labels, num_classes: 10}}",
        in_every_pair=True,
    ),
    # A class that modulates the norms of all rows, and orders that change in these four steps.
    "compose_modulated": SmallConfig(
        "{name: compose, reads: {kind: colors, vocabulary_size: 64},"
        " schedule: {kind: one_by_one, anneal: [0.25, 1]},"
        " asks: {kind: shift, place: both}, density: {kind: categorical, bias: true},"
        " condition: {kind: labels, num_classes: 10, modulation: class_and_row}}",
        data="palette",
        model="qk_norm: true",
        in_every_pair=True,
    ),
    # The same of two streams, of which the head reads one.
    "compose_modulated_queries": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4},"
        " schedule: {kind: groups, num_groups: 4}, asks: {kind: query, start: false},"
        " density: {kind: gaussian_mixture, num_components: 2},"
        " condition: {kind: labels, num_classes: 10, modulation: class}}",
        model="drop_path: 0.4",
    ),
    # Of nine patches, so that ten rows are split.
    "compose_sink": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4},"
        " schedule: {kind: one_by_one, prefix: 4}, asks: {kind: shift, place: content, sink: true},"
        " density: {kind: diffusion, noise_a: 1}}",
        image_size=12,
    ),
    "compose_prefix": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4},"
        " schedule: {kind: one_by_one, prefix: 4}, asks: {kind: shift, place: content},"
        " density: {kind: diffusion, noise_a: 1, decoder: mlp}}"
    ),
    # A prefix that is drawn for each image, and no start token.
    "compose_drawn_prefix": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4},"
        " schedule: {kind: one_by_one, prefix: drawn},"
        " asks: {kind: shift, place: content, start: false},"
        " density: {kind: squared_error, decoder: mlp, decoder_layers: 2, decoder_width: 24,"
        " decoder_positions: true}}"
    ),
    "compose_attended": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4},"
        " schedule: {kind: one_by_one, prefix: drawn},"
        " asks: {kind: shift, place: content, start: false},"
        " density: {kind: squared_error}}",
        rest="finetune: {num_classes: 10, read_out: attention}",
    ),
    "compose_codes": SmallConfig(
        "{name: compose, reads: {kind: ids, patch_size: 4, vocabulary_size: 12,"
        " tokenizer: TOKENIZER}, schedule: {kind: rounds}, asks: {kind: mask},"
        " density: {kind: categorical}}"
    ),
    "compose_palette": SmallConfig(
        "{name: compose, reads: {kind: colors, vocabulary_size: 64},"
        " schedule: {kind: one_by_one, prefix: 32}, asks: {kind: shift, place: content},"
        " density: {kind: categorical}, condition: {kind: labels, num_classes: 10}}",
        data="palette",
    ),
    "compose_latents": SmallConfig(
        "{name: compose, reads: {kind: latents, channels: 4, patch_size: 4},"
        " schedule: {kind: one_by_one}, asks: {kind: shift, place: content},"
        " density: {kind: diffusion, noise_a: 1, decoder: mlp, condition_on_gamma: true},"
        " condition: {kind: labels, num_classes: 3}}",
        data="latents",
    ),
    "compose_adapter": SmallConfig(
        "{name: compose, reads: {kind: latents, channels: 4, patch_size: 4},"
        " schedule: {kind: one_by_one}, asks: {kind: shift},"
        " density: {kind: gaussian_mixture, num_components: 2},"
        " transform: {kind: adapter, blocks: 2}}",
        data="latents",
    ),
    "compose_features": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4},"
        " schedule: {kind: groups, num_groups: 4}, asks: {kind: query},"
        " density: {kind: gaussian_mixture, num_components: 2},"
        " condition: {kind: pooled_features, feature_size: 4, tokenizer: TOKENIZER}}"
    ),
    "compose_bridge": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4}, schedule: {kind: context},"
        " asks: {kind: visible,"
        " decoder: {num_layers: 2, hidden_size: 16, num_attention_heads: 4}},"
        " density: {kind: gaussian_mixture, num_components: 2}}"
    ),
    "compose_memory": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4}, schedule: {kind: one_by_one},"
        " asks: {kind: shift}, density: {kind: gaussian_mixture, num_components: 2},"
        " memory: {kind: encoded_image, num_layers: 2, patch_size: 8}}"
    ),
    # Rows of which the head reads every other one, with noise that it reads besides.
    "compose_instruct": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4},"
        " schedule: {kind: one_by_one, order: random}, asks: {kind: instruct},"
        " density: {kind: diffusion, noise_a: 1, decoder: mlp, condition_on_gamma: true},"
        " condition: {kind: labels, num_classes: 10}}",
        model="positions: rope_2d",
        in_every_pair=True,
    ),
    # Modulated MLPs with learned variances and several noises a token, also above a bridge.
    "compose_denoised_modulated": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4},"
        " schedule: {kind: one_by_one, order: random}, asks: {kind: instruct},"
        " density: {kind: diffusion, decoder: modulated_mlp, decoder_layers: 2, decoder_width: 24,"
        " decoder_positions: learned, noise: cosine, noise_steps: 50, predicts: noise,"
        " learns_variance: true, noises_per_token: 2, sampling_steps: 5},"
        " condition: {kind: labels, num_classes: 10}}",
        model="positions: rope_2d",
        in_every_pair=True,
    ),
    "compose_bridged_noise": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4}, schedule: {kind: context},"
        " asks: {kind: visible,"
        " decoder: {num_layers: 2, hidden_size: 16, num_attention_heads: 4}},"
        " density: {kind: diffusion, decoder: modulated_mlp, decoder_positions: learned,"
        " noise: cosine, noise_steps: 50, sampling_steps: 5}}"
    ),
    "compose_places": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4}, schedule: {kind: context},"
        " asks: {kind: in_context}, density: {kind: place}}"
    ),
    # Heads that skip rows: a class in front, or what an encoder has seen.
    "compose_class_in_rounds": SmallConfig(
        "{name: compose, reads: {kind: colors, vocabulary_size: 64}, schedule: {kind: rounds},"
        " asks: {kind: mask}, density: {kind: categorical},"
        " condition: {kind: labels, num_classes: 10}}",
        data="palette",
    ),
    "compose_rounds_by_order": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4},"
        " schedule: {kind: rounds, chosen: order}, asks: {kind: mask, norm: true},"
        " density: {kind: gaussian_mixture, num_components: 2},"
        " condition: {kind: labels, num_classes: 10, count: 4}}"
    ),
    "compose_class_denoised": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4}, schedule: {kind: masked},"
        " asks: {kind: mask}, density: {kind: diffusion, noise_a: 1},"
        " condition: {kind: labels, num_classes: 10}}"
    ),
    "compose_hidden_codes": SmallConfig(
        "{name: compose, reads: {kind: patches, patch_size: 4},"
        " predicts: {kind: ids, patch_size: 4, vocabulary_size: 12, tokenizer: TOKENIZER},"
        " schedule: {kind: context},"
        " asks: {kind: visible,"
        " decoder: {num_layers: 2, hidden_size: 16, num_attention_heads: 4}},"
        " density: {kind: categorical}}"
    ),
}


def config_writer(shards: Path, image_shards: Path, folder: Path) -> Callable[[str], Path]:
    """Return what writes the config of a small model to the folder, by name, and returns its path.

    The folder gets shards of the other kinds, and frozen tokenizers.
    """
    for seed, part in enumerate(("train", "validation")):
        place, sizes = folder / "latents" / part, {"shape": (4, 4, 4), "num_classes": 3}
        write_latent_shards(place, **sizes, num_images=60, seed=seed)
    scenes = write_scene_shards(folder, images=24)
    images = f"{{train: {image_shards}/train, validation: {image_shards}/validation, image_size: "
    kinds = {
        "images": f"{images}SIZE, crop: random_resized, flip: true}}",
        "palette": f"{{train: {shards}/train, image_size: 8}}",
        "latents": f"{{train: {folder}/latents/train, image_size: 16}}",
        "encoded": f"{images}16}}",
        "label_maps": f"{{train: {scenes}/panoptic/train, validation:"
        f" {scenes}/panoptic/validation, image_size: 16, crop: random_resized}}",
    }
    runs = {"TOKENIZER": str(write_untrained_run(folder)), "VAE": import_golden(folder, "vae")}

    def write(name: str) -> Path:
        small, path = SMALL[name], folder / f"{name}.yaml"
        objective = small.objective
        for word, run in runs.items():
            objective = objective.replace(word, run)
        validate = ", validate_every: 1" if "finetune" in small.rest else ""
        path.write_text(
            f"""\
name: {name}
output: {folder}/runs
objective: {objective}
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  normalization: layer_norm
  add_bias: true
  {small.model}
data: {kinds[small.data].replace("SIZE", str(small.image_size))}
optimizer: {{learning_rate: 1e-3, gradient_clipping: 0.5}}
training: {{steps: 4, batch_size: 12, micro_batch_size: 3{validate}}}
{small.rest}
"""
        )
        return path

    return write
