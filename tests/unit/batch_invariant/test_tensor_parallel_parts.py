"""Sums over a fixed number of parts on one rank; tests/distributed compares ranks."""

import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import optimizer
from torch import nn

from absorbed_mla import absorb
from absorbed_mla.batch_invariant import (
    batch_invariant_mode,
    enable_batch_invariant_mode,
    megatron_operators,
    norms,
    parts,
    requirements,
)
from absorbed_mla.batch_invariant.cross_entropy import VocabParallelCrossEntropy
from absorbed_mla.batch_invariant.gradients import require_complete_gradients
from absorbed_mla.batch_invariant.tree import tree_sum
from absorbed_mla.serving.llm_options import LLMOptions
from tests.support import needs
from tests.support.backends import triton_interpreter
from tests.support.cases import TINY, config_for
from tests.support.models import MIXED
from tests.support.parity import LAYERS, parity_model, tokens_of, trained

with triton_interpreter():
    import absorbed_mla.kernels.invariant.product
    import absorbed_mla.kernels.invariant.rms_norm  # noqa: F401
    from absorbed_mla.kernels.invariant.matrix_product import matrix_product

# On a GPU the mode is for tensors there.
pytestmark = needs.no_gpu

PARTS = 4


@pytest.fixture
def _on():
    with batch_invariant_mode(tensor_parallel_parts=PARTS):
        yield
    assert parts.fixed.count is None


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def test_norm_of_gradients(_on):
    """The same bits in any division, near the true one; what is not finite shows."""

    def norm(*grads, **kind):
        return optimizer.get_grad_norm_fp32([*grads], **kind)

    whole = drawn(6000) * 10.0 ** (6 * drawn(2, 3000).flatten())
    assert norm(whole) == pytest.approx(whole.double().norm().item(), rel=1e-9)
    assert norm(whole) == norm(*whole.flip(0).split(700)) == norm(whole.view(6, -1), drawn(0))
    assert norm(whole, norm_type=math.inf) == whole.abs().max()
    assert norm() == norm(torch.zeros(3)) == 0
    for wrong in (math.nan, math.inf):
        assert norm(whole, torch.tensor([wrong])) == math.inf


