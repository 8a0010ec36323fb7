"""How scripts/bench_context_parallel.py measures: what it counts is what is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

import bench_context_parallel
from context_parallel_benchmark import layers
from context_parallel_benchmark.arguments import Case, parse_arguments
from context_parallel_benchmark.measure import CaseError, _together, repetitions
from context_parallel_benchmark.overlap import covered_fraction, kernels, merged
from context_parallel_benchmark.report import Report


@pytest.mark.parametrize(
    "these, others, fraction",
    (
        ([], [(0, 1)], None),
        ([(0, 10)], [], 0),
        ([(0, 10)], [(10, 20)], 0),
        ([(0, 10)], [(-5, 20)], 1),
        ([(0, 10)], [(2, 4), (3, 5), (9, 30)], 0.4),
        ([(0, 4), (2, 10), (20, 30)], [(8, 25)], 0.35),
        ([(20, 30), (0, 10)], [(26, 27), (1, 2), (3, 21), (24, 25)], 0.55),
    ),
)
def test_covered_fraction(these, others, fraction):
    assert covered_fraction(these, others) == (
        None if fraction is None else pytest.approx(fraction)
    )


def test_merged():
    assert merged([(5, 6), (1, 3), (2, 4), (4, 5)]) == [(1, 6)]
    assert merged([(0, 9), (1, 2), (10, 11)]) == [(0, 9), (10, 11)]


def test_kernels_of_a_trace():
    """Copies and the ranges that the profiler draws around collectives are no kernels."""
    events = [
        {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL(a)", "ts": 5, "dur": 2},
        {"cat": "kernel", "name": "sm90_gemm", "ts": 1.5, "dur": 3},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 5, "dur": 2},
        {"cat": "gpu_user_annotation", "name": "nccl:_all_gather_base", "ts": 5, "dur": 2},
        {"cat": "kernel", "name": "at::cuda::spin_kernel(long)", "ts": 0, "dur": 1},
        {"ph": "M", "name": "process_name"},
    ]
    assert kernels(events) == ([(5, 7)], [(1.5, 4.5)])


def test_repetitions():
    assert repetitions(11, 10) == 1
    assert repetitions(9, 10) == 3
    assert repetitions(1, 10) == 10
    assert repetitions(1e-9, 10) == 100


def test_an_error_of_another_rank_is_everyones():
    class Processes:
        def meet(self):
            pass

        synchronize = meet

        def first_error(self, error):
            return error and f"rank 0: {error}"

    processes = Processes()
    assert _together(processes, lambda: 3) == 3
    with pytest.raises(CaseError, match="rank 0: ValueError: why"):
        _together(processes, lambda: (_ for _ in ()).throw(ValueError("why")))
    processes.first_error = lambda error: "rank 1: memory"
    with pytest.raises(CaseError, match="rank 1: memory"):
        _together(processes, lambda: 3)


@pytest.mark.parametrize("implementation", ["ours", "megatron"])
@pytest.mark.parametrize(("recompute", "expected"), [("none", None), ("mla_up_proj",) * 2])
def test_the_layer_is_told_what_its_case_recomputes(
    implementation, recompute, expected, monkeypatch
):
    """Also Megatron's, which no machine without TransformerEngine builds."""
    told = []

    def layer_config(case, args, processes, recompute):
        told.append(recompute)
        raise InterruptedError

    monkeypatch.setattr(layers, "layer_config", layer_config)
    case = Case(implementation, "p2p", "expanded", 16, 2, "sbhd", 1, recompute)
    with pytest.raises(InterruptedError):
        layers.build(case, parse_arguments(["out"], ""), None)
    assert told == [expected]


def run(command: list[str], **environment: str) -> str:
    """A command's output; torchrun is asked to end, because only then it ends its workers."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, problems = process.communicate(timeout=300)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    assert process.returncode == 0, problems
    return output


def test_two_processes(tmp_path):
    """Bytes are of [latent | k_rope] of 48 + 8 numbers in float32, of 32 tokens."""
    script = Path(bench_context_parallel.__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script), str(tmp_path), "--seconds-per-row", "0.01"]
    command += ["--sizes", "64", "--heads", "4", "--layouts", "sbhd,thd", "--documents", "2"]
    command += ["--hidden-size", "32", "--q-lora-rank", "16", "--kv-lora-rank", "48"]
    command += ["--qk-head-dim", "8", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "8"]
    command += ["--recompute", "none,mla_up_proj"]
    output = run(command, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    json.loads(output.splitlines()[-1])
    report = Report.read(tmp_path / "context_parallel.json")
    assert len(report.rows) == 12
    assert {"flash-attn-4", "nvidia-cutlass-dsl", "triton"} < {*report.environment["versions"]}
    for row in report.rows:
        if row.case.implementation == "megatron":
            assert "transformer" in row.error.lower()
            continue
        assert not row.error and row.ran == "expanded, reference"
        assert row.cp_size == 2 and len(row.step_seconds) >= 1
        assert all(0 < f < s for f, s in zip(row.forward_seconds, row.step_seconds))
        floats = {
            what: sum(r["bytes"] for r in row.traffic[what] if r["dtype"] == "float32")
            for what in ("forward", "backward")
        }
        around = row.case.cp_comm_type == "p2p"
        # The ring's backward sends latents again, recomputed or not.
        gathers_again = row.case.recompute == "mla_up_proj" and not around
        exchanges = 1 + around + gathers_again
        assert floats == {"forward": 32 * 56 * 4, "backward": exchanges * 32 * 56 * 4}
        assert row.backward_sent_bytes == floats["backward"]
        operations = {r["operation"] for r in row.traffic["backward"]}
        expected = {"reduce-scatter"} | ({"all-gather"} if gathers_again else set())
        assert operations == ({"send"} if around else expected)
