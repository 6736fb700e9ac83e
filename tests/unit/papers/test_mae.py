"""MAE against `transformers.ViTMAEForPreTraining` with the same weights and masks."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from small_batches import batch_of, photographs, run_layers
from tiny import VIT, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import ViTMAEConfig, ViTMAEForPreTraining
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

from megavis.config.errors import UserError
from megavis.model.attention import join_heads
from megavis.model.parameters import starts_fresh
from megavis.model.positions import Positions
from megavis.tokenizers.patches import standardize
from megavis.weights.tables import write_table
from megavis.weights.vit_mae import sines, vit_mae_settings, vit_mae_table

CONFIG = tiny(
    "{name: mae, patch_size: 4, decoder: {num_layers: 2, hidden_size: 16, num_attention_heads: 2}}",
    model={**VIT, "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4},
)
WIDTH, UPPER, PATCHES = 32, 16, 16


@pytest.fixture
def make(build_paper):
    """Build a model of sixteen patches, four of them visible."""
    return lambda *words, **options: build_paper(CONFIG, *words, std=0.1, **options)


def reference(normalize=True):
    """Return the `transformers` model with random weights and MAE's fixed positions."""
    config = ViTMAEConfig(
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        layer_norm_eps=1e-6,
        image_size=16,
        patch_size=4,
        decoder_hidden_size=UPPER,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=4 * UPPER,
        mask_ratio=0.75,
        norm_pix_loss=normalize,
        attn_implementation="eager",
    )
    model = ViTMAEForPreTraining(config).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        model.vit.embeddings.position_embeddings.copy_(fixed_positions(WIDTH))
        model.decoder.decoder_pos_embed.copy_(fixed_positions(UPPER))
    return model


