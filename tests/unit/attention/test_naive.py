"""The layer, both forms, beside the equations of the paper as ``absorbed_mla/naive.py`` has them.

Three evaluations that share no code: the layer, ``naive.py``, and the oracle in float64.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from absorbed_mla import naive
from absorbed_mla.naive import NaiveMLA, naive_absorbed, naive_expanded
from tests import oracle
from tests.oracle import OracleMLA
from tests.support.cases import TINY, random_weights
from tests.support.execution import execute
from tests.support.harness import Setup, named_tensors
from tests.support.layouts import dense
from tests.support.numerics import bounds_from_eager, compare

# Released models have mscale == mscale_all_dim, so that cosines and sines are not scaled.
SHAPES = {
    "yarn": replace(TINY, mscale=0.707),
    "rope, no q_lora_rank": replace(
        TINY, q_lora_rank=None, rope_type="rope", scaling_factor=1.0, mscale_all_dim=0.0
    ),
    "no norms": replace(TINY, mscale=0.707, latent_norm=False),
    "no rope": replace(TINY, rope=0, rope_type="rope"),
}
FORMS = {"expanded": naive_expanded, "absorbed": naive_absorbed}
TOKENS = dense(13, 2)


def naive_mla(mla: OracleMLA, w: dict[str, Tensor]) -> NaiveMLA:
    """The same layer, of the same weights."""
    yarn = mla.rope_type == "yarn"
    return NaiveMLA(
        w_dq=w.get("w_dq"),
        w_uq=w["w_q" if mla.q_lora_rank is None else "w_uq"].unflatten(0, (mla.heads, -1)),
        w_dkv=w["w_dkv"],
        w_uk=w["w_uk"].unflatten(0, (mla.heads, -1)),
        w_uv=w["w_uv"].unflatten(0, (mla.heads, -1)),
        w_o=w["w_o"].unflatten(1, (mla.heads, -1)),
        q_norm=w.get("q_norm"),
        kv_norm=w.get("kv_norm"),
        eps=mla.norm_eps,
        theta=oracle.yarn_frequencies(mla)
        if yarn
        else oracle.rope_frequencies(mla.rope, mla.rotary_base),
        mscale=oracle.yarn_temperature(mla.scaling_factor, mla.mscale_all_dim),
    )


def given(mla: OracleMLA) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Weights, input and output gradient, float64 of numbers that fp32 holds."""
    weights = {n: w.float().double() for n, w in random_weights(mla).items()}
    x, output_grad = (TOKENS.random_rows(mla.hidden, seed).float().double() for seed in (1, 2))
    return weights, x, output_grad


def evaluate(form: str, mla: OracleMLA, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of a naive form, by the names of the layer's parameters."""
    weights, x, output_grad = given(mla)
    weights = {n: w.to(dtype).requires_grad_() for n, w in weights.items()}
    x = x.to(dtype).requires_grad_()
    output = FORMS[form](x, naive_mla(mla, weights))
    grads = torch.autograd.grad(output, [x, *weights.values()], output_grad.to(dtype))
    rows = [t.detach().flatten(0, 1) for t in (output, grads[0])]
    return named_tensors(mla, oracle.OracleResult(*rows, dict(zip(weights, grads[1:]))))


def truth(mla: OracleMLA, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The same from the oracle, its equations evaluated in ``dtype``."""
    weights, *rows = given(mla)
    rows = [t.flatten(0, 1) for t in rows]
    found = oracle.evaluate(mla, weights, *rows, TOKENS.sequences, dtype=dtype)
    return named_tensors(mla, found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
class TestEquations:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_agree_with_the_oracle(self, shape, form, dtype):
        """In float64, where only the order of sums differs, and hence with each other.

        In fp32 three times what the oracle's own equations lose in it: other orders of sums.
        """
        mla, bound = SHAPES[shape], 1e-12
        if dtype == torch.float32:
            bound = bounds_from_eager(truth(mla, dtype), truth(mla), dtype)
        compare(evaluate(form, mla, dtype), truth(mla), bound).check()

    def test_the_layer_agrees(self, shape, form):
        """Both are as far from the truth as fp32 is, hence up to twice as far from each other."""
        mla = SHAPES[shape]
        layer = execute(mla, Setup(form=form, dtype=torch.float32), TOKENS).tensors
        bounds = bounds_from_eager(truth(mla, torch.float32), truth(mla), torch.float32)
        bounds = {name: 2 * bound for name, bound in bounds.items()}
        compare(layer, evaluate(form, mla, torch.float32), bounds).check()


def test_it_needs_nothing_but_torch():
    """And can be read in one go."""
    lines = Path(naive.__file__).read_text().splitlines()
    modules = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert modules == {"__future__", "math", "dataclasses", "torch"}
    assert len(lines) < 80
