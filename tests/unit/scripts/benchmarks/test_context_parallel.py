"""scripts/benchmarks/context_parallel.py: its cases, two processes, and like compared with like."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from benchmarks import context_parallel
from benchmarks.context_parallel import Case, CPBenchmark, CPReport, Row, build, cases
from benchmarks.kit import layers
from tests.support.programs import run_script

parse_arguments = CPBenchmark.parse
OURS = Row(
    case=Case("ours", "all_gather", "expanded", 16384, 128, "sbhd", 1, "none"),
    cp_size=2,
    forward_seconds=[0.02, 0.01, 0.06],
    step_seconds=[0.06, 0.05, 0.1],
    kept_bytes=2**29,
    peak_bytes=2**31,
    forward_sent_bytes=8192 * 1152,
    backward_sent_bytes=8192 * 2304,
    traffic={"forward": [], "backward": []},
    forward_overlap=0.5,
    ran="expanded, cudnn",
)
MEGATRON = dataclasses.replace(
    OURS,
    case=Case("megatron", "p2p", "expanded", 16384, 128, "sbhd", 1, "none"),
    step_seconds=[0.04],
    kept_bytes=2**30,
    forward_sent_bytes=8192 * 80000,
    backward_sent_bytes=8192 * 265600,
    forward_overlap=None,
    ran="",
)
FAILED = Row(case=MEGATRON.case, cp_size=2, error="rank 1: OutOfMemoryError: CUDA out\nof memory")


def report(*rows: Row) -> CPReport:
    return CPReport({}, list(rows))


def test_cases():
    argv = ["out", "--sizes", "1k,16", "--heads", "2", "--layouts", "sbhd,thd", "--documents", "2"]
    found = cases(parse_arguments(argv), 2)
    assert [case.tokens for case in found] == [16] * 6 + [1024] * 6
    assert [(c.implementation, c.cp_comm_type) for c in found[:3]] == [
        ("ours", "all_gather"),
        ("ours", "p2p"),
        ("megatron", "p2p"),
    ]
    assert [(c.layout, c.documents) for c in found[:6]] == [("sbhd", 1)] * 3 + [("thd", 2)] * 3
    assert {case.recompute for case in found} == {"none"}


def test_both_layers_recompute():
    argv = ["out", "--sizes", "16", "--heads", "2", "--cp-comm-types", "p2p"]
    found = cases(parse_arguments([*argv, "--recompute", "none,mla_up_proj"]), 2)
    expected = [(i, r) for r in ("none", "mla_up_proj") for i in ("ours", "megatron")]
    assert [(case.implementation, case.recompute) for case in found] == expected
    assert str(found[3]) == "megatron p2p expanded recompute mla_up_proj sbhd S=16 n=2"


def test_sizes_that_do_not_divide(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    options = ["--layouts", "sbhd,thd", "--documents", "3", "--sizes", "16,48"]
    assert CPBenchmark.main(["out", *options]) == 2
    expected = "--sizes: 16 tokens do not divide into 3 document(s) of 2 x 4 chunks"
    assert f"{expected}; give multiples of 24" in capsys.readouterr().err


@pytest.mark.parametrize("implementation", ["ours", "megatron"])
@pytest.mark.parametrize(("recompute", "expected"), [("none", None), ("mla_up_proj",) * 2])
def test_the_layer_is_told_what_its_case_recomputes(
    implementation, recompute, expected, monkeypatch
):
    """Also Megatron's, which no machine without TransformerEngine builds."""
    told = []

    def layer_config(args, processes, *, recompute, **options):
        told.append((recompute, options["cp_comm_type"]))
        raise InterruptedError

    monkeypatch.setattr(layers, "layer_config", layer_config)
    case = Case(implementation, "p2p", "expanded", 16, 2, "sbhd", 1, recompute)
    with pytest.raises(InterruptedError):
        build(case, parse_arguments(["out"]), SimpleNamespace(size=2))
    assert told == [(expected, "p2p")]


class TestReport:
    def test_ratios(self):
        found = report(OURS, MEGATRON)
        assert found.ratios(OURS) == {"bytes": 0.01, "time": 1.5, "kept": 0.5}

    def test_bytes_per_token_are_for_each_other_rank(self):
        four = dataclasses.replace(OURS, cp_size=4, forward_sent_bytes=4096 * 3 * 1152)
        assert four.bytes_per_token["forward"] == OURS.bytes_per_token["forward"] == 1152
        found = report(OURS, MEGATRON)
        assert found.peer(OURS) is MEGATRON
        assert found.peer(four) is None

    def test_recomputed_is_compared_with_recomputed(self):
        """Otherwise memory saved by recomputation looks like the layer's own doing."""

        def recomputed(row, **figures):
            case = dataclasses.replace(row.case, recompute="mla_up_proj")
            return dataclasses.replace(row, case=case, **figures)

        ours, theirs = recomputed(OURS, kept_bytes=2**28), recomputed(MEGATRON, kept_bytes=2**28)
        found = report(OURS, MEGATRON, ours, theirs)
        assert found.peer(ours) is theirs and found.peer(OURS) is MEGATRON
        assert report(ours, MEGATRON).peer(ours) is None
        assert (found.ratios(OURS)["kept"], found.ratios(ours)["kept"]) == (0.5, 1.0)

    def test_failed_cases_are_no_peers(self):
        assert report(OURS, FAILED).ratios(OURS) == {}

    def test_files_from_before_it_was_recorded_what_ran(self, tmp_path):
        path = tmp_path / "a.json"
        report(OURS).write(path)
        content = json.loads(path.read_text())
        assert content["rows"][0]["step_ms"] == {"median": 60, "min": 50, "max": 100}
        assert content["rows"][0]["forward_bytes_per_token"] == 1152
        assert content["rows"][0].pop("ran") == "expanded, cudnn"
        path.write_text(json.dumps(content))
        assert CPReport.read(path).rows == [dataclasses.replace(OURS, ran="")]


def test_two_processes(tmp_path):
    """Bytes are of [latent | k_rope] of 48 + 8 numbers in float32, of 32 tokens."""
    command = [context_parallel.__file__, tmp_path]
    command += ["--seconds-per-row", "0.01", "--sizes", "64", "--heads", "4"]
    command += ["--layouts", "sbhd,thd", "--documents", "2"]
    command += ["--hidden-size", "32", "--q-lora-rank", "16", "--kv-lora-rank", "48"]
    command += ["--qk-head-dim", "8", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "8"]
    command += ["--recompute", "none,mla_up_proj"]
    done = run_script(*command, ranks=2, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout.splitlines()[-1])
    found = CPReport.read(tmp_path / "context_parallel.json")
    assert found.environment["command"].startswith("torchrun --nproc-per-node=2 ")
    assert len(found.rows) == 12
    for row in found.rows:
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