@pytest.mark.parametrize("count", range(1, 10))
def test_tree(count):
    """Neighbours first; what ranks with neighbouring parts have are nodes of it."""
    x = [10.0 ** torch.tensor(i % 3 * 4.0) * drawn(50) for i in range(count)]
    level = x
    while len(level) > 1:
        level = [sum(level[i + 1 : i + 2], level[i]) for i in range(0, len(level), 2)]
    assert torch.equal(tree_sum(x), level[0])
    if count == 8:
        ranks = [tree_sum(x[i : i + 2]) for i in range(0, 8, 2)]
        assert torch.equal(tree_sum(ranks), tree_sum(x))
        assert not torch.equal(sum(x[1:], x[0]), tree_sum(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_of_a_rank(_on, dtype):
    """Two ranks' gates above their up-projections give the sums and columns of one rank's."""
    x, weight = drawn(40, 48, dtype=dtype), drawn(48, 24, dtype=dtype)
    gates, ups = torch.arange(48).chunk(2)
    own = [torch.cat((gates.chunk(2)[rank], ups.chunk(2)[rank])) for rank in range(2)]
    whole = parts.summed_product(x, weight, PARTS, stride=2)
    assert whole.dtype == parts.wide(dtype)
    halves = [parts.summed_product(x[:, i], weight[i], PARTS // 2, stride=2) for i in own]
    assert torch.equal(tree_sum(halves), whole)
    torch.testing.assert_close(whole, x.to(whole.dtype) @ weight.to(whole.dtype))
    left, right = x[:, :24], x[:24]
    columns = parts.side_by_side(left, right, 2 * PARTS)
    for i in own:
        found = parts.side_by_side(left, right[:, i], PARTS)
        assert torch.equal(found, columns[:, i])


def test_names_of_megatron_are_given_back():
    names = megatron_operators.TENSOR_PARALLEL_PARTS.names
    before = [name.of(megatron_operators._OWNERS[name.owner]) for name in names]
    with batch_invariant_mode(tensor_parallel_parts=PARTS), batch_invariant_mode():
        assert parts.fixed.count == PARTS
        inside = [name.of(megatron_operators._OWNERS[name.owner]) for name in names]
        assert not any(new is old for new, old in zip(inside, before))
    after = [name.of(megatron_operators._OWNERS[name.owner]) for name in names]
    assert after == before
    with batch_invariant_mode():
        with batch_invariant_mode(tensor_parallel_parts=PARTS):
            pass
        assert parts.fixed.count is None


def test_cross_entropy(_on):
    logits = drawn(5, 2, 8 * PARTS).requires_grad_()
    target = torch.arange(10).view(5, 2)
    loss = VocabParallelCrossEntropy.apply(logits, target)
    loss.square().sum().backward()
    found, logits.grad = logits.grad, None
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    torch.testing.assert_close(loss.flatten(), expected)
    expected.square().sum().backward()
    torch.testing.assert_close(found, logits.grad)


@pytest.mark.no_cover
class TestKernels:
    """Those of GPUs, in Triton's interpreter: gradients by parts are those of all at once."""

    def gradients(self, function, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        tensors = [nn.Parameter(drawn(*shape)) for shape in shapes]
        out = function(*tensors)
        return [out.detach(), *torch.autograd.grad((out * out.detach()).sum(), tensors)]

    @pytest.mark.parametrize(
        ("function", "shapes"),
        [
            (lambda x, w: norms.rms_norm(x, w, 1e-5, True, x.dtype), [(7, 2, 24), (24,)]),
            (absorb._HeadProduct.apply, [(3, 2, PARTS, 16), (PARTS, 16, 24)]),
        ],
        ids=["norm", "heads"],
    )
    def test_gradients(self, function, shapes):
        with triton_interpreter():
            expected = self.gradients(function, *shapes)
            with batch_invariant_mode(tensor_parallel_parts=PARTS):
                found = self.gradients(function, *shapes)
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    def test_length_of_parts(self):
        """By name, whatever the number of columns."""
        left, right = drawn(3, 192), drawn(192, 5)
        with triton_interpreter():
            found = matrix_product(left, right, part=64)
            some = [matrix_product(left[:, k : k + 64], right[k : k + 64]) for k in (0, 64, 128)]
        assert torch.equal(found, some[0] + some[1] + some[2])


class TestRefused:
    @pytest.mark.parametrize("count", [0, 3, 12])
    def test_number(self, count):
        with pytest.raises(ValueError, match=f"tensor_parallel_parts must be a power .* {count}"):
            enable_batch_invariant_mode(tensor_parallel_parts=count)
        assert parts.fixed.count is None

    @pytest.mark.parametrize(
        "fields",
        [
            {"transformer_impl": "transformer_engine"},
            {"gradient_accumulation_fusion": True},
            {"cross_entropy_loss_fusion": True},
            {**MIXED, "bias_activation_fusion": True},
            {**MIXED, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
        ],
        ids=lambda fields: list(fields)[-1],
    )
    def test_config(self, _on, fields):
        config = config_for(TINY, torch.bfloat16, **fields)
        name = list(fields)[-1]
        with pytest.raises(ValueError, match=f"tensor_parallel_parts does not go with {name}="):
            requirements._require_parts(config)

    def test_what_cannot_be_cut(self):
        """Before anything is computed for heads, in the layer for channels."""
        message = "a rank's 4 of them cannot be cut into 8"
        with (
            batch_invariant_mode(tensor_parallel_parts=8),
            pytest.raises(ValueError, match=message),
        ):
            trained(parity_model(torch.float32), tokens_of(1, 4))
        with batch_invariant_mode(tensor_parallel_parts=4):
            model = parity_model(torch.float32, **{**LAYERS["dense"], "ffn_hidden_size": 42})
            with pytest.raises(ValueError, match=r"tensor_parallel_parts=4 must divide .* 84 of"):
                trained(model, tokens_of(1, 4))

    def test_ranks(self, _on):
        with pytest.raises(ValueError, match="tensor_parallel_parts=4 must be a multiple of the 8"):
            parts.own(SimpleNamespace(size=lambda: 8))

    def test_label_smoothing(self, _on):
        with pytest.raises(ValueError, match="tensor_parallel_parts needs label_smoothing=0"):
            VocabParallelCrossEntropy.apply(drawn(1, 1, 8), torch.zeros(1, 1, dtype=int), 0.1)

    def test_unknown_duplicated_parameter(self, _on):
        """Megatron would sum its gradient over ranks, after all microbatches."""
        layer, ranks = nn.Linear(4, 4), SimpleNamespace(size=lambda: 2)
        require_complete_gradients([layer], None, ranks)
        layer.weight.sequence_parallel = True
        with pytest.raises(ValueError, match="tensor_parallel_parts does not cover weight"):
            require_complete_gradients([layer], None, ranks)
        parts.token_group(layer.weight)
        require_complete_gradients([layer], None, ranks)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tensor_parallel_parts": 3, "parity": True}, "must be one of 2, 4, 8, 16, 32, 64"),
            ({"tensor_parallel_parts": 8}, "needs parity=True"),
        ],
    )
    def test_options_of_llm(self, options, message):
        with pytest.raises(ValueError, match=f"tensor_parallel_parts {message}"):
            LLMOptions(**options)
