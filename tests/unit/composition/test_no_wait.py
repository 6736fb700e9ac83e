"""GPU behaviour of a training step, tested without a GPU: synchronization and kernel counts.

Meta tensors hold no data, so reading a value fails, and a dispatch mode records host copies and
kernels. Fake CUDA tensors carry a device, so mixing devices fails; without a GPU they have no
backward pass.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from small_batches import batch_of, run_layers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megavis.data.loading.loader import Batch
from megavis.model import attention, kernels
from megavis.model.core import Block

pytestmark = pytest.mark.once
IMAGES = torch.zeros(2, 12, 12, 3).byte()
LATENTS = torch.zeros(2, 2, 4, 3, 3).half()
GIVT = "objective={name: givt, latent_channels: 4, downsampling: 4, num_components: 2}"
MASKGIT = GIVT.replace("givt", "givt_maskgit")
MAR = (
    "objective={name: mar, latent_channels: 4, downsampling: 4, num_classes: 3, class_rows: 2,"
    " decoder: {num_layers: 1, hidden_size: 16, num_attention_heads: 2}, denoiser_width: 8}"
)
LABEL_MAPS = "name: vae_label_maps, patch_size: 4, downsampling: 4, latent_channels: 4"
IDS = ["objective.vocabulary_size=12", "objective.variant=d2d"]
PAPERS = [
    # overrides of a small GVP's config, inputs as stored in shards
    (["objective={name: igpt, vocabulary_size: 12}"], torch.zeros(2, 144).byte()),
    (
        ["objective={name: igpt, vocabulary_size: 12, mode: bert}"],
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
FINE_TUNED = ["data.validation=shards/validation", "training.validate_every=1"]
STEPS = [
    *PAPERS,
    (
        ["objective={name: randar, patch_size: 4, vocabulary_size: 12, num_classes: 3}"],
        torch.zeros(2, 9).byte(),
    ),
    ([MAR], LATENTS),
    (["finetune={num_classes: 3}", *FINE_TUNED], IMAGES),
    (["finetune={num_classes: 3, generative_weight: 1}", *FINE_TUNED], IMAGES),
    ([f"objective={{{LABEL_MAPS}, target: panoptic}}"], IMAGES),
    ([f"objective={{{LABEL_MAPS}, target: depth}}"], IMAGES),
]

# Kernels per block of each model in bf16, forward and backward: unfused, and the GPU's upper bound.
# Attention counts as one in each direction. Lower the bound when kernels are removed: where queries
# and keys are those of different rows, six of them copy the parts of the joined projection and of
# its gradients, whose rows alternate by head.
KERNELS = [
    *[(60, 37)] * 4,
    *[(116, 41), (125, 50), (63, 46), (69, 45), (69, 45), (125, 50), (69, 45), (69, 45)],
]


class NoCopies(TorchDispatchMode):
    """Record operations with a host tensor as argument or result."""

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
    """Record tensors created from Python numbers, which bypass the dispatcher."""

    MAKERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        if function in self.MAKERS:
            self.found.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("words", "inputs"), STEPS)
def test_step_does_not_synchronize_with_the_host(build_gvp, words, inputs):
    objective, inference = build_gvp(*words)
    layers = [layer.to("meta") for layer in inference.layers.modules]
    batch = batch_of(inputs).to("meta")
    # Copies that happen only in the first step are allowed.
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


@pytest.mark.parametrize(("words", "inputs"), PAPERS)
def test_forward_pass_uses_one_device_and_reads_no_values(
    build_gvp, fake_gpu, monkeypatch, words, inputs
):
    # Compilation would need a GPU.
    monkeypatch.setattr(kernels, "compiled", lambda function: function)
    objective, inference = build_gvp(*words)
    batch = batch_of(inputs)
    with fake_gpu:
        for layer in inference.layers.modules:
            move_to_fake_cuda(layer, fake_gpu)
        tensors = (batch.inputs, batch.labels, batch.sample_index)
        on_gpu = Batch(*(as_cuda(fake_gpu, tensor) for tensor in tensors))
        sequence = objective.sequence(on_gpu)
        loss = objective.loss(
            run_layers(inference.layers.modules, sequence.inputs), sequence.targets
        )
        features = inference.features(objective.feature_inputs(on_gpu))
    assert loss.device.type == features.device.type == "cuda"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x + torch.ones(3),
    ],
    ids=["item", "bool", "dynamic shape", "two devices"],
)
def test_fake_tensors_detect_synchronization(read):
    with FakeTensorMode():
        given = torch.ones(3, device="cuda")
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(given)


class Kernels(TorchDispatchMode):
    """Count operations that launch kernels; views and allocations do not."""

    ALLOCATIONS = ("empty", "new_empty", "detach", "_unsafe_view", "lift_fresh", "_reshape_alias")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        self.count += not (operation.is_view or name.startswith(self.ALLOCATIONS))
        return operation(*args, **(kwargs or {}))

    def as_one(self, function, backward=1):
        """Count a function as one kernel forward and `backward` kernels backward."""
        mode = self

        class Fused(torch.autograd.Function):
            @staticmethod
            def forward(ctx, rebuild, *tensors):
                inner = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
                before = mode.count
                with torch.enable_grad():
                    made = rebuild(inner)
                mode.count = before + 1
                ctx.inner, ctx.made = inner, made
                return made.detach()

            @staticmethod
            def backward(ctx, slope):
                before = mode.count
                wanted = [t for t in ctx.inner if t.requires_grad]
                slopes = iter(torch.autograd.grad(ctx.made, wanted, slope))
                mode.count = before + backward
                return None, *(next(slopes) if t.requires_grad else None for t in ctx.inner)

        def run(*args, **options):
            places = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]

            def rebuild(tensors):
                given = list(args)
                for place, tensor in zip(places, tensors, strict=True):
                    given[place] = tensor
                return function(*given, **options)

            return Fused.apply(rebuild, *(args[i] for i in places))

        return run


@pytest.mark.parametrize(
    ("words", "inputs", "counts"),
    [(*paper, counts) for paper, counts in zip(PAPERS, KERNELS, strict=True)],
)
def test_kernel_count_per_block(build_gvp, monkeypatch, words, inputs, counts):
    objective, inference = build_gvp(*words)
    layers = [layer.to("meta", torch.bfloat16) for layer in inference.layers.modules]
    counted, plain_sdpa = Kernels(), F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", counted.as_one(F.scaled_dot_product_attention)
    )
    monkeypatch.setattr(kernels, "compiled", functools.cache(counted.as_one))

    # The meta device lacks FlexAttention, whose backward multiplies gradient and output first.
    def like_flex(query, key, value, blocks):
        return plain_sdpa(query, key, value)

    monkeypatch.setattr(attention, "two_stream_attention", counted.as_one(like_flex, backward=2))
    # Select GPU kernels, and FlexAttention for short sequences too.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(attention, "suits_flex", lambda *_, **__: True)
    state = objective.sequence(batch_of(inputs).to("meta")).inputs
    for layer in layers:
        if isinstance(layer, Block):
            break
        state = layer(state)
    state = tree_map(torch.Tensor.detach, state)
    tree_leaves(state)[0].requires_grad_()
    # The first pass builds position tables and masks, which later blocks reuse.
    for _ in range(2):
        layer.zero_grad()
        counted.count = 0
        with counted:
            given = layer(state)
        made = [t for t in tree_leaves(given) if t.requires_grad]
        slopes = [torch.empty_like(t) for t in made]
        with counted:
            torch.autograd.backward(made, slopes)
    before, most = counts
    assert counted.count <= most
    if objective.config.objective.name in ("darl", "gvp"):
        assert counted.count <= 2 / 3 * before


@pytest.mark.parametrize(("words", "inputs"), PAPERS)
def test_gpu_kernels_match_plain_loss_and_gradients(build_gvp, monkeypatch, words, inputs):
    objective, inference = build_gvp(*words)
    layers, batch = inference.layers.modules, batch_of(inputs)
    parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    # Zero-initialized heads would hide differences below them.
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(std=0.1, generator=generator)
    plain = step(objective, layers, batch)
    wanted = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    monkeypatch.setattr(kernels, "compiled", lambda function: function)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "suits_flex", lambda *_, **__: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    fused = step(objective, layers, batch)
    torch.testing.assert_close(fused, plain, atol=1e-6, rtol=1e-5)
    largest = max(float(g.abs().max()) for g in wanted if g is not None)
    for parameter, gradient in zip(parameters, wanted, strict=True):
        if gradient is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(
                parameter.grad, gradient, atol=1e-5 * max(1.0, largest), rtol=1e-4
            )
