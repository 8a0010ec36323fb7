"""Parity mode on GPUs: what it puts into PyTorch, Megatron and TransformerEngine, and takes back.

Without a GPU Megatron replaces the CPU's operators instead, and kernels are interpreted. In place
of TransformerEngine stand empty modules with its names.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.custom_layers import batch_invariant_kernels as megatron

from absorbed_mla.batch_invariant import (
    batch_invariant_mode,
    disable_batch_invariant_mode,
    enable_batch_invariant_mode,
    is_enabled,
    megatron_operators,
    mode,
    norms,
    products,
    te_gemm,
)
from tests.support import needs
from tests.support.backends import triton_interpreter
from tests.support.numerics import check_gradients, random, relative_error

with triton_interpreter():
    import absorbed_mla.kernels.invariant.matrix_product
    import absorbed_mla.kernels.invariant.rms_norm  # noqa: F401

BF16 = torch.bfloat16
GPU = torch.device("cuda")
NAMES = [name.name for name in mode.OPERATORS]


@pytest.fixture(autouse=True)
def _interpreted():
    with triton_interpreter():
        yield
    disable_batch_invariant_mode("cuda")


def installed() -> list:
    return [getattr(megatron, name) for name in NAMES]


class TestSwitch:
    def test_megatrons_flag_and_operators(self):
        """Others read the flag; its own operators come back."""
        theirs = installed()
        assert not is_enabled(GPU)
        with batch_invariant_mode("cuda"):
            assert is_enabled(GPU) and megatron.is_batch_invariant_mode_enabled()
            assert installed() == [*mode.OPERATORS.values()]
            enable_batch_invariant_mode("cuda")
        assert not megatron.is_batch_invariant_mode_enabled()
        assert installed() == theirs and products.mm not in theirs

    @needs.no_gpu
    def test_after_megatrons_own_function(self, monkeypatch):
        """What that has registered is exchanged."""
        calls = []
        monkeypatch.setattr(products, "DTYPES", ())
        monkeypatch.setitem(
            mode.OPERATORS,
            megatron_operators.MM,
            lambda a, b: calls.append(a.shape) or products.mm(a, b),
        )
        with pytest.raises(ModuleNotFoundError):
            megatron.enable_batch_invariant_mode()
        enable_batch_invariant_mode("cuda")
        x = random(3, 3)
        assert torch.equal(x @ torch.eye(3), x) and calls == [(3, 3)]

    def test_off_after_an_error(self, monkeypatch):
        theirs = installed()

        def enable():
            raise ModuleNotFoundError(name="triton")

        monkeypatch.setattr(megatron, "enable_batch_invariant_mode", enable)
        with pytest.raises(ModuleNotFoundError):
            enable_batch_invariant_mode("cuda")
        assert installed() == theirs and not is_enabled(GPU)


class TestProducts:
    """Without a GPU also those of the CPU's mode."""

    @pytest.fixture(autouse=True, params=["cuda", pytest.param("cpu", marks=needs.no_gpu)])
    def _on(self, request):
        with batch_invariant_mode(request.param):
            yield

    def test_of_a_linear_layer_and_its_gradients(self):
        leaves = [random(2, 5, 37), random(21, 37, seed=1), random(21, seed=2)]
        check_gradients(
            lambda x, w, bias: F.silu(F.linear(x, w, bias)),
            lambda x, w, bias: F.silu((x[..., None, :] * w).sum(-1) + bias),
            leaves,
            1e-6,
        )

    def test_factors_of_addmm(self):
        bias, left, right = random(21), random(5, 37), random(37, 21)
        found = torch.addmm(bias, left, right, beta=2, alpha=3)
        expected = 2 * bias.double() + 3 * (left.double() @ right.double())
        assert relative_error(found, expected) < 1e-6
        nan = torch.full_like(bias, torch.nan)
        assert torch.equal(torch.addmm(nan, left, right, beta=0), left @ right)

    def test_of_other_dtypes(self):
        """PyTorch's, with its errors."""
        left, right = random(3, 4).double(), random(4, 5).double()
        assert relative_error(left @ right, products.mm(left, right)) < 1e-12
        found = torch.addmm(right[0], left, right)
        assert relative_error(found, left @ right + right[0]) < 1e-12
        with pytest.raises(RuntimeError):
            torch.mm(random(3, 4), random(5, 4))
        with pytest.raises(RuntimeError):
            torch.mm(random(3, 4), right)


