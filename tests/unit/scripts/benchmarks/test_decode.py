"""scripts/benchmarks/decode*.py: cases, counts, peers, and tokens that differ."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.inference.backends.reference import paged_reference
from benchmarks.decode import IMPLEMENTATIONS, OURS, DecodeBenchmark, DecodeCase, Ratio
from benchmarks.decode_steps import StepCase, StepsBenchmark
from benchmarks.kit import Refused
from benchmarks.peers import decode as decode_peers
from benchmarks.peers import libraries
from benchmarks.peers.decode import PEERS, Inputs, flash_mla
from tests.support.paged import PagedCase
from tests.unit.inference.test_paged_backends import decode_of_flash_mla


def test_counts_are_those_of_published_figures():
    """FlashMLA on an H200: 545 us are 536 TFLOP/s, and 324 us with 16 heads are 3.72 TB/s."""
    compute = DecodeCase("FlashMLA", 128, 128, 8192, 1, 64)
    assert compute.flops(512, 64) / 545e-6 / 1e12 == pytest.approx(536, rel=2e-3)
    memory = DecodeCase("FlashMLA", 16, 128, 8192, 1, 64)
    assert memory.latent_bytes(512, 64, 2) / 324e-6 / 1e12 == pytest.approx(3.72, rel=3e-3)
    fp8 = DecodeCase("ours, triton, fp8", 16, 128, 8192, 1, 64)
    assert fp8.latent_bytes(512, 64, 2) == 128 * 8192 * 656
    pair = DecodeCase("FlashMLA", 1, 1, 10, 3, 64)
    assert pair.flops(1, 1) == (8 + 9 + 10) * 2 * 3


def test_spaced_requests():
    """Spread evenly up to the longest, which is there."""
    case = DecodeCase("FlashMLA", 1, 4, 40, 2, 64, "spaced")
    assert sorted(case.kv_lengths) == [12, 21, 31, 40] and "kv=spaced<=40" in str(case)
    assert case.latent_bytes(3, 1, 2) == (12 + 21 + 31 + 40) * 4 * 2
    assert case.flops(1, 0) == (2 * 104 - 4) * 2 * 2


def test_drawn_requests():
    """The same in every run; their means are those that the description says."""
    drawn = {
        name: DecodeCase("FlashMLA", 1, 256, 8192, 1, 64, name).kv_lengths
        for name in ("uniform", "exponential", "one_long")
    }
    assert all(len(each) == 256 and 64 <= min(each) <= max(each) <= 8192 for each in drawn.values())
    assert drawn["uniform"] == DecodeCase("", 1, 256, 8192, 1, 64, "uniform").kv_lengths
    assert sum(drawn["uniform"]) / 256 == pytest.approx(4128, rel=0.1)
    assert sum(drawn["exponential"]) / 256 == pytest.approx(1024, rel=0.2)
    assert sorted(drawn["one_long"]) == [128] * 255 + [8192]
    assert DecodeCase("", 1, 2, 100, 8, 64, "one_long").kv_lengths == [8, 100]


def test_ratios():
    """Of the times of a turn; a slow turn of both changes nothing."""
    assert Ratio.of([3.0], [2.0]) == Ratio(1.5, 1.5, 1.5)
    assert Ratio.of([1, 10, 3] * 4, [2, 20, 4] * 4) == Ratio(0.5, 0.5, 0.75)


def cases(*argv: str) -> list[DecodeCase]:
    return DecodeBenchmark.cases(SimpleNamespace(args=DecodeBenchmark.parse(argv), on_gpu=True))


def test_cases():
    sizes = "--heads 16 --query-lengths 1 --batches 128,1,32 --kv 8k --block-sizes 64"
    found = cases(*sizes.split(), "--lengths", "uniform")
    assert {case.implementation for case in found} == {
        *OURS,
        "ours, hopper, fp8",
        "ours, triton, fp8",
        *PEERS,
    } - {"ours, reference"}
    assert "ours, hopper" in OURS and "ours, auto" not in OURS
    assert [case.batch for case in found[:: len(IMPLEMENTATIONS) - 2]] == [1, 32, 128]
    assert {(case.kv, case.block_size, case.lengths) for case in found} == {(8192, 64, "uniform")}
    names = ["vLLM, Triton", "ours, triton", "ours, hopper, fp8, parity"]
    named = cases("--implementations", ";".join(names))[:3]
    assert [case.implementation for case in named] == names
    assert [case.batch_invariant for case in named] == [False, False, True]
    assert (named[2].backend, named[2].over_fp8) == ("hopper", True)


class TestPeers:
    INPUTS = Inputs(*PagedCase((2, 2), (70, 40), heads=4, dtype=torch.float32).inputs())

    def test_flash_mla(self, monkeypatch):
        """Query and output in its layout."""
        package = SimpleNamespace(
            get_mla_metadata=lambda *args: ("schedule", "splits"),
            flash_mla_with_kvcache=decode_of_flash_mla,
        )
        monkeypatch.setitem(sys.modules, "flash_mla", package)
        found = flash_mla(self.INPUTS)()
        torch.testing.assert_close(found, paged_reference(*self.INPUTS)[0], atol=1e-5, rtol=1e-5)

    def test_library_of_flash_mla(self, monkeypatch):
        """Without a package: the first call plans, the measured ones use its plan."""
        calls = []

        def forward(query, cache, width, lengths, table, scale, causal, schedule, splits, out):
            calls.append((schedule, splits))
            rows = table, lengths, width
            out, lse = decode_of_flash_mla(
                query, cache, *rows, "schedule", "splits", softmax_scale=scale, causal=causal
            )
            return out, lse, "schedule", "splits"

        for module in ("flash_mla", "vllm"):
            monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setattr(
            decode_peers, "flash_mla_operators", lambda: SimpleNamespace(dense_decode_fwd=forward)
        )
        found = flash_mla(self.INPUTS)()
        torch.testing.assert_close(found, paged_reference(*self.INPUTS)[0], atol=1e-5, rtol=1e-5)
        assert calls == [(None, None), ("schedule", "splits")]

    @pytest.mark.parametrize("name", PEERS)
    def test_what_is_not_installed_says_so(self, monkeypatch, name):
        for module in ("flash_mla", "flashinfer", "vllm"):
            monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setattr(libraries, "FOLDER", Path("/nowhere"))
        with pytest.raises(Refused, match="cannot be imported"):
            PEERS[name](self.INPUTS)


def test_other_tokens_are_an_error_of_decode_steps():
    case = StepCase("default", "loop", 2, "greedy")
    known = {StepCase("default", "megatron", 2, "greedy"): [[1, 2], [3, 4]]}
    benchmark = SimpleNamespace(_tokens=known)
    assert not StepsBenchmark._differs(benchmark, case, [[1, 2], [3, 4]])
    found = StepsBenchmark._differs(benchmark, case, [[1, 2], [3, 5]])
    assert found == "request 1 has other tokens than with Megatron's scheduler"
