"""Frozen networks that encode images, in plans against a pass of the real ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import small_vqgan
import torch
import vae_config
from latent_shards import write_latent_shards
from torch.utils.flop_counter import FlopCounterMode

from megavis.composition.tokens import blank_batch
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.papers import build_objective
from megavis.planning.activation_memory import activation_memory
from megavis.planning.data_rates import encodes_images
from megavis.planning.devices import Cluster, open_device
from megavis.planning.frozen_networks import frozen_networks
from megavis.planning.layouts import Layout, layout_key
from megavis.planning.measured_activations import activations_of
from megavis.planning.meta_device import LiveStorages
from megavis.planning.plan import plan_layout
from megavis.planning.shape import shape_of

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[3] / "yaml_configs"
IMAGES = 4
SMALL = ["data.image_size=16", "model.num_layers=2"]
VAE = [*SMALL, "objective.latent_channels=4", "objective.downsampling=4"]
VQGAN = [*SMALL, "objective.patch_size=4"]
IDS = [*VQGAN, "objective.vocabulary_size=12"]
# Preset, network and keys; the mean of features is a condition.
NETWORKS = {
    "latents": ("givt/demo", vae_config, VAE),
    "ids in and out": ("gvp/demo_d2d", small_vqgan, IDS),
    "ids out": ("gvp/demo", small_vqgan, [*IDS, "objective.variant=p2d"]),
    "features": (
        "gvp/vit_b_p2p",
        small_vqgan,
        [*VQGAN, "objective.condition_size=4", "objective.num_groups=4"],
    ),
}


def config_of(name, folder):
    preset, network, words = NETWORKS[name]
    run = network.write_untrained_run(folder)
    return load_config(PRESETS / f"{preset}.yaml", [*words, f"objective.tokenizer={run}"]).config


@pytest.mark.parametrize("name", NETWORKS)
def test_counts_are_those_of_a_real_pass(name, context, tmp_path):
    objective = build_objective(config_of(name, tmp_path), context)
    (counted,), missing = frozen_networks(objective.frozen_encoders)
    assert missing == ()
    batch = blank_batch(IMAGES, (16, 16, 3), torch.uint8, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        objective.training_sequence(batch)
    parts = (objective.reads, objective.predicts, objective.condition)
    network = next(part.tokenizer for part in parts if part.frozen_encoder)
    encode = network.features if name == "features" else network.encode
    with LiveStorages() as live:
        encode(batch.inputs)
    tensors = [*network.parameters(), *network.buffers()]
    assert counted.weights == sum(tensor.nbytes for tensor in tensors)
    assert counted.flops == pytest.approx(counter.get_total_flops() / IMAGES, rel=0.02)
    assert counted.working == pytest.approx(live.most / IMAGES, rel=0.05)


def test_flops_of_the_papers_vae_by_hand(context):
    """Table 6 at 256²: per level two blocks of two 3×3 convolutions, with 128 to 512 channels."""
    products, before = 9 * 3 * 128 * 256**2, 128
    for side, width in zip((256, 128, 64, 32, 16), (128, 128, 256, 256, 512), strict=True):
        shortcut = width**2 if before != width else 0
        products += side**2 * (9 * (before * width + 3 * width**2) + shortcut)
        before = width
    products += 16**2 * (9 * 4 * 512**2 + 512 * 32)
    objective = build_objective(load_config(PRESETS / "givt/causal_default.yaml").config, context)
    (counted,), _ = frozen_networks(objective.frozen_encoders, [PRESETS / "givt/vae.yaml"])
    assert counted.flops == pytest.approx(2 * products)


def test_networks_add_to_memory_and_time(context, tmp_path):
    objective = build_objective(config_of("latents", tmp_path), context)
    frozen, _ = frozen_networks(objective.frozen_encoders)
    frozen = (replace(frozen[0], working=1e6),)
    ends = {layout_key(objective.config.parallel): activations_of(objective)}
    without = shape_of(objective, ends)
    shape, layout = replace(without, frozen=frozen), Layout(objective.config.parallel, 1, 64, 1)
    cluster = Cluster(open_device("h100"), 1, 1)
    plan, plain = (plan_layout(each, layout, cluster, steps=1) for each in (shape, without))
    # Images are encoded before the forward pass, so only the larger of both counts.
    activations = activation_memory(without, layout).total
    encoding = 64 * frozen[0].working
    assert encoding > activations
    assert plan.memory.activations.total == encoding
    assert plan.memory.states.total - plain.memory.states.total == frozen[0].weights
    # 70 % of the peak of float32, and of the memory's bandwidth.
    seconds = 64 * (frozen[0].flops / 46.9e12 + frozen[0].touched / 2.345e12)
    assert plan.time.device - plain.time.device == pytest.approx(seconds)


def test_stages_that_load_images_encode_them(context, tmp_path):
    """The first stage holds the activations of the micro-batches before the one it encodes."""
    config = config_of("latents", tmp_path)
    objective = build_objective(config, context)
    frozen, _ = frozen_networks(objective.frozen_encoders)
    frozen = (replace(frozen[0], working=1e6),)
    keys = {"pipeline_model_parallel_size": 2, "activation_checkpointing": "none"}
    parallel = config.parallel.model_copy(update=keys)
    ends = {layout_key(parallel): activations_of(objective)}
    shape = replace(shape_of(objective, ends), frozen=frozen)
    memory = activation_memory(shape, Layout(parallel, 1, 64, 4))
    assert (memory.in_flight, memory.encoding) == (2, 64 * frozen[0].working)
    assert memory.total == memory.saved / 2 + memory.encoding + memory.transit + memory.outputs


def test_shards_of_latents_need_no_encoder(tmp_path):
    config = load_config(PRESETS / "givt/causal_default.yaml").config
    assert encodes_images(config.data)
    write_latent_shards(tmp_path, shape=(4, 4, 4), num_classes=2, num_images=4)
    data = config.data.model_copy(update={"train": str(tmp_path)})
    assert not encodes_images(data)
    remote = data.model_copy(update={"train": f"file://{tmp_path}"})
    assert not encodes_images(remote), "shards at a URL are latents too"


def test_config_of_another_network_is_refused(context):
    objective = build_objective(load_config(PRESETS / "givt/causal_default.yaml").config, context)
    with pytest.raises(UserError, match="is the config of givt_vae_large; images are encoded by"):
        frozen_networks(objective.frozen_encoders, [PRESETS / "givt/vae_large.yaml"])


def test_two_configs_of_one_name_are_refused(context, tmp_path):
    """The second would silently replace the first."""
    objective = build_objective(load_config(PRESETS / "givt/causal_default.yaml").config, context)
    other = tmp_path / "other.yaml"
    other.write_text(f"based_on: {PRESETS}/givt/vae.yaml\n")
    with pytest.raises(UserError, match="both have the name givt_vae; give one of them"):
        frozen_networks(objective.frozen_encoders, [PRESETS / "givt/vae.yaml", other])
