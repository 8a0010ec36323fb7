"""scripts/benchmarks/dsa.py: a run on a CPU, its counts and its indices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from benchmarks.dsa import Case, DSABenchmark, DSAReport
from benchmarks.dsa_decode import DSADecodeBenchmark, DSADecodeReport
from benchmarks.dsa_inputs import selection, union
from benchmarks.dsa_layer import DSALayerBenchmark
from tests.support.backends import triton_interpreter
from tests.support.programs import run_script

with triton_interpreter():
    import absorbed_mla.dsa.indexer_backends.triton
    import absorbed_mla.kernels.dsa.backward
    import absorbed_mla.kernels.dsa.cached_scores
    import absorbed_mla.kernels.dsa.forward
    import absorbed_mla.kernels.dsa.index_scores
    import absorbed_mla.kernels.dsa.radix_select
    import absorbed_mla.kernels.paged.forward  # noqa: F401

SCRIPTS = Path(__file__).resolve().parents[4] / "scripts"
TINY = (
    "--device cpu --heads 2 --queries 2 --topk 8 --kv 32 --indexer 32 --indexer-heads 2 "
    "--kv-lora-rank 32 --qk-pos-emb-head-dim 16 --seconds-per-row 0.01"
)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """As the benchmarks themselves set it for a CPU, where it would stay."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_a_run_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GIT_COMMIT", "abc")
    files = tmp_path / "dsa.json", tmp_path / "dsa.png"
    more = ["--json", str(files[0]), "--plot", str(files[1])]
    assert DSABenchmark.main([*TINY.split(), *more]) == 0
    out = capsys.readouterr().out
    [last] = json.loads(out.splitlines()[-1])
    measured = [row for row in last["rows"] if "ms" in row]
    assert [row["implementation"] for row in measured] == [
        *("triton", "triton"),
        *("triton", "triton, in order") * 2,
        *("triton", "triton_fp8"),
    ]
    assert all(row["difference"] < 1e-5 for row in measured[:-2])
    assert all(row["exact"] and row["share"] > 0 for row in measured[-2:])
    assert measured[-2]["agreement"] == 1 > measured[-1]["agreement"] > 0.8
    assert "- it needs compute capability 9.0: forward n=2" in out
    assert len(DSAReport.read(files[0]).measured) == len(measured)


def test_counts_are_those_of_published_figures():
    """FlashMLA on an H200: 3.85 ms are 607 TFLOP/s; TileLang's backward 33.4 ms, 177 TFLOP/s."""
    benchmark = DSABenchmark(DSABenchmark.parse([]))
    for work, seconds, rate in (("forward", 3.85e-3, 607), ("backward", 33.4e-3, 177)):
        flops = benchmark._flops(Case(work, 128, 8192, False, "hopper"))
        assert flops / seconds / 1e12 == pytest.approx(rate, rel=2e-3)


@pytest.mark.parametrize("shared", [False, True])
def test_indices(shared):
    make = torch.Generator().manual_seed(0)
    chosen = selection(64, 4096, 512, shared, make)
    assert chosen.shape == (64, 1, 512) and chosen.dtype == torch.int32
    rows = chosen[:, 0]
    assert (rows.diff(dim=1) > 0).all() and rows.min() >= 0 and rows.max() < 4096
    common = [len(set(a) & set(b)) / 512 for a, b in zip(rows.tolist(), rows[1:].tolist())]
    assert min(common) >= 0.8 if shared else max(common) < 0.3
    assert 1 < union(chosen) < (1.5 if shared else 4)


DECODE = (
    "--device cpu --heads 2 --batches 1 --kv 24 --topk 8 --indexer-heads 2 --indexer-dim 16 "
    "--kv-lora-rank 32 --qk-pos-emb-head-dim 16 --block-size 16 --seconds-per-row 0.001"
)
LAYER = (
    "--device cpu --heads 2 --seq-lens 32 --hidden-size 32 --q-lora-rank 16 --kv-lora-rank 32 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --topk 8 --indexer-heads 2 "
    "--indexer-dim 16 --seconds-per-row 0.001"
)


def test_decode_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GIT_COMMIT", "abc")
    file = tmp_path / "decode.json"
    assert DSADecodeBenchmark.main([*DECODE.split(), "--json", str(file)]) == 0
    out = capsys.readouterr().out
    [last] = json.loads(out.splitlines()[-1])
    sparse, dense = (row for row in last["rows"] if "us" in row)
    assert sparse["implementation"] == "sparse, triton" and dense["implementation"][:5] == "dense"
    assert sparse["difference"] < 1e-5 and sparse["agreement"] == 1
    assert min(sparse["select_us"], sparse["attend_us"]) > 0
    assert out.count("it needs a GPU: ") == 3 and "FlashMLA" in out
    assert len(DSADecodeReport.read(file).measured) == 2


def test_layers_on_a_cpu(tmp_path, capsys):
    """In a process of its own, which leaves its groups."""
    file, script = tmp_path / "layer.json", SCRIPTS / "benchmarks/dsa_layer.py"
    command = [script, *LAYER.split(), "--json", file]
    done = run_script(*command, CUDA_VISIBLE_DEVICES="", GIT_COMMIT="abc")
    assert done.returncode == 0, done.stderr[-2000:]
    out = done.stdout
    [last] = json.loads(out.splitlines()[-1])
    [row] = last["rows"]
    assert row["sparse step_us"] > 0 and row["dense step_us"] > 0
    assert "only supports transformer engine" in out and "requires a CUDA device" in out
    assert DSALayerBenchmark.main(["--render", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]
