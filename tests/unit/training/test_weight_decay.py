"""Weight decay of each parameter of every paper against an explicit list."""

import itertools
import re

import pytest
from small_vqgan import write_untrained_run
from tiny import tiny

from megavis.config.load import load_config
from megavis.model.stack import LocalLayers
from megavis.papers import build_objective
from megavis.training.engine import build_stack
from megavis.training.optimizer import build_optimizer, decays

BIASED = ("model.normalization=layer_norm", "model.add_bias=true")
FINETUNE = (*BIASED, "finetune={num_classes: 5}")

KERNELS = "self_attention.linear_{qkv,proj}.weight mlp.linear_{fc1,fc2}.weight"
"""Weights of a block, which all decay."""
GAINS = "{input_layernorm,pre_mlp_layernorm}.weight"
BIASES = (
    "{input_layernorm,pre_mlp_layernorm}.bias"
    " self_attention.linear_{qkv,proj}.bias mlp.linear_{fc1,fc2}.bias"
)
CROSS_KERNELS = "cross_attention.linear_{qkv,proj}.weight"
CROSS_OTHERS = "pre_cross_attn_layernorm.{weight,bias} cross_attention.linear_{qkv,proj}.bias"
VAE_BLOCKS = "{encoder,decoder}.{levels.0.0,middle.0}"
VQGAN_BLOCKS = (
    "{encoder.down.0.block.0,encoder.mid.block_1,encoder.mid.block_2,"
    "decoder.up.0.block.0,decoder.up.0.block.1,decoder.mid.block_1,decoder.mid.block_2}"
)
VQGAN_ATTENTION = (
    "{encoder.down.0.attn.0,encoder.mid.attn_1,"
    "decoder.up.0.attn.0,decoder.up.0.attn.1,decoder.mid.attn_1}"
)
DISCRIMINATOR = "[discriminator.network.]"
DISCRIMINATOR_KERNELS = (
    f"{DISCRIMINATOR} {{conv_in,conv_out,dense,score}}.weight"
    " halvings.{0,1}.{conv_0,conv_1,shortcut}.weight"
)
DISCRIMINATOR_BIASES = (
    f"{DISCRIMINATOR} {{conv_in,conv_out,dense,score}}.bias halvings.{{0,1}}.{{conv_0,conv_1}}.bias"
)

DECODER = "{num_layers: 1, hidden_size: 16, num_attention_heads: 2}"