class TestGeneralGemm:
    """The product of TransformerEngine's layers."""

    A, B = random(24, 40, dtype=BF16), random(2, 3, 40, dtype=BF16, seed=1)

    def test_forward(self):
        bias = random(24, dtype=BF16)
        found, *others = te_gemm.general_gemm(self.A, self.B, object(), bias=bias)
        assert found.shape == (2, 3, 24) and found.dtype == BF16 and others == [None] * 3
        expected = self.B.double() @ self.A.double().T + bias.double()
        assert relative_error(found, expected) < 4e-3

    def test_of_a_router(self):
        """In fp32, without a rounding to bf16 before."""
        found = te_gemm.general_gemm(self.A, self.B, out_dtype=torch.float32)[0]
        assert relative_error(found, self.B.double() @ self.A.double().T) < 5e-6

    def test_gradient_of_the_input(self):
        grad = random(2, 3, 24, dtype=BF16)
        found, *others = te_gemm.general_gemm(self.A, grad, layout="NN", grad=True)
        assert others == [None] * 3
        assert relative_error(found, grad.double() @ self.A.double()) < 4e-3

    @pytest.mark.parametrize("accumulate", [False, True])
    def test_gradient_of_the_weight(self, accumulate):
        """Stored in, or added to, fp32 gradients of earlier micro-batches."""
        x, grad = random(6, 40, dtype=BF16), random(6, 24, dtype=BF16, seed=1)
        main_grad = torch.full((24, 40), 2.0, device=x.device)
        bias = random(24, dtype=BF16)
        found, bias_grad, *_ = te_gemm.general_gemm(
            x, grad, layout="NT", out=main_grad, grad=True, accumulate=accumulate, bias=bias
        )
        assert found is main_grad
        expected = grad.double().T @ x.double() + 2 * accumulate
        assert relative_error(main_grad, expected) < 5e-6
        assert bias_grad.dtype == BF16
        assert relative_error(bias_grad, grad.double().sum(0)) < 1e-2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"layout": "TT"}, "layout must be one of TN, NN, NT; got 'TT'"),
            ({"gelu": True}, "needs gelu=None; got True"),
            ({"quantization_params": 1}, "needs quantization_params=None; got 1"),
            ({"bulk_overlap": True}, "bulk_overlap=False, .*; got bulk_overlap=True"),
            ({"alpha": 2.0}, "alpha=1 and .*alpha=2.0"),
            ({"B": B.double()}, r"needs B in bf16, fp16 or fp32; got torch\.float64"),
        ],
    )
    def test_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            te_gemm.general_gemm(**{"A": self.A, "B": self.B, **options})


class TestInTransformerEngine:
    """What Megatron's functions put into its modules."""

    GEMMS = ("cpp_extensions", "module.linear", "module.layernorm_linear")
    NORMS = ("module._common", "module.layernorm_linear", "module.layernorm_mlp")

    @pytest.fixture
    def engine(self, monkeypatch):
        """Its modules, by name behind ``transformer_engine.pytorch.``."""
        found = {}
        for name in ("", *self.GEMMS, *self.NORMS, "module", "module.layernorm"):
            full = f"transformer_engine.pytorch.{name}".rstrip(".")
            found[name] = module = found.get(name, ModuleType(full))
            module.__spec__, module.__path__ = ModuleSpec(full, None), []
            if name in self.GEMMS:
                module.general_gemm = lambda *_: "theirs"
            if name in self.NORMS:
                module.apply_normalization = lambda *_: "theirs"
            monkeypatch.setitem(sys.modules, full, module)
        root = ModuleType("transformer_engine")
        root.__spec__, root.__path__ = ModuleSpec("transformer_engine", None), []
        monkeypatch.setitem(sys.modules, "transformer_engine", root)
        found[""].RMSNorm = type("RMSNorm", (), {"forward": lambda self, x: "theirs"})
        yield found
        disable_batch_invariant_mode("cuda")

    def test_on_and_off(self, engine):
        norm, x = engine[""].RMSNorm(), random(3, 40, dtype=BF16)
        vars(norm).update(weight=random(40, dtype=BF16), eps=1e-5, zero_centered_gamma=True)
        with batch_invariant_mode("cuda"):
            assert {engine[name].general_gemm for name in self.GEMMS} == {te_gemm.general_gemm}
            used = {engine[name].apply_normalization for name in self.NORMS}
            assert used == {norms.apply_normalization}
            expected = norms.rms_norm(x, norm.weight, 1e-5, True, BF16)
            assert torch.equal(norm.forward(x), expected)
        for names, function in (self.GEMMS, "general_gemm"), (self.NORMS, "apply_normalization"):
            assert {getattr(engine[name], function)() for name in names} == {"theirs"}
        assert norm.forward(x) == "theirs"


@needs.gpu
def test_weights_gradients_of_transformer_engine_are_added():
    """Of two micro-batches, in ``main_grad``."""
    te = pytest.importorskip("transformer_engine.pytorch")
    options = SimpleNamespace(bias=False, params_dtype=BF16, device="cuda")
    layer = te.Linear(256, 128, fuse_wgrad_accumulation=True, **vars(options))
    layer.weight.main_grad = torch.zeros(128, 256, device="cuda")
    parts = [(random(64, 256, dtype=BF16), random(64, 128, dtype=BF16, seed=1)) for _ in range(2)]
    with batch_invariant_mode():
        for x, grad in parts:
            layer(x.requires_grad_()).backward(grad)
    expected = sum(grad.double().T @ x.detach().double() for x, grad in parts)
    assert relative_error(layer.weight.main_grad, expected) < 1e-5
