"""Nothing in a step waits for the host: run where no number can be read and copies are counted.

Tensors of the meta device hold no numbers, so whatever looks at one fails; a copy from the host,
which a device would wait for too, is noticed by the dispatcher.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megavis.data.batch import Batch

IDS = ["objective.vocabulary_size=12", "objective.variant=d2d"]


class NoCopies(TorchDispatchMode):
    """Notes operations that take a tensor of the host, or give one."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        given = operation(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves([args, kwargs, given]) if isinstance(t, torch.Tensor)]
        if any(tensor.device.type != "meta" for tensor in tensors):
            self.found.append(str(operation))
        return given


class NoNumbers(TorchFunctionMode):
    """Notes tensors made of numbers of the host, which no dispatcher sees."""

    MAKERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        if function in self.MAKERS:
            self.found.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "words",
    [
        [],
        IDS,
        ["objective.segmentation=random", "model.positions=rope_2d"],
        ["objective.segmentation=given", "objective.boundaries=[2,4]", "objective.num_groups=2"],
        ["objective.order=raster", "objective.normalize_targets=true"],
    ],
)
def test_a_step_never_asks_the_host(build_gvp, words):
    objective, runner = build_gvp("model.positions=sincos", *words)
    layers = [layer.to("meta") for layer in runner.layers.modules]
    inputs = torch.randint(12, (2, 9)) if words == IDS else torch.zeros(2, 12, 12, 3).byte()
    batch = Batch(inputs, torch.zeros(2).long(), torch.arange(2)).to("meta")
    # What is sent once, before the first step ends, may be sent.
    step(objective, layers, batch)
    with NoCopies() as copies, NoNumbers() as numbers:
        loss = step(objective, layers, batch)
    assert loss.device.type == "meta"
    assert not copies.found + numbers.found


def step(objective, layers, batch):
    sequence = objective.sequence(batch)
    state = sequence.inputs
    for layer in layers:
        state = layer(state)
    loss = objective.loss(state, sequence.targets)
    loss.backward()
    return loss
