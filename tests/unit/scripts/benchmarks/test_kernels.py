"""Benchmarks of kernels and layers: their counts, what is compared with what, and the peers."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.core_attention.backends.reference import reference_forward
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.inference.backends.reference import paged_reference
from benchmarks import attention, context_parallel, core_attention
from benchmarks.attention import AttentionBenchmark, AttentionReport, LayerCase, document_lengths
from benchmarks.context_parallel import CPBenchmark, CPReport, RingCase
from benchmarks.core_attention import CoreCase, attention_flops
from benchmarks.decode import DecodeBenchmark, DecodeCase, Ratio
from benchmarks.dsa import DSABenchmark, DSACase
from benchmarks.dsa_inputs import selection, union
from benchmarks.kit import DIMS, Refused, Times, processes
from benchmarks.peers import decode as decode_peers
from benchmarks.peers import libraries
from benchmarks.peers.attention import PEERS, transformer_engine
from tests.support.numerics import relative_error
from tests.support.paged import PagedCase
from tests.unit.inference.test_paged_backends import decode_of_flash_mla

TINY = ["out", "--quick"]


def cases(benchmark, *argv: str) -> list:
    """Those of a command line, on a GPU."""
    args = benchmark.parse(argv)
    return benchmark.cases(SimpleNamespace(args=args, on_gpu=True))


def times(seconds: float) -> Times:
    return Times(seconds, seconds / 2, 2 * seconds, 3)


class TestCounts:
    """They are those of published figures."""

    def test_attention(self):
        for form, forward, backward in (("expanded", 640, 1664), ("absorbed", 2176, 5504)):
            pairs = 16 * 8192 * 8192 / 2
            found = attention_flops(CoreCase("ours", form, 16, 8192), DIMS)
            assert found == (pairs * forward, pairs * backward)

    def test_decode(self):
        """FlashMLA on an H200: 545 us are 536 TFLOP/s, and 324 us with 16 heads are 3.72 TB/s."""
        compute = DecodeCase("FlashMLA", 128, 128, 8192, 1, 64)
        assert compute.flops(512, 64) / 545e-6 / 1e12 == pytest.approx(536, rel=2e-3)
        memory = DecodeCase("FlashMLA", 16, 128, 8192, 1, 64)
        assert memory.latent_bytes(512, 64, 2) / 324e-6 / 1e12 == pytest.approx(3.72, rel=3e-3)
        fp8 = DecodeCase("ours, triton, fp8", 16, 128, 8192, 1, 64)
        assert fp8.latent_bytes(512, 64, 2) == 128 * 8192 * 656
        pair = DecodeCase("FlashMLA", 1, 1, 10, 3, 64)
        assert pair.flops(1, 1) == (8 + 9 + 10) * 2 * 3

    def test_sparse(self):
        """FlashMLA on an H200: 3.85 ms are 607 TFLOP/s; TileLang's backward 33.4 ms, 177."""
        args, content, rope = DSABenchmark.parse([]), 512, 64
        benchmark = SimpleNamespace(args=args, content=content, rope=rope)
        for work, seconds, rate in (("forward", 3.85e-3, 607), ("backward", 33.4e-3, 177)):
            count = DSABenchmark.flops(benchmark, DSACase(work, 128, 8192, False, "hopper"))
            assert count / seconds / 1e12 == pytest.approx(rate, rel=2e-3)

    def test_lengths_of_requests(self):
        """The same in every run; their means are those that the description says."""
        drawn = {
            name: DecodeCase("FlashMLA", 1, 256, 8192, 1, 64, name).kv_lengths
            for name in ("uniform", "exponential", "one_long")
        }
        assert all(len(x) == 256 and 64 <= min(x) <= max(x) <= 8192 for x in drawn.values())
        assert drawn["uniform"] == DecodeCase("", 1, 256, 8192, 1, 64, "uniform").kv_lengths
        assert sum(drawn["uniform"]) / 256 == pytest.approx(4128, rel=0.1)
        assert sum(drawn["exponential"]) / 256 == pytest.approx(1024, rel=0.2)
        assert sorted(drawn["one_long"]) == [128] * 255 + [8192]
        assert sorted(DecodeCase("", 1, 2, 100, 8, 64, "one_long").kv_lengths) == [8, 100]

    @pytest.mark.parametrize("shared", [False, True])
    def test_chosen_keys(self, shared):
        chosen = selection(64, 4096, 512, shared, torch.Generator().manual_seed(0))
        assert chosen.shape == (64, 1, 512) and chosen.dtype == torch.int32
        rows = chosen[:, 0]
        assert (rows.diff(dim=1) > 0).all() and rows.min() >= 0 and rows.max() < 4096
        common = [len(set(a) & set(b)) / 512 for a, b in zip(rows.tolist(), rows[1:].tolist())]
        assert min(common) >= 0.8 if shared else max(common) < 0.3
        assert 1 < union(chosen) < (1.5 if shared else 4)

    @pytest.mark.parametrize("tokens", (1, 7, 64, 65536))
    def test_documents_fill_the_pack_and_are_drawn_once(self, tokens):
        lengths = document_lengths(tokens, 1)
        assert sum(lengths) == tokens and min(lengths) >= 1
        assert lengths == document_lengths(tokens, 1)
        if tokens > 64:
            assert len(set(lengths)) > 3 and lengths != document_lengths(tokens, 2)