# Paper: objective section, overrides, names that decay, names that do not. Braces expand to
# alternatives; a name in brackets is the prefix of all names up to the next bracket.
PAPERS = {
    "iGPT": (
        "{name: igpt, vocabulary_size: 12}",
        (),
        f"[blocks.0.] {KERNELS} [head.] linear.weight",
        f"[embedding.] start {{content,positions}}.weight [blocks.0.] {GAINS} [head.] norm.weight",
    ),
    "iGPT BERT": (
        "{name: igpt, vocabulary_size: 12, mode: bert}",
        (),
        f"[blocks.0.] {KERNELS} [head.] linear.weight",
        f"[embedding.] {{content,positions}}.weight [blocks.0.] {GAINS} [head.] norm.weight",
    ),
    "iGPT fine-tuned with its own loss": (
        "{name: igpt, vocabulary_size: 12}",
        ("finetune={num_classes: 5, generative_weight: 1}",),
        f"[blocks.0.] {KERNELS} [head.] linear.weight classifier.linear.weight",
        f"[embedding.] start {{content,positions}}.weight [blocks.0.] {GAINS}"
        " [head.] norm.weight classifier.linear.bias",
    ),
    "GIVT causal with an adapter": (
        "{name: givt, latent_channels: 4, downsampling: 4, num_components: 2, num_classes: 3,"
        " adapter_blocks: 2}",
        BIASED,
        "[embedding.] content.weight transform.blocks.{0,1}.conv_{0,1,2}.weight"
        f" [blocks.0.] {KERNELS} [head.] linear.weight",
        "[embedding.] {start,positions}.weight content.bias"
        " transform.blocks.{0,1}.norm_{1,2}.{weight,bias} transform.blocks.1.norm_0.{weight,bias}"
        f" [blocks.0.] {GAINS} {BIASES} [head.] norm.{{weight,bias}} linear.bias",
    ),
    "GIVT MaskGIT": (
        "{name: givt_maskgit, latent_channels: 4, downsampling: 4, num_classes: 3}",
        BIASED,
        f"[embedding.] content.weight [blocks.0.] {KERNELS} [head.] linear.weight",
        "[embedding.] {front,positions}.weight front_position mask marks content.bias"
        f" [blocks.0.] {GAINS} {BIASES} [head.] norm.{{weight,bias}} linear.bias",
    ),
    "GIVT encoder-decoder": (
        "{name: givt_encoder_decoder, latent_channels: 4, downsampling: 4, encoder_layers: 1,"
        " encoder_patch_size: 4}",
        BIASED,
        "[embedding.] content.weight encoder.linear_patches.weight"
        f" [embedding.encoder.blocks.0.] {KERNELS} [blocks.0.] {KERNELS} {CROSS_KERNELS}"
        " [head.] linear.weight",
        "[embedding.] start {positions,encoder.positions}.weight content.bias"
        " encoder.linear_patches.bias encoder.norm.{weight,bias}"
        f" [embedding.encoder.blocks.0.] {GAINS} {BIASES}"
        f" [blocks.0.] {GAINS} {BIASES} {CROSS_OTHERS} [head.] norm.{{weight,bias}} linear.bias",
    ),
    "DARL": (
        "{name: darl, patch_size: 4}",
        (*BIASED, "model.positions=learned"),
        f"[embedding.] content.weight [blocks.0.] {KERNELS} [head.] linear.weight",
        f"[embedding.] start positions.weight content.bias [blocks.0.] {GAINS} {BIASES}"
        " [head.] norm.{weight,bias} linear.bias",
    ),
    "DARL with diffusion, two streams and an MLP": (
        "{name: darl, patch_size: 4, loss: diffusion, order: random, two_streams: true,"
        " noise_a: 1, decoder: mlp}",
        BIASED,
        f"[embedding.] content.weight [blocks.0.] {KERNELS} [head.] noisy.weight"
        " decoder.linear.weight decoder.layers.0.mlp.linear_{fc1,fc2}.weight",
        f"[embedding.] start query content.bias [blocks.0.] {GAINS} {BIASES}"
        " [head.] norm.{weight,bias} noisy.bias decoder.{linear.bias,norm.weight,norm.bias}"
        " decoder.layers.0.norm.{weight,bias} decoder.layers.0.mlp.linear_{fc1,fc2}.bias",
    ),
    "DARL with diffusion and a Transformer": (
        "{name: darl, patch_size: 4, loss: diffusion, noise_a: 1, decoder: transformer}",
        BIASED,
        f"[embedding.] content.weight [blocks.0.] {KERNELS} [head.] noisy.weight"
        f" decoder.linear.weight [head.decoder.layers.0.] {KERNELS}",
        f"[embedding.] start content.bias [blocks.0.] {GAINS} {BIASES}"
        " [head.] norm.{weight,bias} noisy.bias decoder.{linear.bias,norm.weight,norm.bias}"
        f" [head.decoder.layers.0.] {GAINS} {BIASES}",
    ),
    "DARL of ids": (
        "{name: darl, vocabulary_size: 12, patch_size: 4, loss: ids, tokenizer: TOKENIZER}",
        BIASED,
        f"[embedding.] content.weight [blocks.0.] {KERNELS} [head.] linear.weight",
        f"[embedding.] start content.bias [blocks.0.] {GAINS} {BIASES}"
        " [head.] norm.{weight,bias}",
    ),
    "DARL in linear evaluation": (
        "{name: darl, patch_size: 4}",
        (*FINETUNE, "finetune.linear_evaluation=true"),
        "[head.] classifier.linear.weight",
        "[head.] classifier.linear.bias",
    ),
    "MP3": (
        "{name: mp3, patch_size: 4}",
        BIASED,
        f"[embedding.] content.weight [blocks.0.] {KERNELS} [head.] linear.weight",
        f"[embedding.] front content.bias [blocks.0.] {GAINS} {BIASES}"
        " [head.] norm.{weight,bias} linear.bias",
    ),
    "MP3 fine-tuned with relative positions": (
        "{name: mp3, patch_size: 4}",
        (*FINETUNE, "model.positions=relative_2d"),
        f"[embedding.] content.weight [blocks.0.] {KERNELS} [head.] classifier.linear.weight",
        f"[embedding.] front content.bias [blocks.0.] {GAINS} {BIASES}"
        " self_attention.relative_bias.weight [head.] norm.{weight,bias} classifier.linear.bias",
    ),
    "MAE, as in its released code": (
        f"{{name: mae, patch_size: 4, decoder: {DECODER}}}",
        BIASED,
        f"[embedding.] front content.weight [blocks.0.] {KERNELS} [bridge.] mask"
        f" linear.weight [decoder.0.] {KERNELS} [head.] linear.weight",
        f"[embedding.] content.bias [blocks.0.] {GAINS} {BIASES} [bridge.] linear.bias"
        f" norm.{{weight,bias}} [decoder.0.] {GAINS} {BIASES} [head.] norm.{{weight,bias}}"
        " linear.bias",
    ),
    "MAE without decay of tokens": (
        f"{{name: mae, patch_size: 4, tokens_decay: false, decoder: {DECODER}}}",
        BIASED,
        f"[embedding.] content.weight [blocks.0.] {KERNELS} [bridge.] linear.weight"
        f" [decoder.0.] {KERNELS} [head.] linear.weight",
        f"[embedding.] front content.bias [blocks.0.] {GAINS} {BIASES} [bridge.] mask"
        f" linear.bias norm.{{weight,bias}} [decoder.0.] {GAINS} {BIASES}"
        " [head.] norm.{weight,bias} linear.bias",
    ),
    "MAE fine-tuned, as in its released code": (
        f"{{name: mae, patch_size: 4, decoder: {DECODER}}}",
        (*FINETUNE, "model.positions=learned_sincos"),
        f"[embedding.] content.weight [blocks.0.] {KERNELS} [bridge.] classifier.linear.weight",
        f"[embedding.] front positions.weight content.bias [blocks.0.] {GAINS} {BIASES}"
        " [bridge.] norm.{weight,bias} classifier.linear.bias",
    ),
    "GVP": (
        "{name: gvp, patch_size: 4, num_groups: 3}",
        (*BIASED, "model.positions=learned"),
        f"[embedding.] content.weight [blocks.0.] {KERNELS} [head.] linear.weight",
        f"[embedding.] query front positions.weight content.bias"
        f" [blocks.0.] {GAINS} {BIASES} [head.] norm.{{weight,bias}} linear.bias",
    ),
    "GVP with a given condition": (
        "{name: gvp, patch_size: 4, num_groups: 3, condition_size: 5, tokenizer: absent}",
        BIASED,
        f"[embedding.] {{content,front}}.weight [blocks.0.] {KERNELS} [head.] linear.weight",
        f"[embedding.] query {{content,front}}.bias"
        f" [blocks.0.] {GAINS} {BIASES} [head.] norm.{{weight,bias}} linear.bias",
    ),
    "GVP of ids": (
        "{name: gvp, variant: d2d, vocabulary_size: 12, patch_size: 4, num_groups: 3}",
        BIASED,
        f"[blocks.0.] {KERNELS} [head.] linear.weight",
        f"[embedding.] query front content.weight [blocks.0.] {GAINS} {BIASES}"
        " [head.] norm.{weight,bias}",
    ),
    "GVP fine-tuned": (
        "{name: gvp, patch_size: 4, num_groups: 3}",
        (*FINETUNE, "finetune.layer_decay=0.5"),
        f"[embedding.] content.weight [blocks.0.] {KERNELS} [head.] classifier.linear.weight",
        f"[embedding.] query front content.bias [blocks.0.] {GAINS} {BIASES}"
        " [head.] norm.{weight,bias} classifier.linear.bias",
    ),
    "VAE": (
        "{name: vae, latent_channels: 4, filters: 32, multipliers: [1], blocks_per_level: 1,"
        " perceptual_weight: 0, discriminator_filters: 8, beta: 1e-4}",
        None,
        "[vae.network.] {encoder,decoder}.{conv_in,conv_out}.weight"
        f" {VAE_BLOCKS}.conv_{{0,1}}.weight {DISCRIMINATOR_KERNELS}",
        "[vae.network.] {encoder.conv_out,decoder.conv_in,decoder.conv_out}.bias"
        f" {{encoder,decoder}}.norm.{{weight,bias}} {VAE_BLOCKS}.norm_{{0,1}}.{{weight,bias}}"
        f" {DISCRIMINATOR_BIASES}",
    ),
    "VQGAN": (
        "{name: vqgan, codebook_size: 12, code_size: 4, filters: 16, multipliers: [1],"
        " blocks_per_level: 1, latent_channels: 8, norm_groups: 4, perceptual_weight: 0,"
        " discriminator_filters: 8, codebook_learning_rate: 2e-2}",
        None,
        "[vqgan.network.] {encoder,decoder}.{conv_in,conv_out}.weight"
        " {quant_conv,post_quant_conv}.weight"
        f" {VQGAN_BLOCKS}.conv{{1,2}}.weight {VQGAN_ATTENTION}.{{q,k,v,proj_out}}.weight"
        f" {DISCRIMINATOR_KERNELS}",
        "[vqgan.network.] quantize.embedding.weight {encoder,decoder}.{conv_in,conv_out}.bias"
        " {quant_conv,post_quant_conv}.bias {encoder,decoder}.norm_out.{weight,bias}"
        f" {VQGAN_BLOCKS}.{{conv1.bias,conv2.bias,norm1.weight,norm1.bias,norm2.weight,norm2.bias}}"
        f" {VQGAN_ATTENTION}.{{q.bias,k.bias,v.bias,proj_out.bias,norm.weight,norm.bias}}"
        f" {DISCRIMINATOR_BIASES}",
    ),
}


