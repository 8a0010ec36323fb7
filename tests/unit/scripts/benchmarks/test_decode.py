"""scripts/benchmarks/decode.py: its cases, its counts, a run on a CPU, and the peers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.inference.backends.reference import paged_reference
from benchmarks.decode import DecodeBenchmark, cases
from benchmarks.decode_cases import IMPLEMENTATIONS, OURS, Case
from benchmarks.decode_report import DecodeReport, Ratio
from benchmarks.kit.report import Refused
from benchmarks.peers import decode as decode_peers
from benchmarks.peers import libraries
from benchmarks.peers.decode import PEERS, Inputs, flash_mla
from tests.support.paged import PagedCase
from tests.unit.inference.test_paged_backends import decode_of_flash_mla

parse_arguments = DecodeBenchmark.parse
TINY = (
    "--device cpu --heads 2 --batches 2 --kv 40 --query-lengths 2 --block-sizes 16 "
    "--kv-lora-rank 16 --qk-pos-emb-head-dim 8 --seconds-per-row 0.01"
)


def test_a_run_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GIT_COMMIT", "abc")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    files = tmp_path / "decode.json", tmp_path / "decode.png"
    more = ["--json", str(files[0]), "--plot", str(files[1])]
    assert DecodeBenchmark.main([*TINY.split(), *more]) == 0
    out = capsys.readouterr().out
    [last] = json.loads(out.splitlines()[-1])
    assert last["environment"]["commit"] == "abc"
    assert last["environment"]["ceilings"]["copy_tbps"] > 0
    assert [row["implementation"] for row in last["rows"]] == list(IMPLEMENTATIONS)
    measured, fp8 = (row for row in last["rows"] if "us" in row)
    assert measured["implementation"] == "ours, reference" and measured["tbps"] > 0
    assert measured["difference"] == fp8["difference"] == 0.0 and not measured["graph"]
    assert fp8["implementation"] == "ours, reference, fp8"

    assert "- it needs a GPU: FlashMLA n=2" in out and "ours, reference" in out
    assert len(DecodeReport.read(files[0]).measured) == 2
    assert files[1].stat().st_size > 1000
    assert DecodeBenchmark.main(["--render", str(files[0])]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]


def test_counts_are_those_of_published_figures():
    """FlashMLA on an H200: 545 us are 536 TFLOP/s, and 324 us with 16 heads are 3.72 TB/s."""
    compute = Case("FlashMLA", 128, 128, 8192, 1, 64)
    assert compute.flops(512, 64) / 545e-6 / 1e12 == pytest.approx(536, rel=2e-3)
    memory = Case("FlashMLA", 16, 128, 8192, 1, 64)
    assert memory.latent_bytes(512, 64, 2) / 324e-6 / 1e12 == pytest.approx(3.72, rel=3e-3)
    fp8 = Case("ours, triton, fp8", 16, 128, 8192, 1, 64)
    assert fp8.latent_bytes(512, 64, 2) == 128 * 8192 * 656
    pair = Case("FlashMLA", 1, 1, 10, 3, 64)
    assert pair.flops(1, 1) == (8 + 9 + 10) * 2 * 3


def test_spaced_requests():
    """Spread evenly up to the longest, which is there."""
    case = Case("FlashMLA", 1, 4, 40, 2, 64, "spaced")
    assert sorted(case.kv_lengths) == [12, 21, 31, 40] and "kv=spaced<=40" in str(case)
    assert case.latent_bytes(3, 1, 2) == (12 + 21 + 31 + 40) * 4 * 2
    assert case.flops(1, 0) == (2 * 104 - 4) * 2 * 2


def test_drawn_requests():
    """The same in every run; their means are those that the description says."""
    drawn = {
        name: Case("FlashMLA", 1, 256, 8192, 1, 64, name).kv_lengths
        for name in ("uniform", "exponential", "one_long")
    }
    assert all(len(each) == 256 and 64 <= min(each) <= max(each) <= 8192 for each in drawn.values())
    assert drawn["uniform"] == Case("", 1, 256, 8192, 1, 64, "uniform").kv_lengths
    assert sum(drawn["uniform"]) / 256 == pytest.approx(4128, rel=0.1)
    assert sum(drawn["exponential"]) / 256 == pytest.approx(1024, rel=0.2)
    assert sorted(drawn["one_long"]) == [128] * 255 + [8192]
    assert Case("", 1, 2, 100, 8, 64, "one_long").kv_lengths == [8, 100]


def test_ratios():
    """Of the times of a turn; a slow turn of both changes nothing."""
    assert Ratio.of([3.0], [2.0]) == Ratio(1.5, 1.5, 1.5)
    assert Ratio.of([1, 10, 3] * 4, [2, 20, 4] * 4) == Ratio(0.5, 0.5, 0.75)


def test_cases():
    sizes = "--heads 16 --query-lengths 1 --batches 128,1,32 --kv 8k --block-sizes 64"
    args = parse_arguments([*sizes.split(), "--lengths", "uniform"])
    found = cases(args, "cuda")
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
    named = cases(parse_arguments(["--implementations", ";".join(names)]), "cuda")[:3]
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