class TestCases:
    def test_of_decode(self):
        sizes = "--heads 16 --query-lengths 1 --batches 128,1,32 --kv 8k --block-sizes 64"
        found = cases(DecodeBenchmark, *sizes.split(), "--lengths", "uniform")
        names = {case.implementation for case in found}
        assert {"ours, hopper", "ours, triton, fp8", *decode_peers.PEERS} <= names
        assert not {"ours, reference", "ours, auto", "ours, hopper, parity"} & names
        assert [case.batch for case in found[:: len(names)]] == [1, 32, 128]
        assert {(c.kv, c.block_size, c.lengths) for c in found} == {(8192, 64, "uniform")}
        names = ["ours, triton", "ours, hopper, fp8, parity"]
        plain, other = cases(DecodeBenchmark, "--implementations", ";".join(names))[:2]
        assert not plain.batch_invariant and other.batch_invariant
        assert (other.backend, other.over_fp8) == ("hopper", True)

    def test_of_context_parallelism(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        sizes = "out --sizes 1k,16 --heads 2 --layouts sbhd,thd --documents 2"
        found = cases(CPBenchmark, *sizes.split(), "--recompute", "none,mla_up_proj")
        assert [case.tokens for case in found] == [16] * 12 + [1024] * 12
        assert [(c.implementation, c.cp_comm_type, c.recompute) for c in found[2:5]] == [
            ("megatron", "p2p", "none"),
            ("ours", "all_gather", "mla_up_proj"),
            ("ours", "p2p", "mla_up_proj"),
        ]
        assert [(c.layout, c.documents) for c in found[4:8]] == [("sbhd", 1)] * 2 + [("thd", 2)] * 2
        assert str(found[5]) == "megatron p2p expanded recompute mla_up_proj sbhd S=16 n=2"


MEGATRON = attention.Row(
    case=LayerCase("megatron", True, 128, 8192, "thd"),
    forward=times(0.01),
    backward=times(0.03),
    step=times(0.04),
    kept_bytes=1000 * 2**20,
)
OURS = dataclasses.replace(
    MEGATRON,
    case=LayerCase("ours", True, 128, 8192, "thd"),
    step=times(0.038),
    kept_bytes=250 * 2**20,
)
RING = context_parallel.Row(
    case=RingCase("ours", "all_gather", "expanded", 16384, 128, "sbhd", 1, "none"),
    cp_size=2,
    step_seconds=[0.06, 0.05, 0.1],
    kept_bytes=2**29,
    forward_sent_bytes=8192 * 1152,
    backward_sent_bytes=8192 * 2304,
)
MEGATRONS_RING = dataclasses.replace(
    RING,
    case=RingCase("megatron", "p2p", "expanded", 16384, 128, "sbhd", 1, "none"),
    step_seconds=[0.04],
    kept_bytes=2**30,
    forward_sent_bytes=8192 * 80000,
    backward_sent_bytes=8192 * 265600,
)


def changed(row, **changes):
    """A row of another case."""
    return dataclasses.replace(row, case=dataclasses.replace(row.case, **changes))


class TestRatios:
    """Like is compared with like: memory saved by recomputation is not the layer's own doing."""

    def test_of_layers(self):
        found = AttentionReport({}, [MEGATRON, OURS])
        assert found.ratios(OURS) == {"forward": 1.0, "step": pytest.approx(0.95), "kept": 0.25}
        assert found.ratios(MEGATRON) == {}
        for change in ({"heads": 16}, {"tokens": 4096}, {"layout": "sbhd"}, {"recompute": False}):
            assert found.ratios(changed(OURS, **change)) == {}

    def test_of_rings(self):
        found = CPReport({}, [RING, MEGATRONS_RING])
        assert found.ratios(RING) == {"bytes": 0.01, "time": 1.5, "kept": 0.5}
        assert found.peer(dataclasses.replace(RING, cp_size=4)) is None
        assert found.peer(changed(RING, recompute="mla_up_proj")) is None
        failed = dataclasses.replace(MEGATRONS_RING, error="rank 1: CUDA out of memory")
        assert CPReport({}, [RING, failed]).ratios(RING) == {}

    def test_bytes_per_token_are_for_each_other_rank(self):
        four = dataclasses.replace(RING, cp_size=4, forward_sent_bytes=4096 * 3 * 1152)
        assert four.bytes_per_token["forward"] == RING.bytes_per_token["forward"] == 1152

    def test_of_decode(self):
        """Of the times of a turn; a slow turn of both changes nothing."""
        assert Ratio.of([3.0], [2.0]) == Ratio(1.5, 1.5, 1.5)
        assert Ratio.of([1, 10, 3] * 4, [2, 20, 4] * 4) == Ratio(0.5, 0.5, 0.75)


class FusedAttention(torch.nn.Module):
    """TransformerEngine's DotProductAttention, as far as it is used here."""

    def __init__(self, heads, widths, num_gqa_groups, **options):
        super().__init__()
        self.heads, self.widths, self.groups, self.options = heads, widths, num_gqa_groups, options

    def forward(self, q, k, v):
        found = (os.environ["NVTE_FUSED_ATTN"], os.environ["NVTE_FLASH_ATTN"])
        assert found == ("1", "0") and os.environ["NVTE_UNFUSED_ATTN"] == "0"
        assert (q.shape[2], k.shape[2]) == (self.heads, self.groups)
        if v.shape[2] != self.heads:
            raise ValueError("No dot product attention backend is available for the inputs.")
        views = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        scale = self.options["softmax_scale"]
        out = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3).flatten(2)


