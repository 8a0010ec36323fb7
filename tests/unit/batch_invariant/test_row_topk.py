"""Parity mode's top-k of short rows on GPUs: the beginning of PyTorch's stable sort, bit by bit.

In Triton's interpreter without a GPU.
"""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.kernels.invariant.topk import MOST_COLUMNS, MOST_FOUND, is_of_short_rows, topk
from tests.support import needs, world
from tests.support.backends import triton_interpreter
from tests.support.gpu_calls import capture

with triton_interpreter():
    from absorbed_mla.kernels.invariant import row_topk

pytestmark = pytest.mark.usefixtures("interpreted")
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
dtypes = pytest.mark.parametrize("dtype", BITS, ids=lambda dtype: str(dtype)[6:])
directions = pytest.mark.parametrize("largest", [True, False], ids=["largest", "least"])


def scores(*shape: int, dtype: torch.dtype = torch.float32, special: bool = True) -> Tensor:
    """Few different numbers, so that most are equal to others; among them, if wanted, all kinds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).mul(3).round()
    limits = torch.finfo(dtype)
    kinds = [torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, limits.max, limits.min]
    kinds += [limits.smallest_normal, limits.smallest_normal / 4, -limits.smallest_normal / 4]
    if special:
        numbers = torch.randint(3 * len(kinds), shape, generator=generator)
        for number, kind in enumerate(kinds):
            x = torch.where(numbers == number, kind, x)
    return x.to(dtype).to(world.device())


def check(x: Tensor, k: int, largest: bool) -> None:
    """The kernel against the sort, by bits: numbers say nothing of NaN and -0."""
    assert is_of_short_rows(x, k, -1)
    # On the CPU: a GPU's radix sort may take a NaN with a sign for the least.
    expected = torch.sort(x.cpu(), dim=-1, descending=largest, stable=True)
    values, indices = row_topk.row_topk(x, k, largest)
    assert values.is_contiguous() and indices.is_contiguous()
    assert values.dtype == x.dtype and indices.dtype == torch.int64
    assert torch.equal(indices.cpu(), expected.indices[..., :k])
    of_bits = expected.values[..., :k].contiguous().view(BITS[x.dtype])
    assert torch.equal(values.cpu().view(BITS[x.dtype]), of_bits)


@directions
@dtypes
@pytest.mark.parametrize("columns", [1, 3, 16, 100, 256, 512])
def test_is_the_beginning_of_a_stable_sort(columns, dtype, largest):
    x = scores(max(4, 40 // columns), columns, dtype=dtype)
    for k in sorted({1, min(columns, 8), min(columns, MOST_FOUND)}):
        check(x, k, largest)


@directions
def test_of_any_bits(largest):
    """NaN with any sign and payload, the smallest numbers."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (8, 64), generator=generator, dtype=torch.int32)
    bits[:, ::3] |= 0x7F800000
    bits[:, 1::3] &= -0x7F800001
    check(bits.view(torch.float32).to(world.device()), 32, largest)


@directions
def test_of_one_kind(largest):
    """Rows in which all elements are equal, or the last of the order."""
    for value in (torch.nan, torch.inf, -torch.inf, 0.0, -0.0):
        check(torch.full((2, 20), value, device=world.device()), 20, largest)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[0, 0],
        lambda x: x[0, 0, ::2],
        lambda x: x[0],
        lambda x: x[1, :, 5:21],
        lambda x: x[1, ::2, ::3],
        lambda x: x[0].T,
        lambda x: x[0, :1].expand(5, -1),
        lambda x: x,
        lambda x: x[:, None],
        lambda x: x[:, ::2],
        lambda x: x[:, 1:, 1:],
        lambda x: x.permute(2, 1, 0),
        lambda x: x.permute(1, 0, 2),
    ],
)
def test_of_any_strides(view):
    x = view(scores(4, 7, 33))
    check(x, min(4, x.shape[-1]), True)


def test_what_the_sort_keeps():
    x = scores(4, 33, special=False)
    served = is_of_short_rows
    assert served(x, MOST_FOUND, 1) and served(x, 1, -1) and served(x[0], 2, 0)
    assert not served(x, 1, 0) and not served(x, 1, -2), "other axes"
    assert (
        not served(x, 0, -1) and not served(x, MOST_FOUND + 1, -1) and not served(x[:, :3], 4, -1)
    )
    assert not served(x[:0], 1, -1) and not served(x[:, :0], 0, -1)
    assert not served(x.double(), 1, -1) and not served(x.long(), 1, -1)
    assert not served(scores(1, MOST_COLUMNS + 1), 1, -1)


def test_more_than_there_are():
    with pytest.raises(RuntimeError):
        topk(scores(2, 3), 4)


def test_one_launch(monkeypatch):
    """Nothing is copied, nor filled, as deterministic algorithms would."""
    operators, launches = [], []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name
            operators.append((name, torch.utils.deterministic.fill_uninitialized_memory))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(row_topk, "launch", lambda *given, **constants: launches.append(given))
    x = scores(3, 8, 32)
    with Recorded():
        row_topk.row_topk(x, 2, True)
    assert operators == [("aten::new_empty", False)] * 2 + [("aten::view", True)]
    assert len(launches) == 1


class TestInTheMode:
    """``torch.topk``."""

    @pytest.fixture(autouse=True)
    def calls(self, monkeypatch):
        calls = []

        def recorded(x, k, largest):
            calls.append(x)
            return found(x, k, largest)

        found = row_topk.row_topk
        monkeypatch.setattr(row_topk, "row_topk", recorded)
        return calls

    @needs.gpu
    def test_a_gpu_takes_the_kernel(self, calls):
        x = scores(5, 256, special=False)
        expected = torch.sort(x, descending=True, stable=True)
        with batch_invariant_mode("cuda"):
            for wanted in (True, False):
                values, indices = torch.topk(x, 8, dim=-1, sorted=wanted)
                assert torch.equal(values, expected.values[:, :8])
                assert torch.equal(indices, expected.indices[:, :8])
            assert len(calls) == 2
            torch.topk(x.double(), 8)
            torch.topk(x, 3, dim=0)
        assert len(calls) == 2

    @needs.gpu
    def test_in_a_graph(self):
        x = scores(5, 256, special=False)
        with batch_invariant_mode("cuda"):
            graph, (values, indices) = capture(lambda: torch.topk(x, 8))
        x.copy_(x.roll(1, 0).neg())
        graph.replay()
        expected = torch.sort(x, descending=True, stable=True)
        assert torch.equal(values, expected.values[:, :8])
        assert torch.equal(indices, expected.indices[:, :8])

    def test_gradients_are_pytorchs(self, calls, monkeypatch):
        device_type = world.device().type
        if device_type == "cpu":
            # Which would sort.
            def taken(x, k, dim=-1, largest=True, sorted=True):
                return row_topk.row_topk(x, k, largest)

            monkeypatch.setattr("absorbed_mla.batch_invariant.mode.topk", taken)
        x = scores(4, 6, special=False).requires_grad_()
        factors = torch.arange(12.0, device=x.device).view(4, 3)
        with batch_invariant_mode(device_type):
            values, indices = torch.topk(x, 3, dim=-1)
            (values * factors).sum().backward()
        assert len(calls) == 1
        expected = torch.zeros_like(x).scatter(1, indices, factors)
        assert torch.equal(x.grad, expected)
