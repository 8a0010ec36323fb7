"""The kernels as backends: what they refuse, and layers that train with them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from absorbed_mla.core_attention.backends import triton as dense
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.dsa.backend import SparseRequest, choose_implementation
from absorbed_mla.dsa.key_subset import chosen_keys, visible_keys
from absorbed_mla.registry import INDEXER_BACKENDS, SPARSE_BACKENDS
from tests.oracle_dsa import OracleDSA, OracleLoss
from tests.support import needs, world
from tests.support.backends import determinism, triton_interpreter
from tests.support.cases import INTERPRETED, WIDE
from tests.support.dsa_layer import check
from tests.support.harness import Setup
from tests.support.layouts import grid_layout

pytest.importorskip("triton.experimental.gluon")

with triton_interpreter():
    from absorbed_mla.kernels.dsa import (  # noqa: F401
        backward,
        forward,
        index_chosen,
        index_gradient,
        index_scores,
        kl_target,
        radix_select,
    )

REQUEST = SparseRequest(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    heads=128,
    kv_lora_rank=512,
    rope_dim=64,
    index_heads=64,
    index_dim=128,
    topk=2048,
    relu=True,
    deterministic=False,
)
# Triton's interpreter runs kernels only where there is no GPU.
ON_DEVICE = replace(REQUEST, device=world.device())
LAYERS = ["local", "transformer_engine"] if HAVE_TE else ["local"]
HOPPER = needs.HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
ALL = [SPARSE_BACKENDS, INDEXER_BACKENDS]
BOTH = pytest.mark.parametrize("registry", ALL)


class TestChoice:
    @BOTH
    def test_a_cpu_takes_the_reference(self, registry):
        """Also where Triton's interpreter could run kernels."""
        assert choose_implementation(registry, "auto", REQUEST).name == "reference"
        with triton_interpreter():
            assert choose_implementation(registry, "auto", REQUEST).name == "reference"
            named = choose_implementation(registry, "triton", ON_DEVICE)
        assert named.name == "triton"

    @pytest.mark.skipif(needs.HAS_GPU, reason="there is a GPU")
    @pytest.mark.parametrize(
        ("registry", "name"),
        [(registry, name) for registry in ALL for name in ("hopper", "triton")],
    )
    def test_without_a_gpu(self, registry, name):
        with pytest.raises(ValueError, match=f"{name}: it needs a GPU"):
            choose_implementation(registry, name, REQUEST)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"dtype": torch.float64}, "it computes in fp16 and bf16"),
            ({"kv_lora_rank": 24}, "not powers of two from 16"),
            ({"index_dim": 48}, "dsa_indexer_head_dim must be one of .*, it is 48"),
            ({"index_dim": 512}, "dsa_indexer_head_dim must be one of .*, it is 512"),
            ({"index_heads": 129}, "dsa_indexer_n_heads must be at most 128, it is 129"),
            ({"topk": 8193}, "dsa_indexer_topk must be at most 8192, it is 8193"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_limits(self, changes, reason):
        with triton_interpreter(), pytest.raises(ValueError, match=reason):
            choose_implementation(INDEXER_BACKENDS, "triton", replace(ON_DEVICE, **changes))

    @pytest.mark.skipif(not HOPPER, reason=needs.NEEDS_HOPPER)
    def test_hopper(self):
        request = replace(REQUEST, device=torch.device("cuda"))
        narrow = replace(request, rope_dim=32)
        for registry in ALL:
            assert choose_implementation(registry, "hopper", request).name == "hopper"
            assert choose_implementation(registry, "auto", request).name == "hopper"
            assert choose_implementation(registry, "triton", narrow).name == "triton"
            with pytest.raises(ValueError, match="qk_pos_emb_head_dim must be 64, it is 32"):
                choose_implementation(registry, "hopper", narrow)
        with pytest.raises(ValueError, match="dsa_indexer_topk must be at most 8192, it is 8193"):
            choose_implementation(INDEXER_BACKENDS, "hopper", replace(request, topk=8193))

    @pytest.mark.parametrize(
        ("capability", "rows", "taken"),
        [((9, 0), "model", "hopper"), ((9, 0), "fp8", "triton"), ((8, 0), "fp8", "reference")],
    )
    def test_over_a_cache(self, capability, rows, taken, monkeypatch):
        """FP8 rows are read by Triton's kernels where the GPU knows FP8."""
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        # It asks for the shared memory of a real device.
        monkeypatch.setattr(dense, "_why_not_shared_memory", lambda *_: None)
        request = replace(REQUEST, device=torch.device("cuda"), latent_cache_dtype=rows)
        assert choose_implementation(SPARSE_BACKENDS, "auto", request).name == taken
        if rows == "fp8":
            reasons = {(9, 0): "not FP8 rows", (8, 0): "hopper: it needs"}
            with pytest.raises(ValueError, match=reasons[capability]):
                choose_implementation(SPARSE_BACKENDS, "hopper", request)

    @needs.gpu
    def test_limits_of_the_chosen_keys_are_true(self):
        """The largest selection that is not refused."""
        scores = torch.rand(1, 2, 40000, device="cuda")
        found = radix_select.radix_select(scores, 8192, 0, None)
        assert torch.equal(found[:, 0], scores[0].topk(8192).indices.sort().values.int())


STAGES = {
    "sparse": (2, OracleLoss(coefficient=0.7, sparse=True)),
    "between": (2, OracleLoss(coefficient=0.7, sparse=False)),
    # More keys than the kernels choose.
    "warm_up": (10_000, OracleLoss(coefficient=0.7, sparse=False)),
}


@pytest.mark.no_cover
@pytest.mark.skipif(needs.HAS_GPU, reason="kernels compute in fp32 in Triton's interpreter only")
@pytest.mark.parametrize("stage", STAGES)
def test_training(stage):
    """A layer against the oracle: output, loss and all gradients, with two sequences in a pack."""
    topk, loss = STAGES[stage]
    dsa = OracleDSA(mla=INTERPRETED, heads=3, width=16, topk=topk)
    setup = Setup(dtype=torch.float32, sparse_attention_backend="triton", indexer_backend="triton")
    with triton_interpreter(), determinism(stage == "sparse"):
        check(dsa, setup, grid_layout("thd", False), loss, bound=1e-5)


@pytest.mark.no_cover
@needs.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layers", LAYERS)
def test_training_on_a_gpu(layers, stage, backend):
    """In bf16, all keys chosen."""
    _, loss = STAGES[stage]
    dsa = OracleDSA(mla=replace(WIDE, heads=16), heads=4, width=64, topk=64)
    setup = Setup(
        dtype=torch.bfloat16,
        backend=layers,
        sparse_attention_backend=backend,
        indexer_backend=backend,
    )
    check(dsa, setup, grid_layout("thd", False), loss, dense=True, bound=0.05)


def test_chunks_of_a_loss_that_gathers_nothing():
    """They have room for scores alone."""
    assert not INDEXER_BACKENDS["triton"].gathers_keys
    indices = torch.arange(20 * 2 * 3, dtype=torch.int32).view(20, 2, 3)
    found = [*chosen_keys(indices, 1, elements=8 * 2 * 3)]
    assert [one.queries for one in found] == [slice(0, 8), slice(8, 16), slice(16, 20)]
    assert all(torch.equal(one.indices, indices[one.queries]) for one in found)


def test_chunks_of_a_choice_fill_a_gpu():
    """Thousands of queries while their scores fit; with ranks that take turns, fewer."""
    from absorbed_mla.dsa.selection_triton import chunk_queries

    for keys, count in ((8192, 4), (2**15, 64)):
        spans = Spans([Span(0, keys, 0, keys, 0)])
        found = visible_keys(spans, 1, torch.device("cpu"), queries=chunk_queries(None))
        assert len([*found]) == count
    assert chunk_queries(SimpleNamespace(size=lambda: 4)) == 512
    assert chunk_queries(SimpleNamespace(size=lambda: 16)) == 256
