"""Parity mode over tensor-parallel ranks: 2 as they are, 4 with sums by a tree over them."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

from absorbed_mla.batch_invariant import batch_invariant_mode, collectives, megatron_operators
from absorbed_mla.batch_invariant.tree import tree_sum
from tests.support import needs, world
from tests.support.combinations import few_ranks, thinned
from tests.support.parity import LAYERS, differences, parity_model

pytestmark = needs.processes(2, 4)


# Megatron trains mixtures of experts over tensor-parallel ranks with sequence parallelism only.
LAYERS_AND_DTYPES = [
    pytest.param("dense", torch.float32, False, marks=needs.no_gpu),
    ("dense", torch.bfloat16, True),
    pytest.param("mixed", torch.float32, True, marks=needs.no_gpu),
    ("mixed", torch.bfloat16, True),
]


@pytest.mark.parametrize(
    ("layers", "dtype", "sequence_parallel"),
    # Both of everything, also where not all combinations are run.
    LAYERS_AND_DTYPES[:: (3 if world.size() == 2 else 4) if thinned() else 1],
)
def test_every_way_gives_the_same_bits(layers, dtype, sequence_parallel, **more):
    with batch_invariant_mode():
        model = parity_model(
            dtype,
            tensor_model_parallel_size=world.tp_size(),
            sequence_parallel=sequence_parallel,
            **LAYERS[layers],
            **more,
        )
        assert differences(model) == []


@few_ranks
def test_every_way_over_an_fp8_cache_gives_the_same_bits():
    """Ranks round the same latents, of which each has all."""
    options = {"latent_cache_dtype": "fp8", "train_on_cached_latents": True}
    test_every_way_gives_the_same_bits("dense", torch.bfloat16, True, options=options)


def parts(dtype: torch.dtype = torch.float32, rows: int = 8) -> torch.Tensor:
    """This rank's summand, [rows, 5]."""
    generator = torch.Generator().manual_seed(world.rank())
    return torch.randn(rows, 5, generator=generator).to(world.device(), dtype)


class TestSums:
    """A token's sum does not depend on where in the buffer it lies."""

    @pytest.fixture(autouse=True)
    def _on(self, monkeypatch):
        # The host's own way for 2 ranks is left aside here.
        monkeypatch.setattr(collectives, "_COMMUTATIVE_RANKS", 1)
        with batch_invariant_mode():
            yield

    @pytest.mark.parametrize("most", [0, 1 << 20], ids=["shared", "whole"])
    def test_all_reduce(self, most, monkeypatch):
        monkeypatch.setattr(collectives, "_SHARED_ELEMENTS", most)
        x, group = parts(), world.tp_group()
        expected = tree_sum(world.gather(x[None], 0))
        assert torch.equal(mappings._reduce(x.clone(), group), expected)
        for row in range(len(x)):
            assert torch.equal(mappings._reduce(x[row].clone(), group), expected[row])

    @pytest.mark.parametrize("dim", [0, -1], ids=["first", "last"])
    def test_reduce_scatter(self, dim):
        x, group = parts().T if dim else parts(), world.tp_group()
        expected = world.own_part(tree_sum(world.gather(x.contiguous()[None], 0)), dim)
        scatter = (
            mappings._reduce_scatter_along_last_dim
            if dim
            else mappings._reduce_scatter_along_first_dim
        )
        assert torch.equal(scatter(x, group), expected)

    def test_reduce_scatter_of_uneven_parts(self):
        x, group, ranks = parts(), world.tp_group(), world.tp_size()
        sizes = [1] * (ranks - 1) + [len(parts()) - ranks + 1]
        expected = tree_sum(world.gather(x[None], 0)).split(sizes)[dist.get_rank(group)]
        found = mappings._reduce_scatter_along_first_dim(x, group, input_split_sizes=sizes)
        assert torch.equal(found, expected)

    def test_given_back(self):
        with batch_invariant_mode():
            pass
        assert mappings._reduce is collectives.reduce_by_tree


def test_the_host_sums_again_afterwards():
    with batch_invariant_mode():
        assert mappings._reduce is collectives.reduce_by_tree
    assert mappings._reduce is megatron_operators.megatron_reduce
    assert mappings._reduce_scatter_along_first_dim is megatron_operators.megatron_reduce_scatter
