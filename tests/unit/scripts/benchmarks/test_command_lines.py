"""Command lines of all benchmarks: mistakes are one line, and former results are shown again."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks import serving
from benchmarks.kit import arguments
from benchmarks.kit.arguments import KNOWN, Option
from tests.unit.scripts.benchmarks.registered import BENCHMARKS, DOCS

COUNT = "expected a whole number above 0"
OURS = "--implementations ours "
# Beside those that follow from the types of the options.
MISTAKES = {
    "attention": [
        ("--layouts bshd", "expected some of sbhd, thd"),
        ("--suite none", "argument --suite: invalid choice"),
        ("--form other", "argument --form: invalid choice"),
        ("--backend other", "argument --backend: invalid choice"),
    ],
    "cached_attention": [("--suites decode", "expected some of prefill, offload")],
    "context_parallel": [
        ("", "context parallelism needs 2 or more processes, got 1"),
        ("--layouts bshd", "expected some of sbhd, thd"),
        ("--cp-comm-types a2a", "expected some of all_gather, p2p"),
        ("--form other", "argument --form: invalid choice"),
        ("--recompute core_attn", "expected some of none, mla_up_proj"),
    ],
    "context_parallel_compute": [
        ("--seq-lens 1000 --layouts thd", "multiples of 128 for thd on 4 ranks; got 1000")
    ],
    "conversion": [
        ("--sizes 0.1GB,huge", "got 'huge'"),
        ("--work-folder nowhere", "--work-folder nowhere is no folder"),
        ("--sizes 900TB", "GB free"),
    ],
    "decode": [
        ("--implementations FlashMLA,other", "expected some of ours, "),
        ("--kv 1 --query-lengths 1,2", "2 new tokens are more than 1"),
    ],
    "decode_context_parallel": [
        ("", "a cache is shared by 2 or more processes, got 1"),
        ("--layouts dp", "expected some of tp, shared, own"),
        ("--num-cuda-graphs -1", f"argument --num-cuda-graphs: {COUNT}"),
    ],
    "decode_steps": [("--loops vllm", "expected some of megatron, loop")],
    "drawing": [
        ("--draws top_p,beam", "expected some of greedy, sampled, top_p, top_k, min_p, both"),
        ("--logits none", "expected some of flat, peaked"),
    ],
    "dsa": [("--topk 9999", "--topk must be at most the keys of --kv and --indexer")],
    "dsa_layer": [("--works sparse,none", "expected some of sparse, warm-up, dense")],
    "engine": [
        ("--max-tokens 100", "--max-tokens must be a multiple of 64"),
        ("--max-requests 3000", "--max-tokens must be at least --max-requests=3000"),
        ("--shared-prefix 2000", "--shared-prefix must be below --longest-prompt=1024"),
    ],
    "fp8_training": [
        ("--precisions mxfp8", "expected some of bf16, bf16-absorbed, tensorwise, blockwise"),
        ("--attentions flash", "expected some of absorbed, standard"),
    ],
    "fusions": [
        ("--cases query,value", "expected some of query, keys, down, layer"),
        ("--block-heads 3", "expected some of 1, 2, 4, 8"),
    ],
    "grouped_experts": [
        ("--cases router", "expected some of choose, order, into, activation, out_of, sums"),
        ("--topk 17", "--topk must be at most --experts=16, got 17"),
    ],
    "invariant_products": [
        ("--works q_up,other", "expected q_down, kv_down, q_up, proj, fc1, fc2 or INPUTSxOUT"),
        ("--tiles 32x64x4x3", "expected ROWSxCOLUMNSxWARPSxSTAGES with multiples of 64 rows"),
        ("--tiles 64x256x12x4", "expected 128x256x12xSTAGES with at most 4 stages"),
        ("--tiles 128x256x12x5", "expected 128x256x12xSTAGES with at most 4 stages"),
    ],
    "latent_attention": [("--works decode", "expected some of forward, backward")],
    "load": [
        ("--shared-prefix 256", "--shared-prefix must be below --longest-prompt=256, got 256"),
        ("--model nowhere", "model must be a folder with a checkpoint"),
    ],
    "prefix_tiers": [
        ("--device-share 100", "--device-share must be below 100, got 100"),
        ("--tokens 1", "--tokens must be at least 2, got 1"),
        ("--prefix-folder .", "--prefix-folder must be new or empty, got ."),
    ],
    "pretraining": [
        ("--iterations 10", "--iterations must be more than --skip 10, got 10"),
        ("--attentions flash", "expected some of standard, absorbed"),
        ("--micro-batch-size 3", "must be a multiple of --micro-batch-size x --gpus = 3"),
    ],
    "qk_clip": [
        ("--suites all", "expected some of maxima, cost, clip"),
        ("--backends flash_attention_3", "expected some of hopper, triton, "),
        ("--tokens 8k,16k", "expected one number, got '8k,16k'"),
    ],
    "serving": [
        ("--rows 32", "expected rows such as 32x1k/256 or 64x1k/256*4, got '32'"),
        ("--rows 64x1k/256*1", "expected at least 2 rounds after *, got '64x1k/256*1'"),
        ("--rows 0x1k/256", f"argument --rows: {COUNT}"),
        ("--implementations sglang", "of ours, vllm, ours-server, vllm-server, ours-parity"),
        ("--implementations vllm", "needs the package vllm, which is not installed here"),
        ("--vllm nowhere", "--implementations vllm,vllm-server needs the package vllm, which"),
        (OURS + "--prefill-graph-tokens -1", "must be from 0 to --max-num-batched-tokens"),
        (OURS + "--prefill-graph-tokens 64 --eager", "and 0 with --eager, got 64"),
        (OURS + "--prefill-tokens 1k,2k", "argument --prefill-tokens: expected a whole"),
        (OURS + "--server-packages nowhere", "--server-packages must be a folder, got now"),
        (OURS + "--logs /proc/none", "--logs"),
        ("--implementations vllm --profile p", "--profile needs some of ours, ours-par"),
        ("--temperature -1", "argument --temperature: expected a number of at least 0"),
    ],
}


def mistakes(name: str) -> Iterator[tuple[str, str]]:
    """Those of every type of option, then the benchmark's own."""
    options, own = BENCHMARKS[name].options, ""
    if name == "serving":
        # Its own peers are not installed.
        own = OURS
    for option, value in options.items():
        kind = value if isinstance(value, Option) else KNOWN.get(option, Option(""))
        flag = f"--{option.replace('_', '-')}"
        if kind.type in (arguments.count, arguments.parse_sizes):
            for text in ("0", "16q"):
                yield f"{flag} {text}", f"argument {flag}: {COUNT}"
    if "seconds_per_row" in options:
        message = "expected a number of seconds above 0, got 'nan'"
        yield "--seconds-per-row nan", message
    if "device" in options and name != "decode_context_parallel":
        message = "--device cuda needs a GPU, and there is none; give --device cpu"
        yield f"{own}--device cuda", message
    yield f"{own}--render /nowhere.json", "--render must be JSON that this script wrote"
    yield from MISTAKES.get(name, ())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_mistakes(name, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    benchmark = BENCHMARKS[name]
    folder = [str(tmp_path / "out")] if benchmark.files else []
    for options, message in mistakes(name):
        assert benchmark.main([*folder, *options.split()]) == 2, options
        error = capsys.readouterr().err
        assert error.startswith(f"{name}.py: error: ")
        assert message in error and error.count("\n") == 1, (options, error)
        assert not (tmp_path / "out").exists()


# What they have measured, and a figure of their rows where that is no matter of course.
PUBLISHED = {
    "attention": (
        "attention/[cl]*.json",
        "remeasured/core.json",
        "remeasured/layer*.json",
        "fp8/layer.json",
    ),
    "cached_attention": ("inference/[po][rf][ef]*.json", "remeasured/cached*.json"),
    "context_parallel": ("context-parallel/*.json", "remeasured/context-parallel*.json"),
    "context_parallel_compute": ("context-parallel/one-gpu/*.json",),
    "conversion": ("conversion/benchmark.json",),
    "decode": (
        "decode/[bdlo]*.json",
        "decode/flash*.json",
        "decode/fp8.json",
        "decode/fp8-p*.json",
    ),
    "decode_context_parallel": ("inference/decode-context-parallel*.json",),
    "decode_steps": ("generation/decode-steps*.json",),
    "drawing": ("generation/drawing.json",),
    "dsa": ("dsa/kernels.json",),
    "dsa_decode": ("dsa/decode.json",),
    "dsa_layer": ("dsa/layer*.json",),
    "engine": ("inference/engine*.json", "remeasured/engine.json"),
    "fp8_training": ("fp8/fp8_training.json",),
    "fusions": ("attention/fusions.json",),
    "grouped_experts": ("generation/grouped-experts.json",),
    "invariant_products": ("inference/products*.json",),
    "latent_attention": ("kernels/latent.json",),
    "load": ("generation/load*.json",),
    "prefix_tiers": ("inference/tiers.json",),
    "pretraining": ("pretraining/*.json",),
    "qk_clip": ("recipes/qk_clip*.json",),
    "serving": ("generation/serving*.json", "generation/traffic*.json"),
    "speculative": ("generation/speculative.json",),
    "training_graphs": ("attention/graphs.json",),
}
FIGURES = {
    "decode": "tbps",
    "drawing": "torch_us",
    "engine": "generated",
    "fusions": "ours step_us",
    "invariant_products": "tflops",
}
# Whose published results take seconds to draw.
MANY_PANELS = {"attention", "context_parallel"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_published_results_are_shown_again(name, tmp_path, capsys, monkeypatch):
    """Also those that older versions wrote."""
    benchmark = BENCHMARKS[name]
    if name in MANY_PANELS:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = [str(file) for files in PUBLISHED[name] for file in sorted(DOCS.glob(files))]
    assert found
    folder = [str(tmp_path)] if benchmark.files else []
    assert benchmark.main([*folder, "--render", *found]) == 0
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    assert len(last) == len(found) == out.count("\nMeasured on ")
    rows = [row for report in last for row in report[benchmark.report.rows_key]]
    assert len(rows) >= len(found)
    if name in FIGURES:
        assert sum(FIGURES[name] in row for row in rows) > 1
    if folder:
        assert (tmp_path / f"{benchmark.files}.png").exists() == (name not in MANY_PANELS)


def test_every_result_in_the_docs_is_a_programs():
    """Or was recorded by a script that is no benchmark."""
    shown = {file for files in PUBLISHED.values() for one in files for file in DOCS.glob(one)}
    for file in DOCS.rglob("*.json"):
        content = json.loads(file.read_text())
        about = content.get("environment", {}) if isinstance(content, dict) else {}
        if "benchmarks/" in str(about.get("command", "")):
            assert file in shown, file


# By an option that has another name since, and in words.
NOT_REPEATED = {"decode/flash-attention-3.json", "attention/layer.json"}


def test_recorded_commands_are_accepted(tmp_path, monkeypatch):
    """What the results in the docs were made with makes them again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(serving, "vllm_version", lambda _: "0.24.0")
    monkeypatch.setattr(serving, "missing_for_our_server", lambda _: [])
    (tmp_path / "vllm").mkdir()
    parsed = 0
    for name, patterns in PUBLISHED.items():
        for file in (file for one in patterns for file in DOCS.glob(one)):
            content = json.loads(file.read_text())
            about = content.get("environment") or content["machine"]
            _, script, words = about.get("command", "").partition(f"{name}.py")
            if script and str(file.relative_to(DOCS)) not in NOT_REPEATED:
                BENCHMARKS[name].parse(shlex.split(words))
                parsed += 1
    assert parsed > 50
