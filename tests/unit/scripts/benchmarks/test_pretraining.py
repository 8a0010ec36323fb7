"""scripts/benchmarks/pretraining.py: Megatron's own loop runs, and its log is read."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import megatron_log, pretraining
from benchmarks.kit.command import run_to_log
from benchmarks.megatron_log import Iteration
from benchmarks.pretraining import PretrainingBenchmark, PretrainingReport, Run, megatron_arguments
from tests.support.forked_python import forks_python

parse_arguments = PretrainingBenchmark.parse
ENVIRONMENT = {
    "date": "2026-01-01",
    "command": "python pretraining.py",
    "commit": "abc",
    "device": "a device",
    "gpus": 1,
    "dtype": "bfloat16",
    "peak_tflops": 1000.0,
    "tokens_per_iteration": 16384,
    "model": {"layers": 8},
    "megatron": "",
    "versions": {"torch": "2"},
}
LINE = (
    " [2026-11-21 19:54:45.851447] iteration {n:8d}/       4 | consumed samples:            2 | "
    "elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 321.5 | "
    "learning rate: 1.000000E-03 | global batch size:     2 | lm loss: {loss:.6E} | "
    "loss scale: 1.0 | grad norm: 1.045 | number of skipped iterations:   0 |"
)
LOG = "\n".join(
    [
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 99",
        LINE.format(n=1, ms=1000, loss=10.0),
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.00 | max allocated: 1024.00 | x",
        LINE.format(n=2, ms=500, loss=9.0),
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 2048.00 | x",
        LINE.format(n=3, ms=100, loss=8.5),
    ]
)
STANDARD = Run("standard", "standard", list(megatron_log.iterations(LOG)), 1, 99_000_000, 2**31)
CHOSEN = f"a line\n{megatron_log.CHOSEN} expanded, cudnn\nanother"
ABSORBED = dataclasses.replace(
    STANDARD,
    name="absorbed",
    attention="absorbed",
    ran="expanded, cudnn",
    iterations=[dataclasses.replace(one, loss=one.loss + 0.01) for one in STANDARD.iterations],
)
FAILED = Run("absorbed", "absorbed", error="ValueError: why")
TINY = ["--iterations", "4", "--skip", "2", "--layers", "1", "--hidden-size", "32", "--heads", "2"]
TINY += ["--ffn-hidden-size", "64", "--q-lora-rank", "16", "--kv-lora-rank", "16"]
TINY += ["--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "16"]
TINY += ["--vocab-size", "128", "--seq-length", "32", "--global-batch-size", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """Both trainings on a CPU: the folder and the output."""
    folder = tmp_path_factory.mktemp("pretraining")
    output = io.StringIO()
    stdout = contextlib.redirect_stdout(output)
    with pytest.MonkeyPatch.context() as patch, stdout, forks_python():
        # Of this process and of the trainings.
        patch.setattr(torch.cuda, "is_available", lambda: False)
        for name, value in {"CUDA_VISIBLE_DEVICES": "", "GIT_COMMIT": "abc"}.items():
            patch.setenv(name, value)
        assert PretrainingBenchmark.main([str(folder), *TINY]) == 0, output.getvalue()
    return folder, output.getvalue()


def test_both_attentions_train_alike_in_megatrons_loop(trained):
    folder, output = trained
    found = json.loads((folder / "pretraining.json").read_text())["runs"]
    assert [run["name"] for run in found] == ["standard", "absorbed"]
    assert all(len(run["iterations"]) == 4 and run["parameters"] for run in found)
    [last] = json.loads(output.splitlines()[-1])
    # fp32, from the same weights.
    assert last["differences"][0]["largest"] < 1e-5
    losses = [one["loss"] for one in found[1]["iterations"]]
    assert len(set(losses)) == 4 and all(4 < loss < 6 for loss in losses)
    assert all(run["tokens_per_second"] > 0 for run in last["runs"])
    # What ran is known of ours only.
    assert found[0]["ran"] == "" and found[1]["ran"].endswith(", reference")


def test_only_one_of_them_is_absorbed(trained):
    folder, _ = trained
    layers = {name: (folder / f"{name}.log").read_text() for name in ("standard", "absorbed")}
    assert "linear_k_up_proj.weight" in layers["absorbed"]
    assert "linear_k_up_proj.weight" not in layers["standard"]
    assert "linear_kv_up_proj.weight" in layers["standard"]


def test_a_training_is_rendered_again(trained, tmp_path, capsys):
    folder, output = trained
    source = str(folder / "pretraining.json")
    assert PretrainingBenchmark.main([str(tmp_path / "again"), "--render", source]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == output.splitlines()[-1]
    assert (tmp_path / "again" / "pretraining.png").stat().st_size > 10_000


def test_log():
    found = STANDARD.iterations
    assert [one.iteration for one in found] == [1, 2, 3]
    assert found[1] == Iteration(2, 9.0, 0.5, 321.5, 1.045)
    assert megatron_log.parameters(LOG) == 99 and megatron_log.peak_bytes(LOG) == 2**31
    assert megatron_log.chosen_backends(CHOSEN) == "expanded, cudnn"
    assert megatron_log.chosen_backends(LOG) == ""
    assert megatron_log.parameters("") is None and megatron_log.peak_bytes("") is None
    assert not list(megatron_log.iterations(" iteration        1/       4 | no figures"))


@pytest.mark.parametrize(
    "text, found",
    (
        ("a\n[rank0]: ValueError: why\n[rank0]:[W1] later", "ValueError: why"),
        ("torch.OutOfMemoryError: CUDA\nx", "torch.OutOfMemoryError: CUDA"),
        ("pretrain_gpt.py: error: unrecognized\n\n", "pretrain_gpt.py: error: unrecognized"),
        ("", "no output"),
    ),
)
def test_what_went_wrong(text, found):
    assert megatron_log.problem(text) == found


def test_megatrons_arguments_differ_in_the_attention_only():
    args = parse_arguments(["out", "--megatron", "--clip-grad 0.5"])
    standard, absorbed = (megatron_arguments(args, name, True) for name in ("standard", "absorbed"))
    assert standard[-2:] == absorbed[-2:] == ["--clip-grad", "0.5"]
    more = ["--spec", "specs.absorbed_mla_layer_specs", "get_absorbed_mla_layer_spec"]
    assert absorbed == [*standard[:-2], *more, "--clip-grad", "0.5"]
    assert {"--bf16", "--mock-data", "--log-throughput"} <= {*standard}
    assert standard[standard.index("--kv-lora-rank") + 1] == "512"


def test_a_gpu_without_transformer_engine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pretraining, "find_spec", lambda name: None)
    assert PretrainingBenchmark.main([str(tmp_path / "out")]) == 2
    assert "on a GPU needs transformer-engine, not installed here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_report():
    """A run that failed has no figures, and is compared with none."""
    report = PretrainingReport(ENVIRONMENT, [STANDARD, ABSORBED, FAILED])
    # The first iteration is skipped; 300 ms are the middle of 500 and 100.
    assert report.figures(STANDARD) == pytest.approx(
        {
            "iteration_ms": 300,
            "tokens_per_second": 16384 / 0.3,
            "tflops": 321.5,
            "mfu": 0.3215,
            "peak_gib": 2,
            "first_loss": 10,
            "last_loss": 8.5,
        }
    )
    [gap] = report.differences()
    assert gap["runs"] == ["standard", "absorbed"]
    assert gap["largest"] == pytest.approx(0.01) and gap["last"] == pytest.approx(0.01)


def test_output_of_processes(tmp_path):
    """All of it is in the log; a run that takes too long is ended."""
    log_file = tmp_path / "a.log"
    program = "import sys, time; print('begun', flush=True); "
    end = [sys.executable, "-c", program + "raise KeyError('why')"]
    assert run_to_log(end, log_file, 60.0) == 1
    assert log_file.read_text().startswith("begun\nTraceback")
    endless = [sys.executable, "-c", program + "time.sleep(60)"]
    assert run_to_log(endless, log_file, 0.5) is None
    assert run_to_log([sys.executable, "-c", program], log_file, 60.0) == 0


@pytest.mark.parametrize(
    ("code", "more", "error"),
    [
        (0, "", "the log has 3 of 4 iterations"),
        (1, "\nKeyError: 'why'", "KeyError: 'why'"),
        (None, "", "not over after 600 s"),
        (0, "\n" + LINE.format(n=4, ms=100, loss=8.0), ""),
    ],
)
def test_runs_that_fail_say_why(code, more, error, tmp_path, monkeypatch):
    def run(command, log, timeout):
        log.write_text(LOG + more)
        return code

    monkeypatch.setattr(pretraining, "run_to_log", run)
    args = parse_arguments([str(tmp_path), "--skip", "1", "--iterations", "4"])
    run = pretraining.train("standard", tmp_path / "weights", args, True)
    assert run.error == error and run.peak_bytes == 2**31


def test_the_second_run_begins_with_the_weights_of_the_first(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        pretraining,
        "run_to_log",
        lambda command, log, timeout: commands.append(command) or log.touch() or 0,
    )
    args = parse_arguments([str(tmp_path), "--gpus", "2", "--global-batch-size", "2"])
    weights = tmp_path / "weights"
    pretraining.train("standard", weights, args, True)
    weights.touch()
    pretraining.train("absorbed", weights, args, True)
    assert commands[0][-2:] == ["--save-first-weights", str(weights)]
    assert commands[1][-2:] == ["--first-weights", str(weights)]
    assert commands[0][1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
