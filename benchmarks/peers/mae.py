"""MAE against the `ViTMAEForPreTraining` of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.comparison import Ours, Peer, Result, batches, compare
from benchmarks.peers.plain import adamw, cosine_rate, decay_matrices, pixels, round_once, step_of
from benchmarks.peers.sizes import Sizes
from megavis.composition.model import Model
from megavis.config.schema import ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig
from megavis.config.section import DataConfig, ParallelConfig
from megavis.data.codecs.transforms import training_transform
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import Batch
from megavis.papers.mae.config import DecoderConfig, MAEConfig
from megavis.parallel.context import ParallelContext
from megavis.weights.vit_mae import from_vit_mae, vit_mae_settings
from megavis.weights.vits import with_older_names

WEIGHT_DECAY = 0.05


def config_of(sizes: Sizes) -> RunConfig:
    """Return MAE's recipe in the given sizes: crops, flips, targets normalised for each patch."""
    return RunConfig(
        name="peers_mae",
        seed=sizes.seed,
        objective=MAEConfig(
            patch_size=sizes.patch_size,
            normalize_targets=True,
            decoder=DecoderConfig(
                num_layers=sizes.decoder_layers,
                hidden_size=sizes.decoder_width,
                num_attention_heads=sizes.decoder_heads,
            ),
        ),
        model=ModelConfig(
            num_layers=sizes.layers,
            hidden_size=sizes.width,
            num_attention_heads=sizes.heads,
            normalization="layer_norm",
            norm_epsilon=1e-6,
            activation="gelu",
            add_bias=True,
        ),
        data=DataConfig(train="", image_size=sizes.image_size, crop="random_resized", flip=True),
        parallel=ParallelConfig(zero_stage=0),
        optimizer=OptimizerConfig(learning_rate=sizes.rate, weight_decay=WEIGHT_DECAY),
        schedule=ScheduleConfig(warmup_steps=sizes.warmup),
        training=sizes.training(),
    )


def positions(side: int, width: int) -> Tensor:
    """Return the positions of MAE's released code: 0, then `[side², width]`, the column first."""
    from transformers.models.vit_mae.modeling_vit_mae import (
        build_2d_sinusoidal_position_embedding as rows_first,
    )

    return rows_first(side, side, width, cls_token=True).roll(width // 2, dims=1)


class MAEPeer:
    """`ViTMAEForPreTraining`, which gets the order of the patches as its noise."""

    def __init__(self, config: RunConfig, paper: Model) -> None:
        import transformers

        self.paper, self.settings = paper, vit_mae_settings(config)
        torch.manual_seed(config.seed)
        self.model: Any = transformers.ViTMAEForPreTraining(
            transformers.ViTMAEConfig(**self.settings)
        ).train()
        side = config.data.image_size // self.settings["patch_size"]
        # A model that transformers builds from a config has zeros in both, and never trains them.
        with torch.no_grad():
            for table in (
                self.model.vit.embeddings.position_embeddings,
                self.model.decoder.decoder_pos_embed,
            ):
                table.copy_(positions(side, table.shape[-1]))

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean squared error of the hidden patches."""
        order = self.paper.schedule.draw(batch.sample_index).order
        # It sorts the noise and keeps the first patches.
        ranks = torch.arange(0.0, order.shape[1]).expand(order.shape)
        noise = torch.empty(order.shape).scatter_(1, order, ranks)
        return self.model(pixels(batch.inputs), noise=noise).loss

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under megavis' names."""
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        return from_vit_mae(with_older_names(tensors), self.settings)

    def loop(self, sizes: Sizes) -> Peer:
        """Return the loop that trains the model."""
        optimizer = adamw(decay_matrices(self.model, WEIGHT_DECAY), rate=sizes.rate)

        def set_rates(step: int) -> None:
            rate = cosine_rate(step, peak=sizes.rate, warmup=sizes.warmup, steps=sizes.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate

        return Peer(step_of(optimizer, set_rates, self.loss), self.weights)


def run(sizes: Sizes, folder: Path, context: ParallelContext) -> Result:
    """Compare on shards of JPEG files."""
    config = config_of(sizes)
    dataset = ShardDataset(folder, training_transform(config.data, seed=config.seed))
    ours = Ours(config, context)
    paper = ours.objective.backbone
    assert isinstance(paper, Model)
    peers = [MAEPeer(config, paper) for _ in range(1 + sizes.control)]
    ours.start_from(peers[0].weights())
    for other in peers[1:]:
        round_once(other.model)
    loops = [peer.loop(sizes) for peer in peers]
    result = Result("MAE", "transformers ViTMAEForPreTraining", sizes.batch_size)
    return compare(result, ours, loops, config, batches(config, dataset))
