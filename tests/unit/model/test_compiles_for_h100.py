"""The compiled regions become Triton kernels for an H100 (sm_90), without a GPU.

Their machine code exists, and Triton's interpreter computes with the same kernels what the plain
forms compute, forward and backward.
"""

import pytest
import torch
from children import open_child
from torch.nn.attention.flex_attention import flex_attention

from megavis.model import activations, kernels

# Interfaces of Inductor that are not public; other versions may lack them.
VERSION = "2.14."
IS_VERSION = torch.__version__.startswith(VERSION) and torch.version.cuda is not None
pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(
        not IS_VERSION,
        reason=f"written for the interfaces of Inductor in torch {VERSION}x with CUDA",
    ),
]
if IS_VERSION:
    from gpu_code import generated_code, machine_code
    from interpreted_triton import open_interpreter

TOKENS, KEYS, HEADS, WIDTH = 160, 288, 2, 32
QUERIES, COSINES = (2, HEADS, 40, WIDTH), (1, 1, 40, WIDTH // 2)
PAIRS = (24, HEADS, 2, WIDTH)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def logits_and_ids(vocabulary, first=0):
    def inputs(dtype):
        ids = torch.randint(first, vocabulary - first, (12, 4))
        return [4 * random(12, 4, vocabulary, dtype=dtype), ids]

    return inputs


def rotated(dtype):
    return [random(*QUERIES, dtype=dtype), random(*COSINES), random(*COSINES)]


# Plain form, number of inputs with gradients, inputs of a dtype.
REGIONS = {
    "apply_rotary": (kernels.apply_rotary, 1, rotated),
    "attend_to_few": (
        kernels.attend_to_few,
        3,
        lambda dtype: [random(*PAIRS, dtype=dtype) for _ in range(3)],
    ),
    "cross_entropy": (kernels.cross_entropy, 1, logits_and_ids(512)),
    # A vocabulary that no block divides, and one that a kernel reads in a loop.
    "cross-entropy of odd vocabulary": (kernels.cross_entropy, 1, logits_and_ids(333)),
    "cross-entropy of large vocabulary": (kernels.cross_entropy, 1, logits_and_ids(8192)),
    # Ids of other parts of the vocabulary too.
    "vocabulary_terms": (kernels.vocabulary_terms, 1, logits_and_ids(512, first=-256)),
    "quick_gelu": (
        activations._quick_gelu,
        1,
        lambda dtype: [3 * random(12, 4, 80, dtype=dtype)],
    ),
    "swiglu": (
        activations.swiglu,
        1,
        lambda dtype: [3 * random(12, 4, 80, dtype=dtype)],
    ),
}
# The largest error, as a share of the largest value. bf16 has eight bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.fixture(scope="module")
def interpret():
    with open_interpreter() as run:
        yield run


def with_gradients(plain, inputs, num_differentiable, slope):
    """Return the result of a plain form and its gradients, computed in float32."""
    leaves = [each.float().requires_grad_() for each in inputs[:num_differentiable]]
    result = plain(*leaves, *inputs[num_differentiable:])
    return [result.detach(), *torch.autograd.grad(result, leaves, slope.float())]


def interpreted(interpret, code, num_differentiable, slope):
    """Return the same, computed by the kernels."""
    result, *saved = interpret(code.forward, code.inputs)
    sizes = [each for each in saved if isinstance(each, int)]
    gradients = interpret(code.backward, [*sizes, *saved[: len(saved) - len(sizes)], slope])
    found = [each for each in gradients if each is not None]
    assert len(found) == num_differentiable
    return [result, *found]


@pytest.fixture(scope="module")
def compile_code():
    """Compile in a process of its own: Triton's LLVM replaces handlers of signals."""
    with open_child() as run:
        yield lambda code, folder: run(machine_code, code, folder)


def assert_compiles(code, compile_code, folder):
    for each in (code.forward, code.backward):
        # Only Triton kernels: nothing falls back to torch's operators.
        body = each.split("def call")[1]
        assert "extern_kernels." not in body
        assert "torch.ops.aten" not in body
        binaries = compile_code(each, folder)
        assert binaries
        for ptx, binary in binaries:
            assert ".target sm_90" in ptx
            # An ELF file, with the machine number of CUDA.
            assert (binary[:4], int.from_bytes(binary[18:20], "little")) == (b"\x7fELF", 190)


def assert_near(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize(
    ("dtype", "num_dynamic"),
    [(torch.float32, 0), (torch.bfloat16, 2)],
    ids=["float32", "bf16 of any batch"],
)
@pytest.mark.parametrize("name", REGIONS)
def test_region_compiles_and_computes_the_plain_form(
    interpret, compile_code, tmp_path, name, dtype, num_dynamic
):
    torch.manual_seed(0)
    region, num_differentiable, make = REGIONS[name]
    plain, inputs = region.__wrapped__, make(dtype)
    slope = torch.randn_like(plain(*inputs))
    code = generated_code(plain, inputs, num_differentiable, str(tmp_path), num_dynamic=num_dynamic)
    assert any(isinstance(each, int) for each in code.inputs) == (num_dynamic > 0)
    assert_compiles(code, compile_code, str(tmp_path))
    result, *gradients = found = interpreted(interpret, code, num_differentiable, slope)
    assert result.dtype == slope.dtype
    assert all(each.dtype == dtype for each in gradients)
    expected = with_gradients(plain, inputs, num_differentiable, slope)
    assert_near(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_two_stream_attention_compiles_and_computes_masked_softmax(
    interpret, compile_code, tmp_path, dtype
):
    torch.manual_seed(0)
    # Neither length is a multiple of a block; the first queries of one image see nothing.
    groups, reach = torch.randint(1, 9, (2, KEYS)), torch.randint(1, 10, (2, TOKENS))
    reach[1, :40] = 0
    blocks = kernels.group_blocks(groups, reach)
    visible = (groups[:, None] < reach[:, :, None])[:, None]

    def attend(query, key, value):
        return flex_attention(query, key, value, block_mask=blocks)

    def plain(query, key, value):
        scores = query @ key.mT * WIDTH**-0.5
        return scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0) @ value

    inputs = [random(2, HEADS, length, WIDTH, dtype=dtype) for length in (TOKENS, KEYS, KEYS)]
    slope = torch.randn_like(inputs[0])
    code = generated_code(attend, inputs, 3, str(tmp_path))
    assert_compiles(code, compile_code, str(tmp_path))
    found = interpreted(interpret, code, 3, slope)
    # The weights of the values, and their gradients, are rounded to bf16 too.
    tolerance = 2 * TOLERANCE[dtype]
    assert all(each.dtype == dtype for each in found)
    assert not found[0][1, :, :40].any()
    assert_near(found, with_gradients(plain, inputs, 3, slope), tolerance)
