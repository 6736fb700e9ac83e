"""What a GPU would do in a step, on a machine without one.

Tensors of the meta device hold no numbers, so whatever looks at one fails; a copy from the host,
which a device would wait for too, is noticed by the dispatcher, and so is every kernel. Fake CUDA
tensors know their device: whatever mixes devices fails. They have no backward pass without a GPU.
"""

import pytest
import torch
from small_batches import batch_of, run_layers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megavis.data.loading.batch import Batch
from megavis.model.core import Block

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

# Of a block of each, forward and backward, attention as the plain products that it is on the meta
# device (torch 2.14). Fewer are better: lower the number with the kernels.
KERNELS = [59, 53, 59, 53, 107, 114, 56, 66, 66, 114, 66, 66]


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


def as_cuda(mode, tensor):
    return mode.from_tensor(tensor).detach().to("cuda")


def move_to_fake_cuda(layer, mode):
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(as_cuda(mode, parameter)))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = as_cuda(mode, buffer)


@pytest.fixture(scope="module")
def fake_gpu():
    """One for all tests: what is kept by device, such as mean colours, belongs to it.

    Orders are made on the host when the model is listed, and sent to the device here.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.parametrize(("words", "inputs"), PAPERS)
def test_forward_passes_keep_to_one_gpu_and_read_nothing(build_gvp, fake_gpu, words, inputs):
    objective, runner = build_gvp(*words)
    batch = batch_of(inputs)
    with fake_gpu:
        for layer in runner.layers.modules:
            move_to_fake_cuda(layer, fake_gpu)
        on_gpu = Batch(*(as_cuda(fake_gpu, t) for t in vars(batch).values()))
        sequence = objective.sequence(on_gpu)
        loss = objective.loss(run_layers(runner.layers.modules, sequence.inputs), sequence.targets)
        features = runner.features(objective.feature_inputs(on_gpu))
    assert loss.device.type == features.device.type == "cuda"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x + torch.ones(3),
    ],
    ids=["a number", "a truth", "a size", "two devices"],
)
def test_fake_tensors_notice(read):
    with FakeTensorMode():
        given = torch.ones(3, device="cuda")
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(given)


class Kernels(TorchDispatchMode):
    """Counts operations that compute; views and bare allocations start no kernel."""

    ALLOCATIONS = ("empty", "new_empty", "detach", "_unsafe_view", "lift_fresh", "_reshape_alias")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        self.count += not (operation.is_view or name.startswith(self.ALLOCATIONS))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("words", "inputs", "most"),
    [(*paper, most) for paper, most in zip(PAPERS, KERNELS, strict=True)],
)
def test_a_block_starts_no_more_kernels_than_today(build_gvp, monkeypatch, words, inputs, most):
    objective, runner = build_gvp(*words)
    layers = [layer.to("meta") for layer in runner.layers.modules]
    # Norms and activations choose the kernels of a GPU by it.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    state = objective.sequence(batch_of(inputs).to("meta")).inputs
    for layer in layers:
        if isinstance(layer, Block):
            break
        state = layer(state)
    state = tree_map(torch.Tensor.detach, state)
    tree_leaves(state)[0].requires_grad_()
    with Kernels() as kernels:
        given = layer(state)
    made = [t for t in tree_leaves(given) if t.requires_grad]
    slopes = [torch.empty_like(t) for t in made]
    with kernels:
        torch.autograd.backward(made, slopes)
    assert kernels.count <= most
