"""scripts/bench_attention.py: what it counts, what it refuses, and its reports."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_attention
from attention_benchmark import machine, peers, timing
from attention_benchmark.arguments import (
    core_cases,
    layer_cases,
    parse_arguments,
    require_device,
)
from attention_benchmark.cases import CoreCase, LayerCase, attention_flops, document_lengths
from attention_benchmark.core import IMPLEMENTATIONS, build
from attention_benchmark.machine import Bench
from attention_benchmark.report import (
    Report,
    brief,
    errors,
    markdown,
    summary,
    tables,
    targets,
)
from attention_benchmark.row import Refused, Row, Times, failed
from context_parallel_benchmark.arguments import DIMS
from tests.support.numerics import relative_error

ENVIRONMENT = {
    "date": "2026-01-01",
    "command": "python bench_attention.py",
    "commit": "abc",
    "device": "a device",
    "dtype": "bfloat16",
    "dims": DIMS,
    "rope_type": "rope",
    "form": "auto",
    "backend": "auto",
    "versions": {"torch": "2"},
    "ceilings": {"matmul_tflops": 700.0, "copy_tbps": 4.0},
}


def times(seconds: float) -> Times:
    return Times(seconds, seconds / 2, 2 * seconds, 3)


MEGATRON = Row(
    case=LayerCase("megatron", False, 128, 8192, "thd"),
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
REFUSED = Row(case=CoreCase("torch, flash", "absorbed", 16, 8192), error="too wide\nfor flash")
ROWS = [MEGATRON, OURS, CORE, REFUSED]
TINY = [
    "--device",
    "cpu",
    "--form",
    "expanded",
    "--heads",
    "2",
    "--seq-lens",
    "48",
    "--seconds-per-row",
    "0.01",
]
TINY += ["--hidden-size", "32", "--q-lora-rank", "16", "--kv-lora-rank", "32"]
TINY += ["--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "16"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, str]:
    """A real run on the CPU: its folder and its output."""
    folder = tmp_path_factory.mktemp("attention")
    done = subprocess.run(
        [sys.executable, bench_attention.__file__, str(folder), *TINY],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GIT_COMMIT": "abc"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_run_measures_ours_in_both_suites(measured):
    folder, output = measured
    report = Report.read(folder / "attention.json")
    layers = [(r.case.recompute, r.case.layout) for r in report.measured("layer")]
    assert layers == [(False, "sbhd"), (True, "sbhd"), (False, "thd"), (True, "thd")]
    assert {row.ran for row in report.measured("layer")} == {"expanded, reference"}
    cores = {(row.case.implementation, row.case.form) for row in report.measured("core")}
    assert cores == {("ours, reference", "expanded"), ("ours, reference", "absorbed")}
    for row in [*report.measured("layer"), *report.measured("core")]:
        assert 0 < row.forward.least <= row.forward.median <= row.forward.most
        assert row.step.median > row.backward.median > 0
        assert not row.error
    last = json.loads(output.splitlines()[-1])
    assert last[0]["commit"] == "abc" and len(last[0]["layer"]) == 4
    assert last[0]["not_measured"] == sum(bool(row.error) for row in report.rows)


def test_a_run_says_why_others_were_not_measured(measured):
    folder, output = measured
    rows = Report.read(folder / "attention.json").rows
    why = {row.case.implementation: row.error for row in rows if row.error}
    assert "needs a GPU" in why["ours, cudnn"]
    assert why["torch, cudnn"] == "this device has no such kernel"
    assert "same last dimension" in why["torch, flash"]
    assert why["megatron"] == (
        "Megatron's standard MLA needs transformer-engine, not installed here"
    )
    for module in ("transformer_engine", "flash_attn_interface", "flash_attn"):
        assert any(f"No module named '{module}'" in error for error in why.values())
    assert "Not measured:" in output and "Layer" in output


def test_a_run_is_rendered_again(measured, tmp_path, capsys):
    folder, output = measured
    again = tmp_path / "again"
    source = str(folder / "attention.json")
    assert bench_attention.main([str(again), "--render", source]) == 0
    for name in ("attention.md", "attention.png"):
        assert (again / name).stat().st_size == (folder / name).stat().st_size
    assert capsys.readouterr().out.splitlines()[-1] == output.splitlines()[-1]


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


def test_cases_come_with_smaller_ones_first():
    args = parse_arguments(["out", "--heads", "128,16", "--seq-lens", "2k,1k"], "")
    layers = layer_cases(args)
    assert len(layers) == 2 * 2 * 2 * 4
    assert [c.tokens for c in layers] == sorted(c.tokens for c in layers)
    assert layers[0] == LayerCase("megatron", False, 16, 1024, "sbhd")
    cores = core_cases(args, ["a", "b"])
    assert len(cores) == 2 * 2 * 2 * 2 and cores[1] == CoreCase("b", "expanded", 16, 1024)
    assert not core_cases(parse_arguments(["out", "--suite", "layer"], ""), ["a"])
    assert not layer_cases(parse_arguments(["out", "--suite", "core"], ""))


def test_quick_is_what_is_not_given():
    quick = parse_arguments(["out", "--quick"], "")
    assert (quick.seq_lens, quick.seconds_per_row) == ([4096, 8192], 0.1)
    given = parse_arguments(["out", "--quick", "--seq-lens", "1k", "--seconds-per-row", "1"], "")
    assert (given.seq_lens, given.seconds_per_row) == ([1024], 1.0)
    assert parse_arguments(["out"], "").seconds_per_row == 0.5


@pytest.mark.parametrize(
    "options, message",
    (
        (["--seq-lens", "16q"], "argument --seq-lens: expected a whole number above 0"),
        (["--heads", "0"], "argument --heads: expected a whole number above 0"),
        (["--layouts", "bshd"], "expected some of sbhd, thd"),
        (["--suite", "none"], "argument --suite: invalid choice"),
        (["--form", "other"], "argument --form: invalid choice"),
        (["--backend", "other"], "argument --backend: invalid choice"),
        (["--seconds-per-row", "nan"], "expected a number of seconds above 0, got 'nan'"),
        (["--rope-fusion"], "--rope-fusion needs --rope-type yarn"),
        (["--render", "/nowhere.json"], "--render must be JSON files that this script wrote"),
    ),
)
def test_wrong_input(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        bench_attention.main([str(tmp_path / "out"), *options])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there(tmp_path, capsys):
    assert bench_attention.main([str(tmp_path / "out"), "--device", "cuda"]) == 2
    expected = "error: --device cuda needs a GPU, and there is none; give --device cpu\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "out").exists()


def test_device():
    args = SimpleNamespace(device=None)
    assert require_device(args, True) == "cuda" and require_device(args, False) == "cpu"


@pytest.mark.parametrize("content", ("{", "[]", '{"environment": {}, "rows": [{}]}'))
def test_render_another_file(content, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(content)
    assert bench_attention.main([str(tmp_path / "new"), "--render", str(path)]) == 2
    assert f"--render must be JSON files that this script wrote; {path}" in capsys.readouterr().err


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
    subject.begin -= 201
    assert subject.measure(CORE.case).error == "left out: 200 s are over (--time-limit)"


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
    query = torch.cat((grads.q_content, grads.q_rope), dim=-1)
    assert relative_error(their_grads[0], query) < 1e-5
    if form == "absorbed":
        key = torch.cat((grads.k_content, grads.k_rope.unsqueeze(2)), dim=-1)
        assert relative_error(their_grads[1], key) < 1e-5
    else:
        assert relative_error(their_grads[2], grads.value) < 1e-5


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


def test_tables():
    report = Report(ENVIRONMENT, ROWS)
    (_, _, layers), (_, _, cores) = tables([report])
    assert layers[1][:6] == ["thd", "8k", "128", "ours", "mla_up_proj", "expanded, cudnn"]
    assert layers[1][6:10] == ["10.00 ms", "38.00 ms", "0.24 GiB", "1.95 GiB"]
    assert layers[1][10:] == ["1.000", "0.950", "0.250"]
    assert layers[0][-3:] == ["-", "-", "-"]
    # 16 heads x 8192^2 / 2 pairs x 640 or 1664, in 1 and 2 ms.
    assert cores == [
        ["expanded", "8k", "16", "torch, cudnn", "1.00 ms", "2.00 ms", "344", "447", "412"]
    ]
    text = markdown([report])
    assert "Measured on 2026-01-01 by `python bench_attention.py` at abc: a device" in text
    assert "700 TFLOP/s in a matrix product" in text


def test_ratios_are_of_the_same_input_without_recomputation():
    report = Report(ENVIRONMENT, ROWS)
    assert report.ratios(OURS) == {"forward": 1.0, "step": pytest.approx(0.95), "kept": 0.25}
    for change in ({"heads": 16}, {"tokens": 4096}, {"layout": "sbhd"}):
        other = dataclasses.replace(OURS, case=dataclasses.replace(OURS.case, **change))
        assert report.ratios(other) == {}


@pytest.mark.parametrize(
    "step, kept, met", ((0.04, 280, True), (0.041, 1, False), (0.01, 281, False))
)
def test_targets(step, kept, met):
    row = dataclasses.replace(OURS, step=times(step), kept_bytes=kept * 2**20)
    line = targets([Report(ENVIRONMENT, [MEGATRON, row])]).splitlines()[-1]
    assert line.startswith(f"- {'met' if met else 'missed'}: ours recompute n=128 S=8192 thd: step")
    assert not targets([Report(ENVIRONMENT, [MEGATRON])])


def test_errors_are_grouped_by_why():
    others = [
        dataclasses.replace(REFUSED, case=dataclasses.replace(REFUSED.case, tokens=n))
        for n in range(1, 7)
    ]
    assert errors([Report(ENVIRONMENT, others)]).splitlines()[-1] == (
        "- too wide for flash: torch, flash absorbed n=16 S=1; torch, flash absorbed n=16 S=2; "
        "torch, flash absorbed n=16 S=3; torch, flash absorbed n=16 S=4; 2 more"
    )
    assert failed(CORE.case, Refused("as it says")).error == "as it says"


def test_lines_while_measuring():
    report = Report(ENVIRONMENT, ROWS)
    assert brief(OURS, report) == (
        "ours recompute n=128 S=8192 thd (expanded, cudnn): forward 10.00 ms, step 38.00 ms, "
        "forward 1.000 of megatron's, step 0.950 of megatron's, kept 0.250 of megatron's"
    )
    assert brief(REFUSED, report) == "torch, flash absorbed n=16 S=8192: too wide for flash"


def test_json_keeps_everything(tmp_path):
    Report(ENVIRONMENT, ROWS).write(tmp_path / "new" / "a.json")
    read = Report.read(tmp_path / "new" / "a.json")
    assert read.rows == ROWS and read.environment == ENVIRONMENT
    assert summary([read]) == summary([Report(ENVIRONMENT, ROWS)])


def test_render_several_files_without_optional_packages(tmp_path, capsys, monkeypatch):
    for module in ("matplotlib", "rich.console"):
        monkeypatch.setitem(sys.modules, module, None)
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for path in paths:
        Report(ENVIRONMENT, ROWS).write(path)
    assert bench_attention.main([str(tmp_path / "new"), "--render", *map(str, paths)]) == 0
    output = capsys.readouterr().out
    assert "No plot: matplotlib is missing" in output
    assert output.count("torch, cudnn  1.00 ms") == 2
    assert not (tmp_path / "new" / "attention.png").exists()
