"""SwiGLU that rounds each step, beside Megatron's operators: the same bits on a GPU.

The interpreter takes NumPy's exponential, after which few results are rounded otherwise, and takes
subnormal numbers of bf16 for zero.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.backends import triton_interpreter

# Triton decides when a kernel is decorated.
with triton_interpreter():
    from absorbed_mla.kernels.moe.swiglu import gated, swiglu

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OTHERWISE_ROUNDED = 0.0 if DEVICE.type == "cuda" else 0.01
HALVES = [torch.bfloat16, torch.float16]
halves = pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])
dtypes = pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=["bf16", "fp16", "fp32"])
# Also a block of 2,048 columns and one that is not full, which another number of warps computes.
widths = pytest.mark.parametrize("width", [40, 256, 2304])


def megatrons(gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """The activation of Megatron's ``MLP``, which adds ``glu_linear_offset``."""
    gate, up = gate_and_up.chunk(2, -1)
    x = F.silu(gate) * (up + 0.0)
    return x if scale is None else (x * scale.unsqueeze(-1)).to(x.dtype)


def known(x: Tensor) -> Tensor:
    """Numbers that the interpreter knows; all on a GPU."""
    if DEVICE.type == "cuda" or x.dtype != torch.bfloat16:
        return x
    return torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, x * 0, x)


def every_half(dtype: torch.dtype) -> Tensor:
    """All numbers of a dtype of 16 bits, infinities and NaN among them."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype)
    return known(numbers.to(DEVICE))


def random(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of all magnitudes, and of zeros, subnormal numbers, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    for share, exponents in ((0.3, 8), (0.1, 140)):
        size = torch.empty_like(x).uniform_(-exponents, exponents, generator=generator).exp2()
        x = torch.where(torch.rand(x.shape, generator=generator) < share, x * size, x)
    x = x.to(dtype)
    least = torch.finfo(dtype).smallest_normal
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, least, -least, least / 4, -least / 8]
    taken = torch.randint(len(special), x.shape, generator=generator)
    replaced = torch.rand(x.shape, generator=generator) < 0.05
    return known(torch.where(replaced, torch.tensor(special, dtype=dtype)[taken], x).to(DEVICE))


def share_of_others(found: Tensor, expected: Tensor) -> float:
    """Share of the elements that have other bits, of which NaN may have any."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    integers = torch.int32 if found.dtype == torch.float32 else torch.int16
    found, expected = known(found), known(expected)
    same = found.view(integers) == expected.view(integers)
    return float((~(same | (found.isnan() & expected.isnan()))).float().mean())


@halves
def test_every_gate(dtype):
    gate = every_half(dtype).view(64, 1024)
    found = gated(torch.cat([gate, torch.ones_like(gate)], -1), rounds_each_step=True)
    assert share_of_others(found, F.silu(gate)) <= OTHERWISE_ROUNDED


@halves
def test_sign_of_zero(dtype):
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], device=DEVICE, dtype=dtype)
    x = torch.cat([signs, torch.zeros_like(signs).copysign(signs.sort()[0])])[None]
    found = gated(x, rounds_each_step=True)
    assert share_of_others(found, megatrons(x)) == 0.0
    assert found.count_nonzero() == 0
    assert found[0].signbit().tolist() == [False, True, False, True], "up's is lost"


@halves
def test_every_up(dtype):
    up = every_half(dtype).view(64, 1024)
    for gate in (0.0, -0.0, 1.7, -3.2):
        x = torch.cat([torch.full_like(up, gate), up], -1)
        found, expected = gated(x, rounds_each_step=True), megatrons(x)
        assert share_of_others(found, expected) <= OTHERWISE_ROUNDED, gate


@dtypes
@widths
def test_gated(dtype, width):
    x = random(24, 2 * width, dtype)
    found, expected = gated(x, rounds_each_step=True), megatrons(x)
    if dtype == torch.float32 and DEVICE.type == "cpu":
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-30, equal_nan=True)
        return
    assert share_of_others(found, expected) <= OTHERWISE_ROUNDED
    if dtype != torch.float32:
        assert share_of_others(gated(x), expected) > 0.05, "the comparison can fail"


@halves
@widths
def test_experts(dtype, width):
    """Times probabilities in fp32, each row's own."""
    x, ends = random(24, 2 * width, dtype, seed=1), torch.tensor([3, 3, 19], dtype=torch.int32)
    probs = torch.rand(8, 3, generator=torch.Generator().manual_seed(2))
    probs[0, 0], probs[1, 1] = 0.0, 1.0
    choices = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    probs, choices, ends = (y.to(DEVICE) for y in (probs, choices, ends))
    expected = megatrons(x, probs.flatten()[choices])
    found = swiglu(x, probs, choices, ends, rounds_each_step=True)
    assert share_of_others(found[:19], expected[:19]) <= OTHERWISE_ROUNDED
    once = swiglu(x, probs, choices, ends)
    assert share_of_others(once[:19], expected[:19]) > 0.05, "the comparison can fail"


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8)])
def test_of_no_tokens(shape):
    """As an expert that nobody chose has them."""
    found = gated(torch.empty(shape, device=DEVICE), rounds_each_step=True)
    assert found.shape == (*shape[:-1], 4)