def expand(table):
    """Expand a list of names."""
    names, prefix = set(), ""
    for word in table.split():
        if word.startswith("["):
            prefix = word[1:-1]
            continue
        parts = [part.split(",") for part in re.split(r"[{}]", word)]
        names |= {prefix + "".join(choice) for choice in itertools.product(*parts)}
    return names


def trained_parameters(context, path, objective, words, zero_stage):
    """Build a model and return its trainable parameters; `words` is None for a tokenizer."""
    text = tiny(
        objective,
        model=None if words is None else {"num_layers": 1},
        optimizer={"weight_decay": 0.1},
        training={"validate_every": 1},
        validates=True,
    )
    path.write_text(text)
    words = [*(words or ()), f"parallel.zero_stage={zero_stage}"]
    built = build_objective(load_config(path, words).config, context)
    layers = LocalLayers(built.layer_plans(), list(build_stack(built).layers))
    return {name: p for name, p in layers.named_parameters() if p.requires_grad}


# ZeRO-3 partitions parameters during construction; tokenizer training does not support it.
CASES = [(paper, 0) for paper in PAPERS]
CASES += [(paper, 3) for paper, (_, words, *_) in PAPERS.items() if words is not None]


@pytest.mark.parametrize(("paper", "zero_stage"), CASES)
def test_decaying_parameters_match_the_list(context, tmp_path, paper, zero_stage):
    objective, words, decaying, others = PAPERS[paper]
    path = tmp_path / "small.yaml"
    if "TOKENIZER" in objective:
        objective = objective.replace("TOKENIZER", str(write_untrained_run(tmp_path)))
    parameters = trained_parameters(context, path, objective, words, zero_stage)
    found = {name for name, parameter in parameters.items() if decays(parameter)}
    assert found == expand(decaying)
    assert parameters.keys() - found == expand(others)


