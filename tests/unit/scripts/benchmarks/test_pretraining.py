"""pretraining.py and pretrain_gpt.py: Megatron's own loop runs, and its log is read."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import megatron_log, pretraining
from benchmarks.kit.command import ALONE
from benchmarks.megatron_log import Iteration
from benchmarks.pretraining import (
    ENTRY,
    PretrainingBenchmark,
    PretrainingReport,
    Run,
    megatron_arguments,
)
from tests.support import needs
from tests.support.forked_python import forks_python

parse_arguments = PretrainingBenchmark.parse
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
        f"{megatron_log.CHOSEN} expanded, cudnn",
    ]
)
FACTS = {"parameters": 99, "peak_bytes": 2**31, "ran": "expanded, cudnn"}
STANDARD = Run("standard", "standard", list(megatron_log.iterations(LOG)), 1, **FACTS)
TINY = """
--skip 2 --layers 1 --hidden-size 32 --heads 2 --ffn-hidden-size 64 --q-lora-rank 16 --kv-lora-rank
16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --vocab-size 128 --seq-length 32
--global-batch-size 2 --iterations 4
""".split()  # noqa: SIM905


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


def test_both_attentions_train_alike_in_megatrons_loop(trained, tmp_path, capsys):
    """In fp32, from the same weights; and they are shown again."""
    folder, output = trained
    found = PretrainingReport.read(folder / "pretraining.json")
    standard, absorbed = found.rows
    assert [run.name for run in found.rows] == ["standard", "absorbed"]
    assert all(len(run.iterations) == 4 and run.parameters for run in found.rows)
    losses = [(a.loss, b.loss) for a, b in zip(standard.iterations, absorbed.iterations)]
    assert max(abs(a - b) for a, b in losses) < 1e-5
    assert len(set(losses)) == 4 and all(4 < loss < 6 for loss, _ in losses)
    # What ran is known of ours only.
    assert standard.ran == "" and absorbed.ran.endswith(", reference")
    logs = {name: (folder / f"{name}.log").read_text() for name in ("standard", "absorbed")}
    assert "linear_k_up_proj.weight" in logs["absorbed"]
    assert "linear_k_up_proj.weight" not in logs["standard"]
    again = [str(tmp_path / "again"), "--render", str(folder / "pretraining.json")]
    assert PretrainingBenchmark.main(again) == 0
    assert capsys.readouterr().out.splitlines()[-1] == output.splitlines()[-1]
    assert (tmp_path / "again" / "pretraining.png").stat().st_size > 10_000


def test_log():
    assert [one.iteration for one in STANDARD.iterations] == [1, 2, 3]
    assert STANDARD.iterations[1] == Iteration(2, 9.0, 0.5, 321.5, 1.045)
    assert megatron_log.facts(LOG) == FACTS
    assert megatron_log.facts("") == {"parameters": None, "peak_bytes": None, "ran": ""}
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


def test_figures():
    """The first iteration is skipped; 300 ms are the middle of 500 and 100."""
    environment = {"peak_tflops": 1000.0, "tokens_per_iteration": 16384}
    rates = {"iteration_ms": 300, "tokens_per_second": 16384 / 0.3, "tflops": 321.5}
    more = {"mfu": 0.3215, "peak_gib": 2, "first_loss": 10, "last_loss": 8.5}
    report = PretrainingReport(environment, [STANDARD])
    assert report.figures(STANDARD) == pytest.approx(rates | more)
    higher = [dataclasses.replace(one, loss=one.loss + 0.01) for one in STANDARD.iterations]
    report.rows += [dataclasses.replace(STANDARD, name="absorbed", iterations=higher)]
    report.rows += [Run("failed", "absorbed", error="ValueError: why")]
    [gap] = PretrainingReport.notes([report])
    assert "standard and absorbed: largest difference of the loss 1.0e-02" in gap


@pytest.mark.parametrize(
    ("code", "more", "error"),
    [
        (0, "", "the log has 3 of 4 iterations"),
        (1, "\nKeyError: 'why'", "KeyError: 'why'"),
        (None, "", "not over after 600 s"),
        (0, "\n" + LINE.format(n=4, ms=100, loss=8.0), ""),
    ],
)
def test_runs(code, more, error, tmp_path, monkeypatch):
    """They say why they fail; a later one begins with the weights of the first."""
    commands = []

    def run(command, log, timeout, variables):
        commands.append(command)
        log.write_text(LOG + more)
        return code

    monkeypatch.setattr(pretraining, "run_to_log", run)
    options = "--skip 1 --iterations 4 --gpus 2 --global-batch-size 2"
    args, weights = parse_arguments([str(tmp_path), *options.split()]), tmp_path / "weights"
    first = pretraining.train("standard", weights, args, True)
    assert first.error == error and first.peak_bytes == 2**31
    weights.touch()
    pretraining.train("absorbed", weights, args, True)
    assert commands[0][-2:] == ["--save-first-weights", str(weights)]
    assert commands[1][-2:] == ["--first-weights", str(weights)]
    assert commands[0][1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


GPT = """
--spec specs.absorbed_mla_layer_specs absorbed_mla_layer_spec --num-layers 2 --mtp-num-layers 1
--builder specs.absorbed_mla_gpt_builder.AbsorbedMLAGPTModelBuilder --save-first-weights {weights}
"""
HYBRID = """
--spec specs.absorbed_mla_hybrid_specs absorbed_mla_hybrid_stack_spec
--hybrid-layer-pattern +-+-/+- --first-weights {weights}
"""
# Importing all of it takes longer than training: once, then a process for each.
FORKED = """
import json, os, sys
import pretrain_gpt
for log, *words in json.loads(sys.argv[1]):
    if os.fork() == 0:
        output = os.open(log, os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.argv[1:] = words
        pretrain_gpt.main()
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(log)
"""


def arguments(more: str) -> list[str]:
    """Megatron's usual ones, but for what ``more`` says."""
    args = parse_arguments(["out", *TINY, "--iterations", "3", "--layers", "2"])
    usual = megatron_arguments(args, "absorbed", on_gpu=False)
    for name, values in (("--spec", 2), ("--num-layers", 1)):
        start = usual.index(name)
        del usual[start : start + 1 + values]
    return [*usual, *more.split()]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, str]:
    """Of both models, from the same weights, and of ``--help``."""
    folder: Path = tmp_path_factory.mktemp("pretrain")
    commands = {
        folder / f"{name}.log": arguments(more.format(weights=folder / "weights.pt"))
        for name, more in {"gpt": GPT, "hybrid": HYBRID}.items()
    }
    commands[folder / "help.log"] = ["--help"]
    runs = json.dumps([[str(log), *words] for log, words in commands.items()])
    path = os.pathsep.join([str(ENTRY.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **ALONE, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", FORKED, runs]
    with forks_python():
        code = subprocess.run(command, env=env, capture_output=True, timeout=300).returncode
    texts = {log.stem: log.read_text() for log in commands if log.exists()}
    assert code == 0, list(texts.values())[-1][-3000:]
    return texts


@needs.no_gpu
class TestEntry:
    """``--spec`` in Megatron's own loop, for GPT and hybrid models, as Megatron's scripts do."""

    def test_help(self, outputs):
        """Of Megatron's arguments, one of which has a percent sign, and of ours."""
        assert outputs["help"].startswith("usage: ") and "Traceback" not in outputs["help"]
        assert "1.10 = 10%" in outputs["help"] and "--first-weights FILE" in outputs["help"]

    def test_both_models_train_alike(self, outputs):
        """In every digit that Megatron logs; the losses of MTP are in the lines, too."""
        logs = [outputs[name] for name in ("gpt", "hybrid")]
        gpt, hybrid = (list(megatron_log.iterations(log)) for log in logs)
        assert len(gpt) == 3 and len({one.loss for one in gpt}) == 3
        assert [one.loss for one in hybrid] == [one.loss for one in gpt]
        assert [one.grad_norm for one in hybrid] == [one.grad_norm for one in gpt]
        counts = {megatron_log.facts(log)["parameters"] for log in logs}
        assert len(counts) == 1 and None not in counts
        for log in logs:
            assert log.count("mtp_1 loss:") == 3
            # All attentions are absorbed: two of the decoder and one of MTP.
            assert log.count("linear_k_up_proj.weight") >= 3
            assert "linear_kv_up_proj.weight" not in log
