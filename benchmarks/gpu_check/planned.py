"""Estimates of `megavis plan` for one GPU, to compare with measurements."""

from __future__ import annotations

import torch

from megavis.composition.model import Model
from megavis.composition.trainable import Trainable
from megavis.planning.communication import transfers
from megavis.planning.devices import DEVICES, Cluster, Device
from megavis.planning.layouts import Layout
from megavis.planning.measured_activations import activations_of_run
from megavis.planning.shape import shape_of
from megavis.planning.step_time import StepTime, step_time


def planned_device(name: str) -> Device:
    """Return the planner's device by CUDA's name of the GPU; an H100 for unknown ones."""
    known = [device for key, device in DEVICES.items() if key.upper() in name]
    return known[0] if known else DEVICES["h100"]


def planned_time(objective: Trainable, device: torch.device) -> StepTime:
    """Return the planner's estimate of a step of the objective's run on one GPU."""
    assert isinstance(objective, Model), "plans are of models with blocks"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    cluster = Cluster(planned_device(name), num_devices=1, devices_per_node=1)
    shape = shape_of(objective, activations_of_run(objective))
    layout = Layout.of(objective.config, 1)
    return step_time(shape, layout, cluster, transfers(shape, layout, 1))
