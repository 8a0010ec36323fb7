"""Attention backends under test: requests, determinism, Triton's interpreter, cases of the grid."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from absorbed_mla import MLADims
from absorbed_mla.core_attention.backend import AttentionRequest
from absorbed_mla.core_attention.forms.absorbed import AbsorbedForm
from absorbed_mla.core_attention.forms.expanded import ExpandedForm
from absorbed_mla.registry import ATTENTION_BACKENDS
from tests.oracle import OracleMLA
from tests.support import needs, quick_interpreter, world
from tests.support.cases import INTERPRETED, WIDE, config_for
from tests.support.harness import Setup
from tests.support.layouts import LAYOUTS

if not needs.HAS_GPU:
    quick_interpreter.quicken()

# DeepSeek-V3's layer on one rank.
V3_DIMS = MLADims(
    hidden_size=7168,
    num_heads=128,
    num_heads_per_rank=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
FORMS = {"absorbed": AbsorbedForm(), "expanded": ExpandedForm(1)}


@contextlib.contextmanager
def determinism(demanded: bool, warn_only: bool = False) -> Iterator[None]:
    """Set ``torch.use_deterministic_algorithms`` inside the block."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(demanded, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


@contextlib.contextmanager
def triton_interpreter() -> Iterator[None]:
    """Use Triton's interpreter inside the block on a machine without a GPU.

    Triton decides when a kernel is decorated, so kernels must be imported inside. In other tests
    "auto" must not choose interpreted kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("TRITON_INTERPRET", "1")
        yield


def interpret_kernel(patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
    """Replace a kernel of an imported module by its interpreted form, without a GPU."""
    if world.device().type != "cuda":
        import triton

        with triton_interpreter():
            interpreted = triton.jit(getattr(module, name).fn)
        patch.setattr(module, name, interpreted)


def multiply_in_one_order(patch: pytest.MonkeyPatch) -> None:
    """Make interpreted matrix products sum every element in the same order, as a GPU does.

    The interpreter leaves products to numpy's BLAS, which on some CPUs gives a row other bits at
    another place in its block (OpenBLAS on AMD's).
    """
    from triton.runtime import interpreter

    def create_dot(_builder, left, right, total, *_):
        dtype = total.data.dtype
        a, b, found = left.data.astype(dtype), right.data.astype(dtype), total.data.copy()
        for k in range(a.shape[-1]):
            found += a[..., :, k, None] * b[..., None, k, :]
        return interpreter.TensorHandle(found, total.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def attention_request(form: str, **changes) -> AttentionRequest:
    """A request for DeepSeek-V3's attention on a GPU, with ``changes`` to its fields."""
    key_width, value_width = {"absorbed": (576, 512), "expanded": (192, 128)}[form]
    fields = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16, "key_width": key_width}
    fields |= {"value_width": value_width, "form": form}
    return AttentionRequest(**{**fields, "masked": False, "dropout": False, **changes})


def why_not(backend: str, request: AttentionRequest) -> str | None:
    """Why ``backend`` cannot do what is requested, or None."""
    return ATTENTION_BACKENDS[backend].why_not(request)


def refusal_of(backend: str, form: str, mla: OracleMLA, dtype: torch.dtype) -> str | None:
    """Why ``backend`` cannot attend in a layer of this shape on this machine, or None."""
    dims = MLADims.from_config(config_for(mla, dtype), world.tp_size())
    key_width, value_width = FORMS[form].widths(dims)
    widths = {"key_width": key_width, "value_width": value_width}
    return why_not(backend, attention_request(form, device=world.device(), dtype=dtype, **widths))


@dataclass(frozen=True)
class KernelCase:
    """A point of the oracle's grid that a kernel of this machine must pass."""

    form: str
    core_attention_backend: str
    mla: OracleMLA
    dtype: torch.dtype
    layout: str
    recomputes: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        names = [self.core_attention_backend, self.form, dtype, self.layout]
        return "-".join([*names, "recomputed" if self.recomputes else "kept"])

    def setup(self, **more) -> Setup:
        """The setup that runs this case."""
        return Setup(
            form=self.form,
            core_attention_backend=self.core_attention_backend,
            dtype=self.dtype,
            recompute=("mla_up_proj", "core_attn") if self.recomputes else (),
            **more,
        )


_KERNELS = {
    "flash_attention_4": "expanded",
    "cudnn": "expanded",
    "hopper_expanded": "expanded",
    "transformer_engine": "expanded",
    "hopper": "absorbed",
    "triton": "absorbed",
}


def kernel_cases() -> list[KernelCase]:
    """All kernels on a GPU; elsewhere Triton's, interpreted."""
    if not torch.cuda.is_available():
        points = (("sbhd", False), ("thd_padded", True))
        return [
            KernelCase("absorbed", "triton", INTERPRETED, torch.float32, *point) for point in points
        ]
    points = [(torch.bfloat16, layout, recomputes) for layout in LAYOUTS for recomputes in (0, 1)]
    points += [(torch.float16, "sbhd", 0), (torch.float16, "thd_padded", 1)]
    return [
        KernelCase(form, name, WIDE, dtype, layout, bool(recomputes))
        for name, form in _KERNELS.items()
        for dtype, layout, recomputes in points
    ]


@contextlib.contextmanager
def kernels_running(case: KernelCase) -> Iterator[None]:
    """Prepare this machine for a kernel; skips the test if the kernel cannot run here.

    Deterministic algorithms only warn, because "auto" would replace some kernels otherwise. The
    setting also fills uninitialised memory with NaN.
    """
    with triton_interpreter(), determinism(True, warn_only=True):
        reason = refusal_of(case.core_attention_backend, case.form, case.mla, case.dtype)
        if reason:
            says = f"{case.core_attention_backend}: {reason}"
            pytest.skip(says if needs.HAS_GPU else needs.NEEDS_GPU)
        yield
