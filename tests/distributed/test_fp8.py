"""The layer with TransformerEngine's linear layers in FP8, against the float64 oracle.

Run as ``torchrun --nproc-per-node N -m pytest tests/distributed/test_fp8.py`` with N = 1 (one GPU)
or 2 (TP 2 with sequence parallelism, CP 2).
"""

from dataclasses import replace

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from tests.support import needs, world
from tests.support.cases import WIDE
from tests.support.execution import Execution, execute
from tests.support.harness import Setup
from tests.support.layouts import dense, packed
from tests.support.numerics import Deviation, relative_error

pytestmark = needs.gpu_with("TransformerEngine", None if HAVE_TE else "it is not installed")

# Widths of DeepSeek-V3's latents: 576 is no multiple of a block of 128.
MLA = replace(WIDE, hidden=512, heads=8, q_lora_rank=384, kv_lora_rank=512, nope=128, v=128)
RECIPES = ("tensorwise", "blockwise", "delayed")
FORMS = ("absorbed", "expanded")
LAYOUTS = {
    "sbhd": dense(128, 2),
    "thd": packed((96, 32, 128)),
    "padded": packed((90, 38), (96, 160)),
}
# Two roundings to three bits of significand a product, some products one after the other, and
# gradients with two bits; an operand that is scaled wrongly is off by more.
BOUND = 0.2
# More than bf16's 0.01: otherwise nothing was in FP8.
FLOOR = 0.02
# TP, CP and sequence parallelism.
SIZES = [(1, 1, False)] if world.size() == 1 else [(2, 1, True), (2, 1, False), (1, 2, False)]


@pytest.fixture(params=SIZES, ids=lambda x: "tp{}-cp{}-sp{:d}".format(*x))
def sequence_parallel(request):
    """Whether there is sequence parallelism, in a world of these sizes."""
    tp, cp, sp = request.param
    with world.parallel(tp=tp, cp=cp):
        yield sp


def trained(layout: str = "sbhd", **setup) -> Execution:
    fields = {"dtype": torch.bfloat16, "backend": "transformer_engine", "fp8_recipe": "tensorwise"}
    return execute(MLA, Setup(**{**fields, **setup}), LAYOUTS[layout])


def errors(execution: Execution) -> dict[str, float]:
    """Relative errors of output and gradients."""
    exact = execution.oracle(execution.table())
    return {name: relative_error(x, exact[name]) for name, x in execution.tensors.items()}


def check(found: dict[str, float]) -> None:
    Deviation(found, dict.fromkeys(found, BOUND)).check("in FP8")
    assert found["output"] > FLOOR, f"{found['output']:.1e} is bf16's error"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_oracle(sequence_parallel, recipe, form, layout):
    check(
        errors(trained(layout, fp8_recipe=recipe, form=form, sequence_parallel=sequence_parallel))
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", FORMS)
def test_recomputation_changes_nothing(sequence_parallel, recipe, form):
    setup = {"fp8_recipe": recipe, "form": form, "sequence_parallel": sequence_parallel}
    plain, again = trained(**setup), trained(**setup, recompute=("mla_up_proj",))
    differing = {
        name: relative_error(again.tensors[name], x)
        for name, x in plain.tensors.items()
        if not torch.equal(again.tensors[name], x)
    }
    # Kernels of attention may add gradients in any order.
    assert differing.keys() <= {*plain.tensors} - {"output"}
    assert all(error < FLOOR for error in differing.values()), differing


@pytest.mark.parametrize("recipe", RECIPES)
def test_parameters_in_fp8(sequence_parallel, recipe):
    setup = {"fp8_recipe": recipe, "fp8_param": True, "sequence_parallel": sequence_parallel}
    for form in FORMS:
        execution = trained(form=form, **setup)
        check(errors(execution))
    attention = execution.attention
    # What both forms multiply with is not quantized.
    for layer in (attention.linear_k_up_proj, attention.linear_v_up_proj):
        assert type(layer.weight) is torch.nn.Parameter and layer.weight.dtype == torch.bfloat16
    assert type(attention.linear_proj.weight) is not torch.nn.Parameter


def test_forms_agree(sequence_parallel):
    """They differ by less than FP8 differs from the oracle."""
    absorbed, expanded = (trained(form=form, sequence_parallel=sequence_parallel) for form in FORMS)
    for name, error in errors(absorbed).items():
        assert relative_error(absorbed.tensors[name], expanded.tensors[name]) < error, name
