"""Every benchmark runs its tiny cases on a CPU; what cannot run there says why, in its row.

What is compared must be right there, too: a benchmark whose works compute different things would
compare their times all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import prefix_tiers
from benchmarks.attention import AttentionReport
from benchmarks.context_parallel import CPReport
from benchmarks.decode import IMPLEMENTATIONS as DECODERS
from benchmarks.decode_context_parallel import LAYOUTS, SharedReport
from benchmarks.drawing import DRAWS
from benchmarks.grouped_experts import KINDS
from benchmarks.qk_clip import SUITES, QKClipReport
from tests.support import needs
from tests.support.programs import run_script
from tests.unit.scripts.benchmarks.registered import BENCHMARKS, FOLDER

pytestmark = needs.no_gpu

# Their trainings, conversions and servers are programs of their own: see the tests of their names.
ELSEWHERE = {"conversion", "fp8_training", "pretraining", "serving"}
# It needs a matrix product that adds in one order on a CPU, see test_kernels.py.
ELSEWHERE |= {"invariant_products"}
RANKS = {"context_parallel": 2, "decode_context_parallel": 2}
# Triton interprets our kernels.
INTERPRETED = {"grouped_experts"}
# Why something of a benchmark cannot run here.
REASONS = re.compile(
    "needs a GPU|compute capability 9.0|computes in fp16 and bf16|transformer-engine|"
    "TransformerEngine|cannot be imported|no such kernel|last dimension|not among|requires a CUDA|"
    "transformer engine|'NoneType' object is not callable"
)
Rows = list[dict]


def measured(rows: Rows) -> Rows:
    return [row for row in rows if not row.get("error")]


def attention(rows: Rows, out: str, folder: Path) -> None:
    found = AttentionReport.read(folder / "attention.json")
    layers = [(row.case.recompute, row.case.layout) for row in found.of("layer")]
    assert layers == [(True, "sbhd"), (True, "thd"), (False, "sbhd"), (False, "thd")]
    assert {row.suite for row in found.rows[8:]} == {"core"}
    assert {row.ran for row in found.of("layer")} == {"expanded, reference"}
    cores = {(row.case.implementation, row.case.form) for row in found.of("core")}
    assert cores == {("ours, reference", "expanded"), ("ours, reference", "absorbed")}
    for row in [*found.of("layer"), *found.of("core")]:
        assert 0 < row.forward.least <= row.forward.median <= row.forward.most
        assert row.step.median > row.backward.median > 0 and not row.error
    assert {"triton", "flash-attn-4", "nvidia-cutlass-dsl"} < {*found.environment["versions"]}
    why = {row.case.implementation: row.error for row in found.rows if row.error}
    assert "needs a GPU" in why["ours, cudnn"]
    assert why["torch, cudnn"] == "this device has no such kernel"
    assert "same last dimension" in why["torch, flash"]
    assert why["megatron"] == "Megatron's standard MLA needs transformer-engine, not installed here"
    for module in ("transformer_engine", "flash_attn_interface", "flash_attn"):
        assert any(f"No module named '{module}'" in error for error in why.values())


def cached_attention(rows: Rows, out: str, folder: Path) -> None:
    found = json.loads((folder / "cached.json").read_text())["rows"]
    assert [row["case"]["suite"] for row in found] == ["prefill", "offload"]
    assert found[1]["case"]["resident"] == 6 and all(row["ours"]["median"] > 0 for row in found)
    assert {"more_ms", "link_ms"} < set(rows[1])


def context_parallel(rows: Rows, out: str, folder: Path) -> None:
    """Bytes are of [latent | k_rope] of 32 + 16 numbers in float32, of 32 tokens."""
    found = CPReport.read(folder / "context_parallel.json")
    assert found.environment["command"].startswith("torchrun --nproc-per-node=2 ")
    assert len(found.rows) == 12
    for row in found.measured:
        assert row.ran == "expanded, reference" and row.cp_size == 2
        assert all(0 < f < s for f, s in zip(row.forward_seconds, row.step_seconds))
        floats = {
            what: sum(r["bytes"] for r in row.traffic[what] if r["dtype"] == "float32")
            for what in ("forward", "backward")
        }
        around = row.case.cp_comm_type == "p2p"
        # The ring's backward sends latents again, recomputed or not.
        gathers_again = row.case.recompute == "mla_up_proj" and not around
        exchanges = 1 + around + gathers_again
        assert floats == {"forward": 32 * 48 * 4, "backward": exchanges * 32 * 48 * 4}
        assert row.backward_sent_bytes == floats["backward"]
        operations = {r["operation"] for r in row.traffic["backward"]}
        expected = {"reduce-scatter"} | ({"all-gather"} if gathers_again else set())
        assert operations == ({"send"} if around else expected)


def context_parallel_compute(rows: Rows, out: str, folder: Path) -> None:
    assert [row["layout"] for row in rows] == ["sbhd", "thd"]
    for row in rows:
        assert row["all_gather:reference step_ms"] > 0 and row["p2p:reference host_ms"] > 0
        # Both exchanges are of the same latents, in the same layer.
        assert row["p2p:reference difference"] < 1e-5
        # 32 tokens of a latent in fp32 from each of two ranks, and its gradient; four shapes.
        gathered = 2 * 2 * 32 * (32 + 16) * 4 + 2 * 4 * 8
        assert row["all_gather:reference messages_mib"] * 2**20 == gathered
    assert "p2p:cudnn: " in out and "needs a GPU" in out
    assert "megatron: Megatron's standard MLA needs transformer-engine" in out


def decode(rows: Rows, out: str, folder: Path) -> None:
    assert [row["implementation"] for row in rows] == list(DECODERS)
    plain, fp8 = measured(rows)
    assert plain["implementation"] == "ours, reference" and plain["tbps"] > 0
    assert plain["difference"] == fp8["difference"] == 0.0 and not plain["graph"]
    assert fp8["implementation"] == "ours, reference, fp8"
    assert "- it needs a GPU: FlashMLA n=2" in out


def decode_context_parallel(rows: Rows, out: str, folder: Path) -> None:
    assert "| best |" in out
    found = SharedReport.read(folder / "out.json").rows
    assert [row.case.layout for row in found] == list(LAYOUTS)
    plain, shared, own = found
    # Of a token 32 + 16 numbers in float32.
    assert plain.cache_bytes == plain.cache_tokens * 48 * 4 == 2 * shared.cache_bytes
    assert plain.cache_bytes > own.cache_bytes
    assert plain.weight_bytes == shared.weight_bytes < own.weight_bytes


def decode_steps(rows: Rows, out: str, folder: Path) -> None:
    kinds = [(row["loop"], row["batch"]) for row in rows]
    assert kinds == [("megatron", 1), ("loop", 1), ("megatron", 2), ("loop", 2)]
    assert all(0 < row["host_ms"] <= row["step_ms"] for row in rows)


def drawing(rows: Rows, out: str, folder: Path) -> None:
    kinds = [(row["draws"], row["logits"], row["requests"]) for row in rows]
    assert kinds == [(d, k, n) for d in DRAWS for k in ("flat", "peaked") for n in (1, 2)]
    assert all(row["torch_us"] > 0 and "ours_us" not in row for row in rows)


def dsa(rows: Rows, out: str, folder: Path) -> None:
    found = measured(rows)
    assert [row["implementation"] for row in found] == [
        *("triton", "triton"),
        *("triton", "triton, in order") * 2,
        *("triton", "triton_fp8"),
    ]
    assert all(row["difference"] < 1e-5 for row in found[:-2])
    assert all(row["exact"] and row["share"] > 0 for row in found[-2:])
    assert found[-2]["agreement"] == 1 > found[-1]["agreement"] > 0.8
    assert "- it needs compute capability 9.0: forward n=2" in out


def dsa_decode(rows: Rows, out: str, folder: Path) -> None:
    sparse, dense = measured(rows)
    assert sparse["implementation"] == "sparse, triton" and dense["implementation"][:5] == "dense"
    assert sparse["difference"] < 1e-5 and sparse["agreement"] == 1
    assert min(sparse["select_us"], sparse["attend_us"]) > 0
    assert out.count("it needs a GPU: ") == 3 and "FlashMLA" in out


def dsa_layer(rows: Rows, out: str, folder: Path) -> None:
    [row] = rows
    assert row["sparse step_us"] > 0 and row["dense step_us"] > 0
    assert "only supports transformer engine" in out and "requires a CUDA device" in out


def engine(rows: Rows, out: str, folder: Path) -> None:
    [last] = json.loads(out.splitlines()[-1])
    assert json.loads((folder / "out.json").read_text()) == last
    ours = [row for row in rows if row["case"]["implementation"] == "ours"]
    assert len(ours) == 2
    for row in ours:
        assert row["ok"] and not row["missing"] and row["tokens_per_second"] > 0
        assert row["generated"] == last["environment"]["asked_for"]
        assert row["comparison"]["equal"] == last["environment"]["requests"] == 12
        graphs = row["engine"]["graph_steps"]
        assert graphs == (row["engine"]["steps"] if row["case"]["graphs"] else 0)


def fusions(rows: Rows, out: str, folder: Path) -> None:
    by_kind = {row["kind"]: row for row in rows}
    assert list(by_kind) == ["query", "keys", "down", "layer"]
    assert by_kind["query"]["ours forward_tbps"] > 0 and by_kind["query"]["copy host_us"] > 0
    assert "- query n=2 S=8, megatron's fused RoPE: it needs a GPU" in out
    # One product computes what two compute, for tensors as well as for layers.
    names = [f"{name} difference" for name in ("one of tensors", "two layers", "one of layers")]
    assert max(by_kind["down"][name] for name in names) < 1e-6
    layer = by_kind["layer"]
    assert layer["separate difference"] == 0 and layer["fused difference"] < 1e-6


def grouped_experts(rows: Rows, out: str, folder: Path) -> None:
    by_kind = {row["kind"]: row for row in rows}
    assert list(by_kind) == list(KINDS)
    for kind, row in by_kind.items():
        assert row["ours forward_us"] > 0 and row["ours difference"] < 1e-6, kind
    assert by_kind["out_of"]["parity difference"] < 1e-6
    assert by_kind["into"]["torch forward_tbps"] > 0
    assert "torch forward_tbps" not in by_kind["sums"]


def latent_attention(rows: Rows, out: str, folder: Path) -> None:
    found = [(row["work"], row["implementation"]) for row in measured(rows)]
    assert found == [("forward", "ours, reference"), ("backward", "ours, reference")]
    assert all(row["queued_tflops"] > 0 and row["called_ms"] > 0 for row in measured(rows))
    assert "- it needs a GPU: forward n=2 S=40: ours, hopper" in out


def load(rows: Rows, out: str, folder: Path) -> None:
    [row] = rows
    assert row["ok"] and row["equal"] == 14 and not row["different"] and not row["missing"]
    assert row["requests"]["outputs"] == 16 and row["requests"]["aborted"] > 0
    for which in ("first_token", "token", "request"):
        times = row["latencies"][which]
        assert 0 < times["p50"] <= times["p99"] <= times["most"] < 60_000
    assert row["tokens_per_second"] > 0 and row["generated"] > 14
    environment = json.loads(out.splitlines()[-1])[0]["environment"]
    assert environment["clients"] == 14 and environment["model"] == "tiny"


def prefixes(rows: Rows, out: str, folder: Path) -> None:
    by_place = {row["place"]: row for row in rows}
    assert tuple(by_place) == prefix_tiers.PLACES
    assert [row["disk_blocks"] for row in rows] == [0, 0, 8, 8, 8, 0]
    assert all(row["first_ms"] > 0 and row["decode_ms"] > 0 for row in rows)
    host, device = by_place["host"], by_place["device"]
    # The cache has 17 blocks, of which 4 are on the device: what one step needs at least is 3.
    assert host["streamed_blocks"] >= 5 and "streamed_blocks" not in device
    assert device["of_computed"] < 1 and host["copy_ms"] > 0 and "copy_ms" not in device
    assert list((folder / "prefixes").iterdir()) == []


def qk_clip(rows: Rows, out: str, folder: Path) -> None:
    report = QKClipReport.read(folder / "out.json")
    of_suite = {name: [row for row in report.rows if row.case.suite == name] for name in SUITES}
    maxima = [row for row in of_suite["maxima"] if row.case.backend == "reference"]
    assert [row.case.layout for row in maxima] == ["sbhd", "thd"]
    assert all(row.worst < 1e-6 and not row.error for row in maxima)
    refused = [row for row in report.rows if getattr(row.case, "backend", "") == "hopper"]
    assert refused and all(row.error == "it needs a GPU" for row in refused)
    layers = [row for row in of_suite["cost"] if row.case.backend == "layer"]
    assert [row.case.wanted for row in layers] == ["clip", "log"]
    assert all(row.recorded_step.median > 0 and row.ran for row in layers)
    assert len(of_suite["clip"]) == 4 and all(row.first > 0 for row in of_suite["clip"])
    assert any("step_ratio" in row for row in rows)
    assert "| case | worst |" in out and "first_ms" in out


def speculative(rows: Rows, out: str, folder: Path) -> None:
    cases = [(row["requests"], row["drafts"]) for row in rows]
    assert cases == [(n, drafts) for n in (1, 2) for drafts in (0, 1, 2)]
    assert all(row["tokens_per_second"] > 0 and 0 <= row["equal"] <= 1 for row in rows)


def training_graphs(rows: Rows, out: str, folder: Path) -> None:
    assert json.loads(out.splitlines()[-1])[0]["environment"]["layers"] == "local"
    assert {row["error"] for row in rows if row["graphs"]} == {"it needs a GPU"}
    found = measured(rows)
    assert [row["recomputed"] for row in found] == [True, False]
    assert {row["implementation"] for row in found} == {"ours"}
    assert all(row["step_ms"] > 0 and row["host_ms"] > 0 for row in found)


CHECKS: dict[str, Callable[[Rows, str, Path], None]] = {
    one.__name__: one
    for one in (
        *(attention, cached_attention, context_parallel, context_parallel_compute, decode),
        *(decode_context_parallel, decode_steps, drawing, dsa, dsa_decode, dsa_layer, engine),
        *(fusions, grouped_experts, latent_attention, load, qk_clip, speculative, training_graphs),
    )
} | {"prefix_tiers": prefixes}


def test_every_benchmark_is_run():
    assert CHECKS.keys() | ELSEWHERE == BENCHMARKS.keys()
    assert all(one.quick is not None for name, one in BENCHMARKS.items() if name != "fp8_training")


@pytest.mark.parametrize("name", CHECKS)
def test_tiny_cases_on_a_cpu(name, tmp_path, capsys):
    """In a process of its own, which leaves its groups; and they are shown again."""
    benchmark = BENCHMARKS[name]
    folder = [tmp_path] if benchmark.files else []
    file = tmp_path / (f"{benchmark.files}.json" if folder else "out.json")
    command = [FOLDER / f"{name}.py", *folder, "--quick"]
    command += [] if folder else ["--json", file]
    if name == "prefix_tiers":
        command += ["--prefix-folder", tmp_path / "prefixes"]
    environment = {"CUDA_VISIBLE_DEVICES": "", "GIT_COMMIT": "abc"}
    if name in INTERPRETED:
        environment["TRITON_INTERPRET"] = "1"
    done = run_script(*command, ranks=RANKS.get(name, 0), **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    out, last = done.stdout, done.stdout.splitlines()[-1]
    [report] = json.loads(last)
    assert report["environment"]["commit"] == "abc"
    rows = report["rows"]
    assert measured(rows)
    for row in rows:
        assert not row.get("error") or REASONS.search(row["error"]), row
    CHECKS[name](rows, out, tmp_path)
    assert benchmark.main([*map(str, folder), "--render", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == last
    if folder:
        assert file.with_suffix(".png").stat().st_size > 1000
