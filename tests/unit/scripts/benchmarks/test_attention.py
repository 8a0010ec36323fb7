"""scripts/benchmarks/attention.py: its cases, what is compared with what, and the peers."""

from __future__ import annotations

import dataclasses
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import attention, core_attention
from benchmarks.attention import (
    AttentionBenchmark,
    AttentionReport,
    LayerCase,
    Row,
    document_lengths,
)
from benchmarks.core_attention import CoreCase, attention_flops
from benchmarks.kit import DIMS, Refused, Times, dims_of, processes
from benchmarks.peers.attention import PEERS
from tests.support.numerics import relative_error

parse_arguments = AttentionBenchmark.parse
TINY = ["out", "--quick", "--form", "expanded"]


def cases(args) -> list:
    """Those that are left of the command line's."""
    return AttentionBenchmark.chosen(SimpleNamespace(args=args, cases=lambda: all_cases(args)))


def all_cases(args) -> list:
    return AttentionBenchmark.cases(SimpleNamespace(args=args))


def times(seconds: float) -> Times:
    return Times(seconds, seconds / 2, 2 * seconds, 3)


MEGATRON = Row(
    case=LayerCase("megatron", True, 128, 8192, "thd"),
    forward=times(0.01),
    backward=times(0.03),
    step=times(0.04),
    kept_bytes=1000 * 2**20,
    peak_bytes=2000 * 2**20,
)
OURS = dataclasses.replace(
    MEGATRON,
    case=LayerCase("ours", True, 128, 8192, "thd"),
    step=times(0.038),
    kept_bytes=250 * 2**20,
    ran="expanded, cudnn",
)
CORE = Row(
    case=CoreCase("torch, cudnn", "expanded", 16, 8192),
    forward=times(0.001),
    backward=times(0.002),
    step=times(0.003),
)


def report(*rows: Row) -> AttentionReport:
    return AttentionReport({"dims": DIMS}, list(rows))


def changed(row: Row, **changes) -> Row:
    """A row of another case."""
    return dataclasses.replace(row, case=dataclasses.replace(row.case, **changes))


class TestCases:
    def test_what_matters_comes_first_and_smaller_ones_before_larger(self):
        found = cases(parse_arguments(["out", "--heads", "128,16", "--seq-lens", "2k,1k"]))
        layers = [case for case in found if isinstance(case, LayerCase)]
        assert found[: len(layers)] == layers and len(layers) == 2 * 2 * 2 * 4
        assert [c.tokens for c in layers] == 2 * (8 * [1024] + 8 * [2048])
        # Like is measured beside like.
        assert layers[:2] == [
            LayerCase("megatron", True, 16, 1024, "sbhd"),
            LayerCase("ours", True, 16, 1024, "sbhd"),
        ]
        assert {c.recompute for c in layers[:16]} == {True}
        names = {case.implementation for case in found[len(layers) :]}
        assert {"ours, cudnn", "ours, reference", *PEERS} <= names and "ours, auto" not in names

    def test_some(self):
        only = cases(parse_arguments(["out", "--only", "cudnn"]))
        assert {case.implementation for case in only} == {"ours, cudnn", "torch, cudnn"}
        assert {type(c) for c in cases(parse_arguments(["out", "--suite", "layer"]))} == {LayerCase}

    def test_flops_of_a_pair(self):
        for form, forward, backward in (("expanded", 640, 1664), ("absorbed", 2176, 5504)):
            pairs = 16 * 8192 * 8192 / 2
            found = attention_flops(CoreCase("ours", form, 16, 8192), DIMS)
            assert found == (pairs * forward, pairs * backward)

    @pytest.mark.parametrize("tokens", (1, 7, 64, 65536))
    def test_documents_fill_the_pack_and_are_drawn_once(self, tokens):
        lengths = document_lengths(tokens, 1)
        assert sum(lengths) == tokens and min(lengths) >= 1
        assert lengths == document_lengths(tokens, 1)
        if tokens > 64:
            assert len(set(lengths)) > 3 and lengths != document_lengths(tokens, 2)


