"""The cost of frozen networks that encode images in each step: a VAE, or a tokenizer of ids.

They run in float32 without gradients on every process that loads images, before the passes of each
micro-batch. A network is run on the meta device, where tensors have shapes but no data; it need not
be trained yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.planning.meta_device import LiveStorages
from megavis.tokenizers.network_tokenizer import FrozenEncoder, initial_tokenizer, read_config

# Two, so that no dimension of size 1 is broadcast.
_IMAGES = 2


@dataclass(frozen=True)
class FrozenNetwork:
    """A network that encodes the images of each micro-batch, on every process that loads them.

    Attributes:
        name: run folder of the network.
        parameters: parameters of the whole network, of which training runs a part.
        weights: bytes of the parameters and buffers.
        working: peak bytes of an image's tensors in the pass.
        flops: operations for an image.
        touched: bytes of memory that the pass writes and reads for an image.
    """

    name: str
    parameters: int
    weights: int
    working: float
    flops: float
    touched: float


def frozen_networks(
    encoders: Sequence[FrozenEncoder], configs: Sequence[Path] = ()
) -> tuple[tuple[FrozenNetwork, ...], tuple[FrozenEncoder, ...]]:
    """Return the costs of encoders, and the encoders whose run does not exist.

    Args:
        configs: configs of runs that do not exist yet, found by their `name`.

    Raises:
        UserError: a config is not a tokenizer's, or not an encoder's, or two have the same name.
    """
    known: dict[str, tuple[Mapping[str, Any], Path]] = {}
    for path in configs:
        config = load_config(path).config
        if config.name in known:
            both = f"{known[config.name][1]} and {path} both have the name {config.name}"
            raise UserError(f"--tokenizer: {both}; give one of them")
        known[config.name] = (config.model_dump(mode="json"), path)
    counted, missing, used = [], [], set()
    for encoder in encoders:
        folder = Path(encoder.run_folder)
        if folder.name in known:
            used.add(folder.name)
            counted.append(_measured(encoder, *known[folder.name]))
        elif folder.exists():
            counted.append(_measured(encoder, read_config(folder), folder))
        else:
            missing.append(encoder)
    for name in sorted(set(known) - used):
        runs = ", ".join(encoder.run_folder for encoder in encoders) or "no network"
        raise UserError(
            f"--tokenizer: {known[name][1]} is the config of {name}; images are encoded by {runs}"
        )
    return tuple(counted), tuple(missing)


def _measured(encoder: FrozenEncoder, config: Mapping[str, Any], where: Path) -> FrozenNetwork:
    """Run an encoder on the meta device."""
    with torch.device("meta"):
        network = initial_tokenizer(config, where)
    network.eval()
    side = encoder.image_size
    images = torch.zeros(_IMAGES, side, side, 3, dtype=torch.uint8, device="meta")
    run = getattr(network, encoder.gives)
    with FlopCounterMode(display=False) as counter, LiveStorages() as live:
        run(images)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    held = [*network.parameters(), *network.buffers()]
    return FrozenNetwork(
        name=encoder.run_folder,
        parameters=parameters,
        weights=sum(tensor.nbytes for tensor in held),
        working=live.most / _IMAGES,
        flops=counter.get_total_flops() / _IMAGES,
        # Each tensor is written once and read by the next operation.
        touched=2 * live.made / _IMAGES,
    )