class TestPeersOfAttention:
    def measure(self, implementation: str, form: str) -> attention.Row:
        case, args = CoreCase(implementation, form, 2, 8), AttentionBenchmark.parse(TINY)
        device = processes.Device(1)
        return attention.Row(case=case, **core_attention.measure_core(case, args, device))

    @pytest.mark.parametrize("form", ("expanded", "absorbed"))
    def test_they_compute_what_ours_computes(self, form, monkeypatch):
        """The same inputs, the same scale, the same mask; gradients of all inputs."""
        sdpa = torch.nn.attention.sdpa_kernel
        math = [torch.nn.attention.SDPBackend.MATH]
        monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda backends: sdpa(math))
        args, results = AttentionBenchmark.parse(TINY), []
        for implementation in ("ours, reference", "torch, efficient"):
            case = CoreCase(implementation, form, 2, 48)
            subject = core_attention.build_core(case, args, processes.Device(1))
            out = subject.forward()
            results.append((out, subject.backward(out)))
        (ours, grads), (theirs, their_grads) = results
        assert relative_error(theirs, ours.out) < 1e-5
        if form == "absorbed":
            query = torch.cat((grads.q_content, grads.q_rope), dim=-1)
            key = torch.cat((grads.k_content, grads.k_rope.unsqueeze(2)), dim=-1)
        else:
            # Joined in the inputs, as in a layer.
            query, key = grads.q_content, grads.k_content
            assert relative_error(their_grads[2], grads.value) < 1e-5
        assert relative_error(their_grads[0], query) < 1e-5
        assert relative_error(their_grads[1], key) < 1e-5

    @pytest.mark.parametrize("form", ("expanded", "absorbed"))
    def test_the_library_of_flash_attention_3_gets_our_inputs(self, form, monkeypatch):
        """It has a forward only."""

        def attend(q, k, v, qv, scale, *, cu_seqlens, cu_seqlens_k, max_seqlen, num_splits):
            assert cu_seqlens.tolist() == cu_seqlens_k.tolist() == [0, max_seqlen] == [0, len(q)]
            inputs = AttentionInputs.multi_head(q[:, None], k[:, None], v[:, None])
            if qv is not None:
                inputs = AttentionInputs(qv[:, None], q[:, None], v[:, None], k, None)
            rules = ScoreRules(scale=scale, spans=(Span(0, len(q), 0, len(q), 0),))
            return reference_forward(inputs, rules).out[:, 0]

        monkeypatch.setattr(libraries, "require_flash_attention_3", lambda: None)
        monkeypatch.setattr(libraries, "flash_attention_3", attend)
        args = AttentionBenchmark.parse(TINY)
        ours, theirs = (
            core_attention.build_core(CoreCase(name, form, 2, 8), args, processes.Device(1))
            for name in ("ours, reference", "FlashAttention-3")
        )
        assert relative_error(theirs.forward(), ours.forward().out) < 1e-6
        row = self.measure("FlashAttention-3", form)
        assert row.forward and row.backward is None and row.step is None
        assert row.error.startswith("backward: ")

    def test_transformer_engine_computes_fused_or_is_refused(self, monkeypatch):
        """Its output is [S, B, N * V], and its settings are left as they were."""
        module = SimpleNamespace(DotProductAttention=FusedAttention)
        monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
        # Megatron's models set it for the process.
        monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
        monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
        row = self.measure("TransformerEngine", "expanded")
        assert row.step and not row.error
        with pytest.raises(Refused, match="cuDNN's attention does not take this"):
            self.measure("TransformerEngine", "absorbed")
        assert os.environ["NVTE_FLASH_ATTN"] == "1" and "NVTE_FUSED_ATTN" not in os.environ
        assert PEERS["TransformerEngine"] is transformer_engine

    def test_the_reference_is_for_small_sizes(self):
        device = SimpleNamespace(random=lambda *shape: torch.empty(1, 1, shape[-1]))
        case = CoreCase("ours, reference", "absorbed", 128, 8192)
        with pytest.raises(Refused, match="small sizes only"):
            core_attention.measure_core(case, AttentionBenchmark.parse(["out"]), device)