# What `optimizer.decay_embeddings` lets decay: objective section, overrides, these names, and a
# pattern of names that still do not decay. The released codes decay all parameters with two or more
# dimensions, MAR's but for the denoising network; of ours, `embedding.query` and `mask` have one.
EMBEDDINGS = {
    "RandAR": (
        "{name: randar, patch_size: 4, vocabulary_size: 12, num_classes: 3}",
        ("model.normalization=rms_norm", "model.activation=swiglu"),
        "[embedding.] content.weight start.weight query",
        r".*norm.weight",
    ),
    "MAR": (
        f"{{name: mar, latent_channels: 4, downsampling: 4, num_classes: 3, decoder: {DECODER},"
        " denoiser_layers: 1, denoiser_width: 16, noises_per_token: 2}",
        BIASED,
        "[embedding.] {positions,front}.weight front_position"
        " [bridge.] positions.weight front_position mask [head.] positions.weight",
        r".*(norm\.weight|\.bias)|head\..*",
    ),
}


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("paper", EMBEDDINGS)
def test_decay_of_embeddings(context, tmp_path, paper, zero_stage):
    objective, words, embeddings, others = EMBEDDINGS[paper]
    path = tmp_path / "small.yaml"
    parameters = trained_parameters(context, path, objective, words, zero_stage)
    without = {name for name, parameter in parameters.items() if not decays(parameter)}
    still = {n for n, p in parameters.items() if not decays(p, embeddings=True)}
    assert without - still == expand(embeddings)
    assert all(re.fullmatch(others, name) for name in still)
    config = load_config(path, ["optimizer.decay_embeddings=true"]).config.optimizer
    optimizer = build_optimizer(parameters.values(), config)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(others["params"]) == len(still)
