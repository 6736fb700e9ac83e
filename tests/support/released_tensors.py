"""Weights of a released form, copied into a model of ours."""

import torch


def copy_named(inference, named):
    """Copy tensors by the names of our parameters, each of which has one."""
    parameters = dict(inference.layers.named_parameters())
    assert parameters.keys() == named.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(named[name])