def fixed_positions(width):
    """Return the positions of MAE's released code, whose first half encodes the column."""
    rows_first = build_2d_sinusoidal_position_embedding(4, 4, width, cls_token=True)
    return rows_first.roll(width // 2, dims=1)


NAMES = {
    "input_layernorm": "layernorm_before",
    "pre_mlp_layernorm": "layernorm_after",
    "self_attention.linear_proj": "attention.o_proj",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
    "bridge.norm": "vit.layernorm",
    "bridge.linear": "decoder.decoder_embed",
    "bridge.mask": "decoder.mask_token",
    "head.norm": "decoder.decoder_norm",
    "head.linear": "decoder.decoder_pred",
    "embedding.front": "vit.embeddings.cls_token",
}


def counterparts(name):
    """Return the `transformers` names of a parameter: three for the fused projection."""
    if name.startswith("embedding.content"):
        return [name.replace("embedding.content", "vit.embeddings.patch_embeddings.projection")]
    name = name.replace("decoder.", "decoder.decoder_layers.").replace("blocks.", "vit.layers.")
    for own, other in NAMES.items():
        name = name.replace(own, other)
    if "linear_qkv" not in name:
        return [name]
    return [name.replace("self_attention.linear_qkv", f"attention.{part}_proj") for part in "qkv"]


def in_our_form(name, tensors):
    """Convert a weight or gradient of `transformers` to megavis' layout."""
    if len(tensors) == 3:
        return join_heads(*tensors, 4 if name.startswith("blocks") else 2)
    [tensor] = tensors
    # A convolution kernel is channels-first, a patch channels-last.
    return tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor


def paired(layers, theirs):
    """Pair each parameter with those of `transformers`; check that every one of them is used."""
    named = dict(theirs.named_parameters())
    pairs = {
        name: (parameter, [named.pop(other) for other in counterparts(name)])
        for name, parameter in layers.named_parameters()
    }
    assert set(named) == {"vit.embeddings.position_embeddings", "decoder.decoder_pos_embed"}
    return pairs


def copy_weights(layers, theirs):
    """Copy the weights of `transformers` to these layers."""
    with torch.no_grad():
        for name, (parameter, others) in paired(layers, theirs).items():
            parameter.copy_(in_our_form(name, others).reshape(parameter.shape))


def run_both(objective, inference, theirs, batch):
    """Return megavis' loss and the output of `transformers` for the same images and masks."""
    images = standardize(batch.inputs).permute(0, 3, 1, 2)
    # `transformers` takes the argsort of the noise as its order.
    noise = objective.schedule.draw(batch.sample_index).order.argsort(1).float()
    sequence = objective.training_sequence(batch)
    predictions = run_layers(inference.layers.modules, sequence.inputs)
    return objective.loss(predictions, sequence.targets), theirs(pixel_values=images, noise=noise)


@pytest.mark.parametrize("normalize", [True, False])
def test_loss_and_gradient_match_transformers(make, normalize):
    objective, inference = make(f"objective.normalize_targets={str(normalize).lower()}")
    theirs = reference(normalize)
    copy_weights(inference.layers, theirs)
    loss, output = run_both(objective, inference, theirs, batch_of(photographs(3, 16), first=5))
    assert output.mask.sum() == 3 * 12
    torch.testing.assert_close(loss, output.loss, rtol=1e-5, atol=0)
    loss.backward()
    output.loss.backward()
    for name, (parameter, others) in paired(inference.layers, theirs).items():
        expected = in_our_form(name, [other.grad for other in others])
        torch.testing.assert_close(
            parameter.grad, expected.reshape(parameter.shape), rtol=1e-4, atol=1e-6, msg=name
        )


def test_encoder_matches_transformers(make):
    objective, inference = make()
    theirs, batch = reference(), batch_of(photographs(3, 16), first=5)
    copy_weights(inference.layers, theirs)
    seen = {}
    bridge = inference.layers.modules[4]
    bridge.norm.register_forward_hook(lambda _, __, out: seen.update(ours=out))
    theirs.vit.layernorm.register_forward_hook(lambda _, __, out: seen.update(theirs=out))
    run_both(objective, inference, theirs, batch)
    assert seen["theirs"].shape == (3, 5, WIDTH)
    torch.testing.assert_close(seen["ours"].transpose(0, 1), seen["theirs"], rtol=1e-5, atol=1e-5)


def test_features_match_unmasked_transformers(make):
    objective, inference = make()
    theirs, batch = reference(), batch_of(photographs(3, 16))
    copy_weights(inference.layers, theirs)
    theirs.config.mask_ratio = 0.0
    with torch.no_grad():
        images = standardize(batch.inputs).permute(0, 3, 1, 2)
        expected = theirs.vit(images, noise=torch.arange(16.0).expand(3, -1)).last_hidden_state
    for layer in inference.layers.modules[5:]:
        layer.register_forward_hook(lambda *_: pytest.fail("features must not run the decoder"))
    features = inference.features(objective.backbone.feature_inputs(batch))
    assert features.shape == (4, 3, WIDTH)
    torch.testing.assert_close(features[-1], expected.mean(1), rtol=1e-5, atol=1e-5)


def test_fine_tuning_drops_the_decoder(make):
    words = ["finetune.num_classes=3", "finetune.layer_decay=0.5", "finetune.read_out=first"]
    objective, inference = make(*words, "data.validation=shards", "training.validate_every=1")
    plans = objective.layer_plans()
    names = ["embedding", "blocks.0", "blocks.1", "blocks.2", "bridge"]
    assert [plan.name for plan in plans] == names
    assert [plan.options.learning_rate_scale for plan in plans] == [0.5**4, 0.5**3, 0.5**2, 0.5, 1]
    batch = batch_of(photographs(3, 16))
    logits = inference.predictions(objective.sequence(batch).inputs)
    _, pretrained = make()
    weights = dict(inference.layers.named_parameters())
    with torch.no_grad():
        for name, parameter in pretrained.layers.named_parameters():
            if name in weights:
                parameter.copy_(weights.pop(name))
    assert set(weights) == {f"bridge.classifier.linear.{kind}" for kind in ("weight", "bias")}
    kept = {}
    bridge = pretrained.layers.modules[4]
    bridge.norm.register_forward_hook(lambda _, __, out: kept.update(out=out))
    pretrained.features(objective.backbone.feature_inputs(batch))
    classifier = inference.layers.modules[4].classifier.linear
    torch.testing.assert_close(logits, classifier(kept["out"][0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 2 / 3])
def test_learned_positions_start_as_the_fixed_ones(scale):
    """As `pos_embed` in the released fine-tuning code; a loop over cells and channels."""
    positions = Positions(
        "learned_sincos", height=3, width=3, hidden_size=16, fill=torch.nn.init.ones_, scale=scale
    )
    assert positions.weight.requires_grad
    for cell in range(9):
        expected = []
        for coordinate in (cell % 3, cell // 3):
            angles = [scale * coordinate / 10_000 ** (i / 4) for i in range(4)]
            expected += [math.sin(x) for x in angles] + [math.cos(x) for x in angles]
        assert positions.weight[cell].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("tuned", [0, 1, 2, 3])
def test_partial_fine_tuning_trains_the_last_blocks(make, tuned):
    """Section 4.3; 0 trains the last norm besides the classifier."""
    words = ["finetune.num_classes=3", "data.validation=shards", "training.validate_every=1"]
    objective, inference = make(
        *words, f"finetune.tuned_blocks={tuned}", "model.positions=learned_sincos"
    )
    trained = {n for n, p in inference.layers.named_parameters() if p.requires_grad}
    parts = {".".join(name.split(".")[:2]) for name in trained}
    expected = {f"blocks.{number}" for number in range(3 - tuned, 3)}
    assert parts == expected | {"bridge.norm", "bridge.classifier"}
    classifier = inference.layers.modules[-1].classifier.linear
    torch.nn.init.normal_(classifier.weight)
    batch = batch_of(photographs(3, 16))
    sequence = objective.training_sequence(batch)
    loss = objective.loss(run_layers(inference.layers.modules, sequence.inputs), (batch.labels,))
    loss.backward()
    for name, parameter in inference.layers.named_parameters():
        assert (parameter.grad is not None) == (name in trained), name


def test_fine_tuning_trains_positions_that_the_source_lacks(make):
    words = ["finetune.num_classes=3", "data.validation=shards", "training.validate_every=1"]
    _, inference = make(*words, "model.positions=learned_sincos")
    parameters = dict(inference.layers.named_parameters())
    assert starts_fresh(parameters["embedding.positions.weight"], is_saved=False)
    assert not starts_fresh(parameters["embedding.front"], is_saved=True)


def test_flops_match_torch_counter(make):
    objective, inference = make()
    sequence = objective.sequence(batch_of(photographs(2, 16)))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run_layers(inference.layers.modules, sequence.inputs)
    # flops_per_image leaves out the patch embedding.
    embedded = 2 * 2 * 4 * 48 * WIDTH
    planned = 2 * objective.flops_per_image() / 3 + embedded
    assert planned == pytest.approx(counter.get_total_flops(), rel=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.patch_size=5"], "5 does not divide data.image_size 16"),
        (["model.positions=rope_2d"], "rope_2d does not reach the decoder"),
        (
            ["objective.mask_shape=grid", "objective.mask_ratio=0.5"],
            "objective.mask_ratio: 0.5 is not what objective.mask_shape grid hides; set it to 0.75",
        ),
        (
            ["objective.mask_shape=grid", "data.image_size=12"],
            "grid needs even sides, and an image has 3 × 3 tokens",
        ),
        (["objective.decoder.hidden_size=18"], "18 is not divisible by 4"),
        (["objective.decoder.num_attention_heads=3"], "num_attention_heads 3"),
        (
            ["parallel.tensor_model_parallel_size=4"],
            "2 heads are not divisible by tensor_model_parallel_size 4",
        ),
        (
            ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
            "5 rows of the encoder and 17 of the decoder are not divisible",
        ),
        (
            ["finetune.num_classes=3", "finetune.generative_weight=1"],
            "hidden patches for the paper's own loss, and all patches for classes; set it to 0",
        ),
        (
            ["finetune.num_classes=3", "finetune.tuned_blocks=4"],
            "finetune.tuned_blocks: is 4; there are 3 blocks to train",
        ),
        (
            [
                "finetune.num_classes=3",
                "finetune.tuned_blocks=1",
                "finetune.linear_evaluation=true",
            ],
            "finetune.tuned_blocks: applies to trained layers; linear_evaluation freezes them",
        ),
        (
            ["finetune.num_classes=3", "finetune.tuned_blocks=1", "parallel.zero_stage=3"],
            "parallel.zero_stage: must be 2 or less for finetune.tuned_blocks",
        ),
        (
            [
                *("finetune.num_classes=3", "finetune.tuned_blocks=1"),
                "parallel.activation_checkpointing=full",
            ],
            "parallel.activation_checkpointing: must be none for finetune.tuned_blocks",
        ),
    ],
)
def test_incompatible_keys(make, words, message):
    with pytest.raises(UserError, match=message):
        make(*words)


def test_fine_tuning_splits_the_tokens_of_the_encoder_alone(make):
    """Without mask tokens and decoder, all 16 patches are split over two processes."""
    tuned = ["finetune.num_classes=3", "data.validation=held", "training.validate_every=1"]
    split = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    without = [*split, "objective.class_token=false", "objective.mask_ratio=0.65"]
    with pytest.raises(UserError, match="5 rows of the encoder and 16 of the decoder"):
        make(*without)
    make(*tuned, *without)
    with pytest.raises(UserError, match="17 rows are not divisible"):
        make(*tuned, *split)


def test_export_keeps_scaled_positions(make, tmp_path):
    objective, inference = make("model.position_scale=0.5")
    weights = {name: weight.detach() for name, weight in inference.layers.named_parameters()}
    images, index = photographs(2, 16), torch.arange(2)
    ours = objective.outputs(
        inference.predictions(objective.inputs_from(images, sample_index=index))
    )
    settings, order = vit_mae_settings(objective.config), objective.schedule.draw(index).order
    tensors = write_table(vit_mae_table(settings), {**sines(settings, 0.5), **weights})
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    network = ViTMAEForPreTraining.from_pretrained(tmp_path).eval()
    pixels, noise = standardize(images).permute(0, 3, 1, 2), order.argsort(1).float()
    with torch.no_grad():
        theirs = network(pixels.contiguous(), noise=noise).logits
    hidden = order[:, -ours.shape[1] :, None]
    torch.testing.assert_close(ours, theirs.take_along_dim(hidden, 1), rtol=1e-4, atol=1e-4)