class TestPeersOfDecode:
    INPUTS = decode_peers.Inputs(
        *PagedCase((2, 2), (70, 40), heads=4, dtype=torch.float32).inputs()
    )

    def test_flash_mla(self, monkeypatch):
        """The first call plans, the measured ones use its plan."""
        calls = []

        def forward(query, cache, width, lengths, table, scale, causal, schedule, splits, out):
            calls.append((schedule, splits))
            rows = table, lengths, width
            out, lse = decode_of_flash_mla(
                query, cache, *rows, "schedule", "splits", softmax_scale=scale, causal=causal
            )
            return out, lse, "schedule", "splits"

        operators = SimpleNamespace(dense_decode_fwd=forward)
        monkeypatch.setattr(decode_peers, "flash_mla_operators", lambda: operators)
        found = decode_peers.flash_mla(self.INPUTS)()
        torch.testing.assert_close(found, paged_reference(*self.INPUTS)[0], atol=1e-5, rtol=1e-5)
        assert calls == [(None, None), ("schedule", "splits")]

    @pytest.mark.parametrize("name", decode_peers.PEERS)
    def test_what_is_not_installed_says_so(self, monkeypatch, name):
        monkeypatch.setitem(sys.modules, "vllm", None)
        monkeypatch.setattr(libraries, "FOLDER", Path("/nowhere"))
        with pytest.raises(Refused, match="cannot be imported"):
            decode_peers.PEERS[name](self.INPUTS)
