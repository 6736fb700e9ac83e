"""Devices and networks of a cluster, by name or from the user's YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from megavis.config.errors import UserError
from megavis.config.schema import Section
from megavis.config.yaml_tree import ConfigSource, read_tree
from megavis.model.flops import PEAKS, mixed_peak
from megavis.planning.host_time import Measured

Amount = Annotated[float, Field(gt=0, strict=False)]

NETWORKS: Mapping[str, float] = {"100ge": 12.5, "hdr": 25.0, "ndr": 50.0}
"""GB/s per port and direction: 100 Gbit/s Ethernet, InfiniBand HDR and NDR."""


class Device(Section):
    """Peak rates of one GPU and its links, per direction."""

    name: str
    memory_gb: Amount
    """Memory in 10⁹ bytes."""
    bf16_tflops: Amount
    """Dense peak, for fp16 too."""
    fp8_tflops: Amount | None = None
    """Dense peak; None if the device has no FP8."""
    float32_tflops: Amount
    """Peak without TensorFloat-32; plans ignore `training.tf32`."""
    memory_gb_per_s: Amount
    """Bandwidth of the device's memory."""
    node_gb_per_s: Amount
    """Bandwidth to the other GPUs of the node."""
    network_gb_per_s: Amount
    """Bandwidth to other nodes: this GPU's share of the node's network."""


# Vendor's data sheets of A100 80 GB SXM, H100 SXM and H200 SXM, which give NVLink for both
# directions. Networks: one HDR port per GPU as in DGX A100, one NDR port as in DGX H100 and H200.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="a100",
            memory_gb=80,
            bf16_tflops=PEAKS["A100"].bf16,
            float32_tflops=19.5,
            memory_gb_per_s=2039,
            node_gb_per_s=300,
            network_gb_per_s=25,
        ),
        Device(
            name="h100",
            memory_gb=80,
            bf16_tflops=PEAKS["H100"].bf16,
            fp8_tflops=PEAKS["H100"].fp8,
            float32_tflops=67,
            memory_gb_per_s=3350,
            node_gb_per_s=450,
            network_gb_per_s=50,
        ),
        Device(
            name="h200",
            memory_gb=141,
            bf16_tflops=PEAKS["H200"].bf16,
            fp8_tflops=PEAKS["H200"].fp8,
            float32_tflops=67,
            memory_gb_per_s=4800,
            node_gb_per_s=450,
            network_gb_per_s=50,
        ),
    )
}


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes; `measured`: by `gpu_check` on one of them."""

    device: Device
    num_devices: int
    devices_per_node: int
    measured: Measured | None = None

    @property
    def usable_memory(self) -> float:
        """Usable bytes per device; a tenth is left for CUDA's context, NCCL and fragmentation."""
        return 0.9e9 * self.device.memory_gb

    def peak(self, number_size: int, fp8_share: float = 0.0) -> float:
        """Return the peak FLOP/s for elements of `number_size` bytes, or for a share in FP8.

        Raises:
            UserError: the device has no FP8.
        """
        device = self.device
        plain = device.float32_tflops if number_size == 4 else device.bf16_tflops
        if not fp8_share:
            return 1e12 * plain
        if device.fp8_tflops is None:
            text = f"{device.name} has no FP8 (fp8_tflops); use false, or another --gpu"
            raise UserError(text, key="training.fp8")
        return 1e12 * mixed_peak(plain, device.fp8_tflops, fp8_share)


def open_device(name: str, *, memory: str | None = None, interconnect: str | None = None) -> Device:
    """Return a device of `DEVICES`, or from a YAML file with the keys of `Device`.

    Args:
        name: name of the device or the file.
        memory: memory, for example `80GB`; default: the device's own.
        interconnect: name in `NETWORKS`, or GB/s per GPU; default: the device's own.

    Raises:
        UserError: the device is unknown, or a value is invalid.
    """
    device = DEVICES.get(name.lower()) or _read_device(Path(name))
    changes: dict[str, float] = {}
    if memory is not None:
        changes["memory_gb"] = _number(memory, "--gpu-memory", "80GB")
    if interconnect is not None:
        changes["network_gb_per_s"] = NETWORKS.get(interconnect.lower()) or _number(
            interconnect, "--interconnect", f"{', '.join(NETWORKS)}, or GB/s per GPU such as 25"
        )
    return device.model_copy(update=changes)


def _number(text: str, option: str, example: str) -> float:
    try:
        value = float(text.upper().removesuffix("GB"))
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"{option}: {text!r} is not a valid amount; use for example {example}")
    return value


def _read_device(path: Path) -> Device:
    if path.suffix not in (".yaml", ".yml"):
        known = ", ".join(DEVICES)
        raise UserError(f"--gpu: {path} is not a known GPU; use {known}, or a YAML file")
    source = ConfigSource(str(path))
    tree = read_tree(path, source)
    try:
        return Device.model_validate(tree)
    except ValidationError as error:
        complaints = [
            (".".join(map(str, fault["loc"])) or "name", fault["msg"]) for fault in error.errors()
        ]
        raise source.error(complaints) from None
