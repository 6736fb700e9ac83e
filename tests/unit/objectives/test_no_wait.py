"""Nothing in a step waits for the host: run where no number can be read and copies are counted.

Tensors of the meta device hold no numbers, so whatever looks at one fails; a copy from the host,
which a device would wait for too, is noticed by the dispatcher.
"""

import pytest
import torch
from small_batches import batch_of, run_layers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.once
IMAGES = torch.zeros(2, 12, 12, 3).byte()
LATENTS = torch.zeros(2, 2, 4, 3, 3).half()
GIVT = "objective={name: givt, latent_channels: 4, downsampling: 4, num_components: 2}"
MASKGIT = GIVT.replace("givt", "givt_maskgit")
IDS = ["objective.vocabulary_size=12", "objective.variant=d2d"]
PAPERS = [
    # words of the config of a small GVP, inputs as shards hold them
    (["objective={name: igpt, vocabulary_size: 12}"], torch.zeros(2, 144).byte()),
    (
        ["objective={name: igpt, vocabulary_size: 12, mode: bert, order: random}"],
        torch.zeros(2, 144).byte(),
    ),
    ([GIVT, "objective.adapter_blocks=2"], LATENTS),
    ([MASKGIT], LATENTS),
    (["objective={name: darl, patch_size: 4}"], IMAGES),
    (
        [
            "objective={name: darl, patch_size: 4, loss: diffusion, order: random}",
            "objective.two_streams=true",
        ],
        IMAGES,
    ),
    (["objective={name: mp3, patch_size: 4}"], IMAGES),
    (["model.positions=sincos"], IMAGES),
    ([*IDS, "model.positions=sincos"], torch.zeros(2, 9).byte()),
    (["objective.segmentation=random", "model.positions=rope_2d"], IMAGES),
    (
        ["objective.segmentation=given", "objective.boundaries=[2,4]", "objective.num_groups=2"],
        IMAGES,
    ),
    (["objective.order=raster", "objective.normalize_targets=true"], IMAGES),
]


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


@pytest.mark.parametrize(("words", "inputs"), PAPERS)
def test_a_step_never_asks_the_host(build_gvp, words, inputs):
    objective, runner = build_gvp(*words)
    layers = [layer.to("meta") for layer in runner.layers.modules]
    batch = batch_of(inputs).to("meta")
    # What is sent once, before the first step ends, may be sent.
    step(objective, layers, batch)
    with NoCopies() as copies, NoNumbers() as numbers:
        loss = step(objective, layers, batch)
    assert loss.device.type == "meta"
    assert not copies.found + numbers.found


def step(objective, layers, batch):
    sequence = objective.sequence(batch)
    loss = objective.loss(run_layers(layers, sequence.inputs), sequence.targets)
    loss.backward()
    return loss
