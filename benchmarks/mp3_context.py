"""Cost of MP3 by mask ratio, compared with MAE of the same size and a full ViT (MP3, table 2).

    OMP_NUM_THREADS=2 python -m benchmarks.mp3_context

One step each, forward, backward and AdamW, on random patches at ViT-B's size: MP3 computes keys and
values for 1 - η of the patches; MAE runs its encoder on 1 - η of them and a decoder of 8 blocks of
width 512 on all; the full ViT is MP3's network with full attention. All use the same blocks.
Memory is that of storages saved by autograd, without weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import parser, report, summary, take_turns

RATIOS = (0.3, 0.5, 0.75, 0.9)


def open_objective(options: Any, mask_ratio: float) -> Any:
    """Return MP3 in the size of the options."""
    from megavis.config.load import load_config
    from megavis.papers import OBJECTIVES
    from megavis.parallel.context import current_context, open_context
    from megavis.parallel.launch import read_launch

    words = [
        f"model.num_layers={options.layers}",
        f"model.hidden_size={options.width}",
        f"model.num_attention_heads={options.width // 64}",
        "model.drop_path=0.0",
        f"objective.mask_ratio={mask_ratio}",
        f"training.batch_size={options.batch_size}",
        "training.precision=float32",
    ]
    path = "yaml_configs/mp3/vit_b_imagenet.yaml"
    config = load_config(path, words).config
    context = current_context() or open_context(read_launch({}), device="cpu")
    return OBJECTIVES["mp3"](config, context)


class MAE(nn.Module):
    """Masked autoencoder: encoder on visible patches, light decoder on all ("MAE", section 3)."""

    def __init__(self, objective: Any, mask_ratio: float) -> None:
        super().__init__()
        from megavis.model.core import Block
        from megavis.model.embeddings import LastNorm, ReplicatedLinear

        core = objective.core.with_stack(visibility_kind="full", carried_names=())
        size = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 16}
        decoder = core.with_stack(name="decoder", model=core.model.model_copy(update=size))
        wide, self.count = core.model.hidden_size, objective.num_places
        self.kept = objective.num_context(mask_ratio)
        numbers = 3 * objective.paper.patch_size**2
        self.embed, self.to_decoder = ReplicatedLinear(numbers, wide), nn.Linear(wide, 512)
        self.token, self.mask = nn.Parameter(torch.zeros(wide)), nn.Parameter(torch.zeros(512))
        self.places = nn.Parameter(torch.zeros(self.count, wide))
        self.decoder_places = nn.Parameter(torch.zeros(self.count + 1, 512))
        layers = core.model.num_layers
        self.encoder = nn.ModuleList(Block(core, i + 1) for i in range(layers))
        self.decoder = nn.ModuleList(Block(decoder, i + 1) for i in range(8))
        self.norm, self.last_norm = LastNorm(core), LastNorm(decoder)
        self.pixels = nn.Linear(512, numbers)

    def forward(self, patches: Tensor) -> Tensor:
        """Return the squared error on hidden patches of `[b, n, d]`."""
        batch = len(patches)
        order = torch.rand(batch, self.count).argsort(1)
        kept, places = order[:, : self.kept], order.argsort(1)
        hidden = self.embed(patches) + self.places
        hidden = hidden.gather(1, kept[..., None].expand(-1, -1, hidden.shape[-1]))
        hidden = torch.cat([self.token.expand(batch, 1, -1), hidden], dim=1).transpose(0, 1)
        for block in self.encoder:
            hidden = block(hidden.contiguous())
        seen = self.to_decoder(self.norm.whole(hidden))
        masks = self.mask.expand(batch, self.count - self.kept, -1)
        every = torch.cat([seen[:, 1:], masks], dim=1)
        every = every.gather(1, places[..., None].expand(-1, -1, 512))
        every = torch.cat([seen[:, :1], every], dim=1) + self.decoder_places
        hidden = every.transpose(0, 1)
        for block in self.decoder:
            hidden = block(hidden.contiguous())
        made = self.pixels(self.last_norm.whole(hidden)[:, 1:])
        errors = (made - patches).square().mean(-1)
        hidden_ones = (places >= self.kept).float()
        return (errors * hidden_ones).sum() / hidden_ones.sum()


def mp3_loss(options: Any, mask_ratio: float, *, full: bool = False) -> tuple[nn.Module, Any]:
    """Return MP3's network and a function that returns its loss."""
    from megavis.model.stack import LayerStack

    objective = open_objective(options, mask_ratio)
    if full:
        objective.core = objective.core.with_stack(visibility_kind="full")
    network = LayerStack(objective.layer_plans(), objective.loss)
    size = objective.config.data.image_size
    images = torch.randint(256, (options.batch_size, size, size, 3), dtype=torch.uint8)
    inputs = objective.inputs_from(images, sample_index=torch.arange(options.batch_size))
    places = torch.arange(objective.num_places).expand(options.batch_size, -1).contiguous()
    return network, lambda: network(inputs, (places,))


def mae_loss(options: Any, mask_ratio: float) -> tuple[nn.Module, Any]:
    """Return MAE and a function that returns its loss."""
    objective = open_objective(options, mask_ratio)
    network = MAE(objective, mask_ratio)
    numbers = 3 * objective.paper.patch_size**2
    patches = torch.randn(options.batch_size, objective.num_places, numbers)
    return network, lambda: network(patches)


def step_of(network: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a function that takes one step."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def kept_bytes(network: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Return the bytes that autograd saves in a forward pass, without weights."""
    sizes = {parameter.untyped_storage().data_ptr(): 0 for parameter in network.parameters()}
    alive = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        alive.append(storage)  # so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(sizes.values())


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--width", type=int, default=768, help="a multiple of 64")
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--batch-size", type=int, default=2)
    arguments.add_argument("--only-mp3", action="store_true", help="only MP3 with η = 0 and 0.75")
    options = arguments.parse_args()
    torch.manual_seed(0)
    if options.only_mp3:
        contestants = {f"MP3 {ratio}": mp3_loss(options, ratio) for ratio in (0.0, 0.75)}
    else:
        contestants = {f"MP3 {ratio}": mp3_loss(options, ratio) for ratio in (0.0, *RATIOS)}
        contestants |= {f"MAE {ratio}": mae_loss(options, ratio) for ratio in RATIOS}
        contestants["full ViT"] = mp3_loss(options, 0.0, full=True)
    kept = {name: kept_bytes(*pair) for name, pair in contestants.items()}
    steps = {name: step_of(*pair) for name, pair in contestants.items()}
    rows = summary(take_turns(steps, rounds=options.rounds), against="MP3 0.75")
    report(
        [{**row, "kept_mb": kept[row["name"]] / 1e6} for row in rows],
        options.json,
        width=options.width,
        layers=options.layers,
        batch=options.batch_size,
    )


if __name__ == "__main__":
    main()