class TestBench:
    """The loop around measurements."""

    @pytest.fixture
    def bench(self, monkeypatch) -> AttentionBenchmark:
        monkeypatch.setattr(processes, "Processes", processes.Device)
        return AttentionBenchmark(parse_arguments(["out", "--time-limit", "240"]))

    def test_a_case_that_fails_is_a_row_and_the_next_is_measured(self, bench, monkeypatch):
        def measure_layer(case, args, processes):
            if case.implementation == "megatron":
                raise torch.OutOfMemoryError("CUDA out of memory")
            return {"step": OURS.step, "ran": "form, backend"}

        monkeypatch.setattr(attention, "measure_layer", measure_layer)
        first, second = (bench.row(row.case) for row in (MEGATRON, OURS))
        assert first == Row(case=MEGATRON.case, error="OutOfMemoryError: CUDA out of memory")
        assert second == Row(case=OURS.case, step=OURS.step, ran="form, backend")

    def test_a_long_case_is_left_out(self, bench, monkeypatch):
        monkeypatch.setattr(core_attention, "measure_core", lambda *_: {"step": CORE.step})
        bench.row(CORE.case)
        # 0.003 s at 8k are 12 s at 512k.
        left_out = bench.row(changed(CORE, tokens=2**19).case)
        assert left_out.error == "left out: a step would take about 12 s"
        assert not bench.row(changed(CORE, tokens=2**19, form="absorbed").case).error

    def test_late_cases_are_left_out(self, bench):
        bench.args.begin -= 241
        assert bench.row(CORE.case).error == "left out: 240 s are over (--time-limit)"

    def test_a_device_that_is_lost_ends_no_script(self, bench, monkeypatch):
        def gone(*args):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(core_attention, "measure_core", gone)
        monkeypatch.setattr(torch.cuda, "empty_cache", gone)
        assert "illegal memory access" in bench.row(CORE.case).error
        assert bench.row(OURS.case).error.startswith(f"left out: {CORE.case} took the device away")


def measure_tiny(implementation: str, form: str) -> Row:
    case = CoreCase(implementation, form, 2, 8)
    args = parse_arguments(TINY)
    return Row(case=case, **core_attention.measure_core(case, args, processes.Device(1)))


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
            raise ValueError(
                "No dot product attention backend is available for the provided inputs. Please ..."
            )
        views = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        scale = self.options["softmax_scale"]
        out = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3).flatten(2)


class TestPeers:
    @pytest.mark.parametrize("form", ("expanded", "absorbed"))
    def test_peers_compute_what_ours_computes(self, form, monkeypatch):
        """The same inputs, the same scale, the same mask; gradients of all inputs."""
        sdpa = torch.nn.attention.sdpa_kernel
        math = [torch.nn.attention.SDPBackend.MATH]
        monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda backends: sdpa(math))
        args = parse_arguments(TINY)
        results = []
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

    def test_nothing_is_joined_while_the_expanded_form_is_timed(self):
        dims = dims_of(parse_arguments(TINY))
        case = CoreCase("", "expanded", 2, 8)
        inputs = core_attention.random_inputs(case, dims, processes.Device(1))
        q, k, v = inputs.as_multi_head()
        assert q is inputs.q_content and k is inputs.k_content and v is inputs.value
        assert [x.shape for x in (q, k, v)] == [(8, 1, 2, 32), (8, 1, 2, 32), (8, 1, 2, 16)]

    def test_transformer_engine_computes_fused_or_is_refused(self, monkeypatch):
        """Its output is [S, B, N * V], and its settings are left as they were."""
        module = SimpleNamespace(DotProductAttention=FusedAttention)
        monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
        # Megatron's models set it for the process.
        monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
        monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
        row = measure_tiny("TransformerEngine", "expanded")
        assert row.step and not row.error
        with pytest.raises(Refused, match="cuDNN's attention does not take this"):
            measure_tiny("TransformerEngine", "absorbed")
        assert os.environ["NVTE_FLASH_ATTN"] == "1" and "NVTE_FUSED_ATTN" not in os.environ

    def test_an_implementation_without_backward_has_its_forward(self, monkeypatch):
        def without_backward(inputs, scale):
            return (lambda: torch.zeros(8, 1, 2, 16)), ()

        monkeypatch.setitem(PEERS, "torch, cudnn", without_backward)
        row = measure_tiny("torch, cudnn", "expanded")
        assert row.forward and row.backward is None and row.step is None
        assert row.error.startswith("backward: RuntimeError:")

    def test_the_reference_is_for_small_sizes(self):
        device = SimpleNamespace(random=lambda *shape: torch.empty(1, 1, shape[-1]))
        case = CoreCase("ours, reference", "absorbed", 128, 8192)
        with pytest.raises(Refused, match="small sizes only"):
            core_attention.measure_core(case, parse_arguments(["out"]), device)


class TestReport:
    def test_ratios_are_of_the_same_input_with_the_same_recomputation(self):
        """Otherwise memory saved by recomputation looks like the layer's own doing."""
        found = report(MEGATRON, OURS)
        assert found.ratios(OURS) == {"forward": 1.0, "step": pytest.approx(0.95), "kept": 0.25}
        assert found.ratios(MEGATRON) == {}
        for change in ({"heads": 16}, {"tokens": 4096}, {"layout": "sbhd"}, {"recompute": False}):
            assert found.ratios(changed(OURS, **change)) == {}
        plain = changed(OURS, recompute=False)
        theirs = dataclasses.replace(changed(MEGATRON, recompute=False), step=times(0.019))
        both = report(theirs, plain, MEGATRON, OURS)
        assert both.peer(OURS) is MEGATRON and both.ratios(plain)["step"] == pytest.approx(2)

    def test_rates_of_attention_alone(self):
        """16 heads x 8192^2 / 2 pairs x 640 or 1664, in 1 and 2 ms."""
        rates = report(CORE).tflops(CORE)
        assert [round(rate) for rate in rates.values()] == [344, 447, 412]
