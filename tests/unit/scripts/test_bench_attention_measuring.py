"""How scripts/bench_attention.py measures: what it counts, leaves out, and compares with."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

from attention_benchmark import machine, peers, timing
from attention_benchmark.arguments import parse_arguments
from attention_benchmark.cases import CoreCase, attention_flops, document_lengths
from attention_benchmark.core import IMPLEMENTATIONS, build, random_operands
from attention_benchmark.machine import Bench
from attention_benchmark.row import Refused, Row
from context_parallel_benchmark.arguments import DIMS, dims_of
from tests.support.attention_rows import CORE, MEGATRON, OURS, TINY
from tests.support.numerics import relative_error


def test_flops_of_a_pair():
    for form, forward, backward in (("expanded", 640, 1664), ("absorbed", 2176, 5504)):
        pairs = 16 * 8192 * 8192 / 2
        found = attention_flops(CoreCase("ours", form, 16, 8192), DIMS)
        assert found == (pairs * forward, pairs * backward)


@pytest.mark.parametrize("tokens", (1, 7, 64, 65536))
def test_documents_fill_the_pack_and_are_drawn_once(tokens):
    lengths = document_lengths(tokens, 1)
    assert sum(lengths) == tokens and min(lengths) >= 1
    assert lengths == document_lengths(tokens, 1)
    if tokens > 64:
        assert len(set(lengths)) > 3 and lengths != document_lengths(tokens, 2)


def bench(**options) -> Bench:
    """Without a process group."""
    made = object.__new__(Bench)
    made.args = parse_arguments(["out", "--longest-step", "1"], "")
    made.processes = SimpleNamespace(**options)
    made._known = {}
    made.begin = time.monotonic()
    return made


def test_a_case_that_fails_is_a_row_and_the_next_is_measured(monkeypatch):
    def measure(case, args, processes):
        if case.implementation == "megatron":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return dataclasses.replace(OURS, case=case)

    monkeypatch.setattr(machine, "measure_layer", measure)
    first, second = (bench().measure(row.case) for row in (MEGATRON, OURS))
    assert first == Row(case=MEGATRON.case, error="OutOfMemoryError: CUDA out of memory")
    assert second == OURS


def test_a_long_case_is_left_out(monkeypatch):
    monkeypatch.setattr(
        machine, "measure_core", lambda case, *_: dataclasses.replace(CORE, case=case)
    )
    subject = bench()
    assert not subject.measure(CORE.case).error
    # 0.003 s at 8k are 0.77 s at 128k and 3 s at 256k.
    assert not subject.measure(dataclasses.replace(CORE.case, tokens=2**17)).error
    subject._known.clear()
    subject.measure(CORE.case)
    left_out = subject.measure(dataclasses.replace(CORE.case, tokens=2**18))
    assert left_out.error == "left out: a step would take about 3 s (--longest-step)"
    other = dataclasses.replace(CORE.case, tokens=2**18, form="absorbed")
    assert not subject.measure(other).error


def test_late_cases_are_left_out():
    subject = bench()
    subject.begin -= 241
    assert subject.measure(CORE.case).error == "left out: 240 s are over (--time-limit)"


def test_an_implementation_without_backward_has_its_forward(monkeypatch):
    def without_backward(operands, scale):
        return (lambda: torch.zeros(8, 1, 2, 16)), ()

    monkeypatch.setitem(peers.FUNCTIONS, "torch, cudnn", without_backward)
    row = measure_tiny("torch, cudnn", "expanded")
    assert row.forward and row.backward is None and row.step is None
    assert row.error.startswith("backward: RuntimeError:")


def tiny_processes() -> SimpleNamespace:
    generator = torch.Generator().manual_seed(1)
    return SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.float32,
        on_gpu=False,
        random=lambda *shape: torch.randn(shape, generator=generator),
        synchronize=lambda: None,
    )


def measure_tiny(implementation: str, form: str) -> Row:
    case = CoreCase(implementation, form, 2, 8)
    return machine.measure_core(case, parse_arguments(["out", *TINY], ""), tiny_processes())


@pytest.mark.parametrize("form", ("expanded", "absorbed"))
def test_peers_compute_what_ours_computes(form, monkeypatch):
    """The same inputs, the same scale, the same mask; gradients of all inputs."""
    math = [torch.nn.attention.SDPBackend.MATH]
    sdpa = torch.nn.attention.sdpa_kernel
    monkeypatch.setattr(peers, "sdpa_kernel", lambda backends: sdpa(math))
    args = parse_arguments(["out", *TINY], "")
    results = []
    for implementation in ("ours, reference", "torch, efficient"):
        case = CoreCase(implementation, form, 2, 48)
        attention = build(case, args, tiny_processes())
        out = attention.forward()
        results.append((out, attention.backward(out)))
    (ours, grads), (theirs, their_grads) = results
    assert relative_error(theirs, ours.out) < 1e-5
    if form == "absorbed":
        query = torch.cat((grads.q_content, grads.q_rope), dim=-1)
        key = torch.cat((grads.k_content, grads.k_rope.unsqueeze(2)), dim=-1)
    else:
        # Joined in the operands, as in a layer.
        query, key = grads.q_content, grads.k_content
        assert relative_error(their_grads[2], grads.value) < 1e-5
    assert relative_error(their_grads[0], query) < 1e-5
    assert relative_error(their_grads[1], key) < 1e-5


def test_nothing_is_joined_while_the_expanded_form_is_timed():
    dims = dims_of(parse_arguments(["out", *TINY], ""))
    operands = random_operands(CoreCase("", "expanded", 2, 8), dims, tiny_processes())
    q, k, v = operands.as_multi_head()
    assert q is operands.q_content and k is operands.k_content and v is operands.value
    assert [x.shape for x in (q, k, v)] == [(8, 1, 2, 24), (8, 1, 2, 24), (8, 1, 2, 16)]


class FusedAttention(torch.nn.Module):
    """TransformerEngine's DotProductAttention, as far as it is asked here."""

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


def test_transformer_engine_computes_fused_or_is_refused(monkeypatch):
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


def test_a_device_that_is_lost_ends_no_script(monkeypatch):
    def gone(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(machine, "measure_core", gone)
    monkeypatch.setattr(torch.cuda, "empty_cache", gone)
    assert "illegal memory access" in bench().measure(CORE.case).error


def test_the_reference_is_for_small_sizes():
    args = parse_arguments(["out"], "")
    processes = SimpleNamespace(
        device=torch.device("cpu"),
        dtype=torch.float32,
        random=lambda *shape: torch.empty(1, 1, 576),
    )
    with pytest.raises(Refused, match="small sizes only"):
        machine.measure_core(CoreCase("ours, reference", "absorbed", 128, 8192), args, processes)


def test_every_backend_of_ours_is_measured():
    assert {"ours, cudnn", "ours, reference", *peers.FUNCTIONS} <= {*IMPLEMENTATIONS}
    assert "ours, auto" not in IMPLEMENTATIONS


def test_repetitions_and_ceilings():
    calls = []
    repeated = timing.Repeated(
        lambda: calls.append("f"), lambda _: calls.append("b"), calls.clear, False
    )
    forward, backward, step = repeated.times(1.0, 3.5)
    assert forward.repetitions == backward.repetitions == step.repetitions == 3
    assert step.median >= max(forward.median, backward.median)
    found = timing.ceilings(on_gpu=False)
    assert found["matmul_tflops"] > 0 and found["copy_tbps"] > 0
