"""A paper written in words trains, sees, and scores the same bits as the paper."""

from pathlib import Path

import pytest
import torch
import yaml
from golden_givt import import_golden
from small_batches import batch_of, photographs
from small_configs import SMALL
from small_vqgan import write_untrained_run
from tiny import VIT, tiny

from megavis.composition.segmentation import Segmentation
from megavis.config.errors import UserError
from megavis.config.load import dump_config, load_config
from megavis.grammar.compose import written_out
from megavis.model.inference import Inference
from megavis.model.stack import LayerStack, LocalLayers
from megavis.papers import build_objective
from megavis.planning.shape import shape_of
from megavis.sampling.sampler import Sampler

PRESETS = Path(__file__).parents[3] / "yaml_configs"
pytestmark = pytest.mark.once

MORE = {
    "igpt_causal": "{name: igpt, vocabulary_size: 64, order: random}",
    "igpt_list": f"{{name: igpt, vocabulary_size: 64, order: {[*range(255, -1, -1)]}}}",
    "givt_full": "{name: givt, latent_channels: 4, downsampling: 4, num_classes: 0,"
    " num_components: 1, covariance: full}",
    "givt_maskgit_zeros": "{name: givt_maskgit, latent_channels: 4, downsampling: 4,"
    " num_classes: 0, masked_input: zeros, loss_average: images, stacked_latents: 2}",
    "darl_mse_linear": "{name: darl, patch_size: 4, order: round_robin, normalize_targets: true}",
    "darl_ids": "{name: darl, patch_size: 4, loss: ids, vocabulary_size: 12, tokenizer: VQGAN}",
    "gvp_one": "{name: gvp, patch_size: 4, streams: one, segmentation: fixed, num_groups: 16,"
    " num_condition_tokens: 2}",
    "gvp_given": "{name: gvp, patch_size: 4, segmentation: given, boundaries: [4, 9],"
    " feature_order: drawn, condition_size: 4, tokenizer: VQGAN}",
    "gvp_p2d": "{name: gvp, patch_size: 4, variant: p2d, num_groups: 4, vocabulary_size: 12,"
    " tokenizer: VQGAN}",
    "mae_token": "{name: mae, patch_size: 4, normalize_targets: false,"
    " decoder: {num_layers: 1, hidden_size: 16, num_attention_heads: 4}}",
    "mp3_token": "{name: mp3, patch_size: 4, given_ratio: 0.1, initial_deviation: 0.1}",
}
PAPERS = {
    **{
        name: (small.objective, small.model, small.rest)
        for name, small in SMALL.items()
        if not name.startswith(("compose", "vae"))
    },
    **{name: (objective, "", "") for name, objective in MORE.items()},
}
POSITIONS = {"mp3_token": "positions: learned"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    run = str(write_untrained_run(tmp_path_factory.mktemp("vqgan")))
    return {
        "VQGAN": run,
        "TOKENIZER": run,
        "VAE": import_golden(tmp_path_factory.mktemp("vae"), "vae"),
    }


def read(name, runs, folder):
    objective, model, rest = PAPERS[name]
    for word, run in runs.items():
        objective = objective.replace(word, run)
    keys = yaml.safe_load(f"{{{model or POSITIONS.get(name, '')}}}")
    path = folder / "paper.yaml"
    path.write_text(f"{tiny(objective, model={**VIT, **keys})}\n{rest}\n")
    words = ["data.validation=held", "training.validate_every=1"] if rest else []
    return load_config(path, words).config


def batch_for(objective):
    tokens = objective.backbone.reads
    if isinstance(objective, Segmentation):
        return batch_of(torch.stack([photographs(4, 16), photographs(4, 16) % 6], dim=1))
    if objective.backbone.condition.reads_images:
        return batch_of(photographs(4, 16))
    shape, kind = (4, *tokens.sample_shape), tokens.sample_type
    generator = torch.Generator().manual_seed(0)
    if kind == torch.uint8:
        return batch_of(photographs(4, shape[1]))
    if kind == torch.int64:
        return batch_of(torch.randint(12, shape, generator=generator))
    return batch_of(torch.rand(shape, generator=generator).to(kind))


def measured(config, context):
    """Return initial weights, inputs, loss, gradients and features."""
    objective = build_objective(config, context)
    plans = objective.layer_plans()
    layers = LocalLayers(plans, list(LayerStack(plans, objective.loss).layers))
    batch = batch_for(objective)
    found = {name: p.detach().clone() for name, p in layers.named_parameters()}
    sequence = objective.training_sequence(batch)
    found |= {f"input {i}": each for i, each in enumerate(sequence.inputs)}
    found |= {f"target {i}": each for i, each in enumerate(sequence.targets)}
    state = sequence.inputs
    for layer in layers.modules:
        state = layer(state)
    found["loss"] = objective.loss(state, sequence.targets)
    found["loss"].backward()
    found |= {f"d {name}": p.grad for name, p in layers.named_parameters() if p.grad is not None}
    tuned = isinstance(objective, Segmentation)
    features = sequence.inputs if tuned else objective.backbone.feature_inputs(batch)
    found |= {f"feature input {i}": each for i, each in enumerate(features)}
    found["flops"] = torch.tensor(objective.flops_per_image())
    return found


@pytest.mark.parametrize("name", list(PAPERS))
def test_words_compute_the_same_bits(name, runs, tmp_path, context):
    config = read(name, runs, tmp_path)
    written = written_out(config)
    path = tmp_path / "words.yaml"
    path.write_text(dump_config(written))
    assert load_config(path).config == written
    own, other = measured(config, context), measured(written, context)
    assert list(own) == list(other)
    for key, value in own.items():
        assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("name", list(PAPERS))
def test_words_plan_alike(name, runs, tmp_path, context):
    config = read(name, runs, tmp_path)
    own, other = (
        shape_of(build_objective(each, context), {}) for each in (config, written_out(config))
    )
    assert own == other


def samples(config, context, folder):
    """Return tokens that small random weights generate; None where a model generates none."""
    if config.finetune or config.objective.cannot_generate(config) is not None:
        return None
    objective = build_objective(config, context)
    plans = objective.layer_plans()
    layers = LocalLayers(plans, list(LayerStack(plans, objective.loss).layers))
    torch.manual_seed(0)
    for _, parameter in layers.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    sampler = Sampler(Inference(layers, context), objective, folder, seed=3)
    images, given = torch.arange(2), None
    examples = batch_of(batch_for(objective).inputs[:2])
    conditions = sampler.model.condition.defaults(2, examples)
    if sampler.model.schedule.needs_given:
        tokens = sampler.model.tokens_of(examples.inputs)
        given = sampler.model.given(tokens)[:, :8]
    return sampler.tokens(images, conditions=conditions, given=given)


@pytest.mark.parametrize("name", list(PAPERS))
def test_words_generate_alike(name, runs, tmp_path, context):
    config = read(name, runs, tmp_path)
    if "sampling_steps" in type(config.objective).model_fields:
        # 1,000 by default, which take a minute.
        objective = config.objective.model_copy(update={"sampling_steps": 5})
        config = config.model_copy(update={"objective": objective})
    own, other = (samples(each, context, tmp_path) for each in (config, written_out(config)))
    assert (own is None) == (other is None)
    assert own is None or torch.equal(own, other)


def test_autoencoders_have_no_words(tmp_path):
    with pytest.raises(UserError, match="vae is an autoencoder"):
        written_out(load_config(PRESETS / "givt/vae.yaml").config)
