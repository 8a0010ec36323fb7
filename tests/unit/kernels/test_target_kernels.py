"""What an indexer learns, by the kernels and by plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.dsa.key_subset import ChosenKeys, VisibleKeys
from absorbed_mla.dsa.sparse_reference import (
    latent_inputs,
    masked_scores,
    probabilities,
    sparse_forward,
)
from tests.support import needs
from tests.support.backends import triton_interpreter
from tests.support.gluon_emulation import emulated
from tests.support.hostile import poisoned_memory
from tests.support.numerics import relative_error

pytest.importorskip("triton.experimental.gluon")
pytestmark = pytest.mark.usefixtures("interpreted")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_HOPPER = needs.HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
SCALE, QUERIES, KEYS, BATCH = 0.2, 6, 70, 2

with triton_interpreter():
    from absorbed_mla.dsa.indexer_backends.hopper import HopperHeadSum
    from absorbed_mla.kernels.dsa.kl_target import chosen_target, visible_target
    from absorbed_mla.kernels.hopper import sparse_target as hopper


def operands(heads, rope, dtype):
    make = torch.Generator().manual_seed(0)
    shapes = (QUERIES, BATCH, heads, 32), (QUERIES, BATCH, heads, rope), (KEYS, BATCH, 32 + rope)
    return [torch.randn(s, generator=make).to(DEVICE, dtype) for s in shapes]


def expected(tensors, subset, lse):
    query = torch.cat(tensors[:2], -1).double()[subset.queries]
    scores = masked_scores(query, subset.take(tensors[2].double()), subset, SCALE)
    return probabilities(scores, lse[subset.queries].permute(1, 2, 0).double()).sum(1)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("heads", "rope", "dtype"),
    [(3, 16, torch.bfloat16), (80, 16, torch.bfloat16), (4, 0, torch.float32)],
    ids=str,
)
class TestTarget:
    def test_visible(self, heads, rope, dtype):
        tensors = operands(heads, rope, dtype)
        span = Span(1, 5, 3, 69, 60)
        subset = VisibleKeys(span, DEVICE, heads)
        lse = torch.randn(QUERIES, BATCH, heads, device=DEVICE) + 3
        inputs = latent_inputs(*tensors)
        four = (*inputs[:2], inputs.k_content.squeeze(2), inputs.k_rope)
        with poisoned_memory():
            found = visible_target(four, lse, subset.queries, 3, 66, 60, SCALE)
        assert relative_error(found.double(), expected(tensors, subset, lse)) < 1e-5

    def test_chosen(self, heads, rope, dtype):
        """A query without keys has an LSE of -inf."""
        tensors = operands(heads, rope, dtype)
        chosen = torch.rand(QUERIES, BATCH, KEYS).topk(67).indices.sort().values.int().to(DEVICE)
        chosen[0] = -1
        chosen[3, :, 5:9] = -1
        inputs = latent_inputs(*tensors)
        lse = sparse_forward(inputs, chosen, SCALE).lse
        four = (*inputs[:2], inputs.k_content.squeeze(2), inputs.k_rope)
        with poisoned_memory():
            found = chosen_target(four, lse, chosen, SCALE)
        truth = expected(tensors, ChosenKeys(slice(0, QUERIES), chosen, heads), lse)
        assert relative_error(found.double(), truth) < 1e-5
        total = found.sum(-1).T
        assert torch.allclose(total[1:], torch.full_like(total[1:], heads), rtol=1e-3)


@dataclass(frozen=True)
class Case:
    """Sizes of a target of chosen keys by the kernel for Hopper."""

    heads: int
    topk: int
    queries: int = 3
    keys: int = 300
    batch: int = 1
    content: int = 128
    dtype: torch.dtype = torch.bfloat16

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        make = torch.Generator().manual_seed(1)
        queries = self.queries, self.batch, self.heads
        shapes = (
            (*queries, self.content),
            (*queries, 64),
            (self.keys, self.batch, self.content + 64),
        )
        *query, kv = (torch.randn(s, generator=make).to(DEVICE, self.dtype) for s in shapes)
        return *query, *kv.split([self.content, 64], dim=-1)

    def chosen(self) -> Tensor:
        """In any order, with holes; the last query has none, the one before few."""
        make = torch.Generator().manual_seed(2)
        order = torch.rand(self.queries, self.batch, self.keys, generator=make).argsort(-1)
        chosen = order[..., : self.topk].int()
        chosen[torch.rand(chosen.shape, generator=make) < 0.2] = -1
        chosen[-2, :, self.topk // 3 :] = -1
        chosen[-1] = -1
        return chosen.to(DEVICE)

    def lse(self) -> Tensor:
        """Of a part of the scores, so that probabilities may be greater than 1; some are -inf."""
        lse = torch.randn(
            self.queries, self.batch, self.heads, generator=torch.Generator().manual_seed(3)
        )
        lse += 2
        lse[-1] = lse[0, 0, 1] = lse[0, -1, -1] = -torch.inf
        return lse.to(DEVICE)


HOPPER_CASES = {
    "two_groups": Case(128, 200, batch=2),
    "one_group": Case(64, 200),
    "fewer_rows": Case(16, 130, queries=4, batch=2, dtype=torch.float16),
    "a_part_of_a_group": Case(100, 64, content=256),
    "several_programs": Case(160, 70),
    "several_programs_of_two_groups": Case(300, 33, queries=2),
    "many_blocks": Case(128, 700, keys=900, queries=2, content=512),
    "many_halves_of_blocks": Case(32, 700, keys=900, queries=2, content=512),
    "one_key": Case(65, 1, keys=1),
}


def target_in_fp64(case: Case) -> Tensor:
    q_content, q_rope, latent, k_rope = (x.double() for x in case.operands())
    lse, chosen = case.lse().double(), case.chosen().long().clamp(min=0).transpose(0, 1)
    scores = torch.einsum("sbnc,kbc->bsnk", q_content, latent)
    scores += torch.einsum("sbnr,kbr->bsnk", q_rope, k_rope)
    chance = (scores * SCALE / 4 - lse.transpose(0, 1)[..., None]).exp()
    chance = chance.masked_fill(lse.transpose(0, 1)[..., None] == -torch.inf, 0.0).sum(2)
    return chance.gather(2, chosen).masked_fill(case.chosen().transpose(0, 1) < 0, 0.0)


def hopper_target(case: Case, seed: int = 0) -> Tensor:
    """On the GPU, or in PyTorch; amid NaN in all memory that must be written."""
    arguments = case.operands(), case.lse(), case.chosen(), SCALE / 4
    with poisoned_memory():
        if ON_HOPPER:
            return hopper.sparse_target(*arguments)
        with emulated(hopper, "sum_sparse_probabilities", "sparse_target_kernel", seed):
            return hopper.sparse_target(*arguments)


@pytest.mark.no_cover
@pytest.mark.skipif(needs.HAS_GPU and not ON_HOPPER, reason=needs.NEEDS_HOPPER)
class TestHopper:
    @pytest.mark.parametrize("name", HOPPER_CASES)
    def test_equals_the_reference(self, name):
        """Also in another order of roles and copies, with the same bits."""
        case = HOPPER_CASES[name]
        found, truth = hopper_target(case), target_in_fp64(case)
        assert found.dtype == torch.float32 and found.shape == truth.shape
        assert torch.equal(found == 0, truth == 0)
        assert relative_error(found.double(), truth) < 1e-4
        for seed in (1, 2):
            assert torch.equal(hopper_target(case, seed), found)

    @pytest.mark.parametrize("changes", [{"queries": 0}, {"topk": 0}, {"keys": 0, "topk": 0}])
    def test_nothing(self, changes):
        case = Case(**{"heads": 16, "topk": 4, **changes})
        tensors = case.operands()
        chosen = torch.full((case.queries, case.batch, case.topk), -1, dtype=torch.int32)
        lse = torch.zeros(case.queries, case.batch, 16)
        found = hopper.sparse_target(tensors, lse.to(DEVICE), chosen.to(DEVICE), SCALE)
        assert found.shape == (case.batch, case.queries, case.topk)

    def test_of_a_chunk_of_queries(self):
        """As the loss calls it."""
        case = Case(64, 100, queries=4, keys=100)
        q_content, q_rope, latent, k_rope = case.operands()
        inputs = latent_inputs(q_content, q_rope, torch.cat((latent, k_rope), -1))
        subset = ChosenKeys(slice(1, 3), case.chosen()[1:3], 1)
        head_sum = HopperHeadSum(inputs, case.lse(), SCALE / 4, torch.float32)
        if ON_HOPPER:
            found = head_sum(subset)
        else:
            with emulated(hopper, "sum_sparse_probabilities", "sparse_target_kernel"):
                found = head_sum(subset)
        assert relative_error(found.double(), target_in_fp64(case)[:, 1:3]) < 1e-4


@pytest.mark.no_cover
@pytest.mark.skipif(not ON_HOPPER, reason=needs.NEEDS_HOPPER)
@pytest.mark.parametrize("heads", [128, 64, 16])
def test_equals_the_triton_kernel(heads):
    """At the widths and the number of keys of DeepSeek-V3.2; the same bits in every run."""
    case = Case(heads, 2048, queries=300, keys=8192, content=512)
    arguments = case.operands(), case.lse() + 8, case.chosen(), SCALE / 4
    found, truth = hopper.sparse_target(*arguments), chosen_target(*arguments)
    assert torch.equal(found == 0, truth == 0)
    assert relative_error(found.double(), truth.double()) < 1e-4
    assert all(torch.equal(hopper.sparse_target(*arguments), found) for _ in range(3))
