"""iGPT against the `ImageGPTForCausalImageModeling` of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.comparison import Ours, Peer, Result, batches, compare
from benchmarks.peers.plain import adamw, cosine_rate, round_once, step_of
from benchmarks.peers.sizes import Sizes
from megavis.config.schema import ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig
from megavis.config.section import DataConfig, ParallelConfig
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import Batch
from megavis.papers.igpt.config import IGPTConfig
from megavis.parallel.context import ParallelContext
from megavis.weights.imagegpt import from_imagegpt


def config_of(sizes: Sizes, image_size: int, num_colors: int) -> RunConfig:
    """Return iGPT's recipe in the given sizes, with the biases that ImageGPT trains."""
    return RunConfig(
        name="peers_igpt",
        seed=sizes.seed,
        objective=IGPTConfig(vocabulary_size=num_colors),
        model=ModelConfig(
            num_layers=sizes.layers,
            hidden_size=sizes.width,
            num_attention_heads=sizes.heads,
            add_bias=True,
        ),
        data=DataConfig(train="", image_size=image_size),
        parallel=ParallelConfig(zero_stage=0),
        optimizer=OptimizerConfig(learning_rate=sizes.rate),
        schedule=ScheduleConfig(warmup_steps=sizes.warmup),
        training=sizes.training(),
    )


class IGPTPeer:
    """ImageGPT, whose last id is the start token."""

    def __init__(self, config: RunConfig, num_colors: int) -> None:
        import transformers

        model = config.model
        settings = transformers.ImageGPTConfig(
            vocab_size=num_colors + 1,
            n_positions=config.data.image_size**2,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_attention_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        torch.manual_seed(config.seed)
        self.model: Any = transformers.ImageGPTForCausalImageModeling(settings).train()
        self.start, self.num_heads = num_colors, model.num_attention_heads
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name.endswith("bias"):
                    # The conversion drops biases if all are 0.
                    parameter.normal_(std=0.02)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the pixels in nats."""
        ids = batch.inputs.long()
        before = F.pad(ids[:, :-1], (1, 0), value=self.start)
        logits = self.model(input_ids=before, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under megavis' names."""
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        return from_imagegpt(tensors, num_heads=self.num_heads)

    def loop(self, sizes: Sizes) -> Peer:
        """Return the loop that trains the model; nothing decays."""
        group = {"params": [*self.model.parameters()], "weight_decay": 0.0}
        optimizer = adamw([group], rate=sizes.rate)

        def set_rates(step: int) -> None:
            rate = cosine_rate(step, peak=sizes.rate, warmup=sizes.warmup, steps=sizes.steps)
            optimizer.param_groups[0]["lr"] = rate

        return Peer(step_of(optimizer, set_rates, self.loss), self.weights)


def run(sizes: Sizes, folder: Path, context: ParallelContext) -> Result:
    """Compare on palette shards of any size and number of colours."""
    dataset = ShardDataset(folder)
    manifest = dataset.manifest
    assert manifest.image_size is not None
    assert manifest.tokenizer is not None
    num_colors = manifest.tokenizer.num_tokens
    assert num_colors is not None
    config = config_of(sizes, manifest.image_size, num_colors)
    ours = Ours(config, context)
    peers = [IGPTPeer(config, num_colors) for _ in range(1 + sizes.control)]
    ours.start_from(peers[0].weights())
    for other in peers[1:]:
        round_once(other.model)
    loops = [peer.loop(sizes) for peer in peers]
    result = Result("iGPT", "transformers ImageGPTForCausalImageModeling", sizes.batch_size)
    return compare(result, ours, loops, config, batches(config, dataset))
