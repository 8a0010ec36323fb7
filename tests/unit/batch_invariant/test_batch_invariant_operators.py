"""The operators of parity mode: rows are independent of each other, values are those of PyTorch."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from absorbed_mla.batch_invariant import (
    batch_invariant_mode,
    disable_batch_invariant_mode,
    enable_batch_invariant_mode,
    is_enabled,
    mode,
)
from absorbed_mla.kernels.invariant import cpu
from tests.support.backends import multiply_in_one_order, triton_interpreter
from tests.support.numerics import relative_error

with triton_interpreter():
    from absorbed_mla.kernels.invariant.product import head_product

CPU = torch.device("cpu")
ROWS, WIDTH, OUTPUTS, HEADS = 70, 37, 21, 3
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype)[6:])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def weight(*shape: int, like: Tensor) -> Tensor:
    return random(*shape, dtype=like.dtype, seed=1)


# Of rows [M, WIDTH].
FUNCTIONS = {
    "linear": lambda x: F.linear(x, weight(OUTPUTS, WIDTH, like=x)),
    "bias": lambda x: F.linear(x, weight(OUTPUTS, WIDTH, like=x), weight(OUTPUTS, like=x)),
    "not transposed": lambda x: x @ weight(WIDTH, OUTPUTS, like=x),
    "one matrix for all": lambda x: torch.bmm(
        x.expand(2, -1, -1), weight(WIDTH, OUTPUTS, like=x).expand(2, -1, -1)
    )[1],
    "by head": lambda x: torch.einsum("tk,hkc->thc", x, weight(HEADS, WIDTH, OUTPUTS, like=x)),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "of half a row": lambda x: F.silu(torch.cat((x, x), dim=-1)[:, :WIDTH]),
    "log softmax": lambda x: torch.log_softmax(x, dim=-1),
    "norm": lambda x: x * torch.rsqrt(x.float().square().mean(-1, keepdim=True)).to(x.dtype),
}


def changed(function, x: Tensor) -> list[tuple[int, int]]:
    """Runs of rows that get other bits alone than among all."""
    whole = function(x)
    runs = [(first, count) for first in (0, 5) for count in (1, 2, 3, 7, 31, 32, 33, 65)]
    return [
        (first, count)
        for first, count in runs
        if not torch.equal(function(x[first : first + count]), whole[first : first + count])
    ]


@dtypes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_are_independent(name, dtype):
    x, function = random(ROWS, WIDTH, dtype=dtype), FUNCTIONS[name]
    expected = function(x.double()).to(dtype)
    with batch_invariant_mode("cpu"):
        assert changed(function, x) == []
        assert relative_error(function(x).double(), expected.double()) < BOUNDS[dtype]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this is about MKL's products")
@pytest.mark.parametrize("name", ["linear", "by head", "silu", "sigmoid", "gelu of tanh"])
def test_rows_depend_on_each_other_without_the_mode(name):
    """The comparison can fail: one row of fp32 is computed otherwise than many."""
    assert changed(FUNCTIONS[name], random(ROWS, WIDTH))


class TestProducts:
    @pytest.fixture(autouse=True)
    def _on(self):
        with batch_invariant_mode("cpu"):
            yield

    @pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
    def test_of_nothing(self, shape):
        rows, width, outputs = shape
        found = torch.zeros(rows, width) @ torch.zeros(width, outputs)
        assert torch.equal(found, torch.zeros(rows, outputs))
        found = torch.bmm(torch.zeros(2, rows, width), torch.zeros(2, width, outputs))
        assert torch.equal(found, torch.zeros(2, rows, outputs))

    @pytest.mark.parametrize("batch", [0, 1, 2])
    def test_of_expanded_matrices(self, batch):
        left, right = random(4, 5), random(5, 1).expand(5, 6)
        assert torch.allclose(left @ right, left @ right.clone())
        found = torch.bmm(left.expand(batch, 4, 5), right.expand(batch, 5, 6))
        assert torch.allclose(found, (left @ right).expand(batch, 4, 6))

    def test_gpus_make_one_product_of_an_expanded_matrix(self):
        """There is a batch-invariant product for that, and none for batches."""
        left, right = random(3, 4, 5), random(3, 5, 6, seed=1)
        assert torch.allclose(mode._bmm(left, right), left @ right)
        for one in (right[:1].expand(3, -1, -1), right[0].expand(3, -1, -1)):
            assert torch.equal(mode._bmm(left, one).flatten(0, 1), left.flatten(0, 1) @ right[0])

    def test_of_integers(self):
        left, right = torch.arange(6).view(2, 3), torch.arange(12).view(3, 4)
        assert torch.equal(left @ right, (left.double() @ right.double()).long())
        assert torch.allclose(torch.sigmoid(left), torch.sigmoid(left.float()))

    def test_where_the_place_matters_rows_go_alone(self):
        """As in some products of fp64; here all of them."""

        def product(left, right, out):
            torch.matmul(left, right, out=out)
            return out.add_(torch.arange(out.shape[-2])[:, None])

        def tile_rows(product):
            arguments = (product, torch.float32, (WIDTH, OUTPUTS), (OUTPUTS, 1), 1)
            return cpu._tile_rows.__wrapped__(*arguments)

        assert (tile_rows(product), tile_rows(torch.mm)) == (1, cpu.TILE_ROWS)

    def test_rows_that_go_alone(self, monkeypatch):
        x, w = random(ROWS, WIDTH), random(WIDTH, OUTPUTS)
        expected = x @ w
        monkeypatch.setattr(cpu, "_tile_rows", lambda *_: 1)
        assert relative_error(x @ w, expected) < 1e-6
        assert changed(lambda rows: rows @ w, x) == []


@pytest.mark.parametrize("largest", [True, False])
def test_topk_has_one_order(largest):
    """Values as ever; of equal ones the first come first, sorted or not."""
    x = random(5, 40).mul(3).round()
    expected = torch.topk(x, 7, largest=largest).values
    with batch_invariant_mode("cpu"):
        found = [torch.topk(x, 7, 1, largest, wanted) for wanted in (True, False)]
        of_columns = torch.topk(x.T, 7, 0, largest)
        scalar = torch.topk(x[0, 0], 1)
    assert torch.equal(found[0].indices, x.argsort(dim=1, descending=largest, stable=True)[:, :7])
    for values, indices in [*found, (of_columns.values.T, of_columns.indices.T)]:
        assert torch.equal(values, expected) and torch.equal(indices, found[0].indices)
    assert (scalar.values, scalar.indices) == (x[0, 0], 0)


class TestSwitch:
    def test_on_and_off(self):
        x = random(3, 3)
        assert not is_enabled(CPU)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            enable_batch_invariant_mode("cpu")
            enable_batch_invariant_mode("cpu")
        with batch_invariant_mode("cpu"):
            pass
        assert is_enabled(CPU) and (x @ x).shape == (3, 3)
        disable_batch_invariant_mode("cpu")
        disable_batch_invariant_mode("cpu")
        assert not is_enabled(CPU) and not is_enabled(torch.device("meta"))

    def test_off_after_an_error(self):
        with pytest.raises(KeyError), batch_invariant_mode("cpu"):
            raise KeyError
        assert not is_enabled(CPU)

    def test_another_device(self):
        with pytest.raises(ValueError, match="device_type must be None, 'cuda' or 'cpu'; got 'xp'"):
            enable_batch_invariant_mode("xp")


class TestHeadProduct:
    """The kernel, in Triton's interpreter without a GPU."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("tokens", [0, 1, 70])
    def test_values(self, tokens, dtype):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = random(tokens, HEADS, WIDTH + 4, dtype=dtype).to(device)[..., :WIDTH]
        w = random(HEADS, OUTPUTS, WIDTH, dtype=dtype, seed=1).to(device).transpose(1, 2)
        expected = torch.einsum("thk,hkc->thc", x.double(), w.double())
        with triton_interpreter():
            found = head_product(x, w)
        assert found.dtype == dtype and found.shape == expected.shape
        if tokens:
            assert relative_error(found.double(), expected) < BOUNDS[dtype]

    def test_tokens_are_independent(self, monkeypatch):
        multiply_in_one_order(monkeypatch)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x, w = random(70, 1, WIDTH).to(device), random(1, WIDTH, OUTPUTS, seed=1).to(device)
        with triton_interpreter():
            assert changed(lambda rows: head_product(rows, w), x) == []
