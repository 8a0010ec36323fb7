"""Command lines of all benchmarks: mistakes are one line, and former results are shown again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.attention import AttentionBenchmark as Attention
from benchmarks.cached_attention import CachedBenchmark as CachedAttention
from benchmarks.context_parallel import CPBenchmark as ContextParallel
from benchmarks.conversion import ConversionBenchmark as Conversion
from benchmarks.decode import DecodeBenchmark as Decode
from benchmarks.decode_context_parallel import SharedBenchmark as SharedCache
from benchmarks.decode_steps import StepsBenchmark as DecodeSteps
from benchmarks.drawing import DrawingBenchmark as Drawing
from benchmarks.dsa import DSABenchmark as DSA
from benchmarks.dsa_decode import DSADecodeBenchmark as DSADecode
from benchmarks.dsa_layer import DSALayerBenchmark as DSALayer
from benchmarks.engine import EngineBenchmark as Engine
from benchmarks.fp8_training import TrainingBenchmark as FP8Training
from benchmarks.fusions import FusionsBenchmark as Fusions
from benchmarks.grouped_experts import ExpertsBenchmark as GroupedExperts
from benchmarks.invariant_products import ProductBenchmark as InvariantProducts
from benchmarks.latent_attention import LatentBenchmark as LatentAttention
from benchmarks.load import LoadBenchmark as Load
from benchmarks.prefix_tiers import TiersBenchmark as PrefixTiers
from benchmarks.pretraining import PretrainingBenchmark as Pretraining
from benchmarks.qk_clip import QKClipBenchmark as QKClip
from benchmarks.serving import ServingBenchmark as Serving
from benchmarks.training_graphs import GraphsBenchmark as TrainingGraphs

DOCS = Path(__file__).resolve().parents[4] / "docs" / "measurements"
COUNT, SECONDS = (
    "expected a whole number above 0",
    "expected a number of seconds above 0, got 'nan'",
)
FILE = "--render must be JSON that this script wrote"
NO_GPU = "--device cuda needs a GPU, and there is none; give --device cpu"
OURS = ["--implementations", "ours"]
MISTAKES = {
    Attention: [
        (["--seq-lens", "16q"], f"argument --seq-lens: {COUNT}"),
        (["--heads", "0"], f"argument --heads: {COUNT}"),
        (["--layouts", "bshd"], "expected some of sbhd, thd"),
        (["--suite", "none"], "argument --suite: invalid choice"),
        (["--form", "other"], "argument --form: invalid choice"),
        (["--backend", "other"], "argument --backend: invalid choice"),
        (["--seconds-per-row", "nan"], SECONDS),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    CachedAttention: [
        (["--suites", "decode"], "expected some of prefill, offload"),
        (["--render", "missing.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    ContextParallel: [
        ([], "context parallelism needs 2 or more processes, got 1"),
        (["--sizes", "16q"], f"argument --sizes: {COUNT}"),
        (["--heads", "0"], f"argument --heads: {COUNT}"),
        (["--layouts", "bshd"], "expected some of sbhd, thd"),
        (["--cp-comm-types", "a2a"], "expected some of all_gather, p2p"),
        (["--form", "other"], "argument --form: invalid choice"),
        (["--recompute", "core_attn"], "expected some of none, mla_up_proj"),
        (["--seconds-per-row", "nan"], SECONDS),
        (["--render", "/nowhere.json"], FILE),
    ],
    Conversion: [
        (["--sizes", "0.1GB,huge"], "got 'huge'"),
        (["--repeat", "0"], f"{COUNT}, got '0'"),
        (["--work-folder", "nowhere"], "--work-folder nowhere is no folder"),
        (["--sizes", "900TB"], "GB free"),
        (["--render", "/nowhere.json"], FILE),
    ],
    Decode: [
        (["--kv", "0"], f"argument --kv: {COUNT}"),
        (["--implementations", "FlashMLA, other"], "expected some of ours, "),
        (["--kv", "1", "--query-lengths", "1,2"], "2 new tokens are more than 1"),
        (["--seconds-per-row", "nan"], SECONDS),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    DecodeSteps: [
        (["--loops", "vllm"], "expected some of megatron, loop"),
        (["--batch", "0"], f"argument --batch: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    Drawing: [
        (["--draws", "top_p,beam"], "expected some of greedy, sampled, top_p, top_k, min_p, both"),
        (["--logits", "none"], "expected some of flat, peaked"),
        (["--requests", "0"], f"argument --requests: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    DSA: [
        (["--topk", "9999"], "--topk must be at most the keys of --kv and --indexer"),
        (["--heads", "0"], f"argument --heads: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    DSADecode: [
        (["--kv", "0"], f"argument --kv: {COUNT}"),
        (["--seconds-per-row", "nan"], SECONDS),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    DSALayer: [
        (["--works", "sparse,none"], "expected some of sparse, warm-up, dense"),
        (["--seq-lens", "16q"], f"argument --seq-lens: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    Engine: [
        (["--max-tokens", "100"], "--max-tokens must be a multiple of 64"),
        (["--max-requests", "3000"], "--max-tokens must be at least --max-requests=3000"),
        (["--shared-prefix", "2000"], "--shared-prefix must be below --longest-prompt=1024"),
        (["--device", "cuda"], NO_GPU),
    ],
    Fusions: [
        (["--cases", "query,value"], "expected some of query, keys, down, layer"),
        (["--block-heads", "3"], "expected some of 1, 2, 4, 8"),
        (["--seconds-per-row", "nan"], SECONDS),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    GroupedExperts: [
        (["--cases", "router"], "expected some of choose, order, into, activation, out_of, sums"),
        (["--topk", "17"], "--topk must be at most --experts=16, got 17"),
        (["--tokens", "0"], f"argument --tokens: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    TrainingGraphs: [
        (["--seq-lens", "16q"], f"argument --seq-lens: {COUNT}"),
        (["--rounds", "0"], f"argument --rounds: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    InvariantProducts: [
        (["--works", "q_up,other"], "expected q_down, kv_down, q_up, proj, fc1, fc2 or INPUTSxOUT"),
        (["--rows", "0"], f"argument --rows: {COUNT}"),
        (["--tiles", "32x64x4x3"], "expected ROWSxCOLUMNSxWARPSxSTAGES with multiples of 64 rows"),
        (["--tiles", "64x256x12x4"], "expected 128x256x12xSTAGES with at most 4 stages"),
        (["--tiles", "128x256x12x5"], "expected 128x256x12xSTAGES with at most 4 stages"),
        (["--seconds-per-row", "nan"], SECONDS),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    LatentAttention: [
        (["--works", "decode"], "expected some of forward, backward"),
        (["--seq-lens", "16q"], f"argument --seq-lens: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    Load: [
        (["--shared-prefix", "256"], "--shared-prefix must be below --longest-prompt=256, got 256"),
        (["--requests", "0"], f"argument --requests: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
        (["--model", "nowhere"], "model must be a folder with a checkpoint"),
        (["--device", "cuda"], NO_GPU),
    ],
    PrefixTiers: [
        (["--device-share", "100"], "--device-share must be below 100, got 100"),
        (["--tokens", "1"], "--tokens must be at least 2, got 1"),
        (["--prefix-folder", "."], "--prefix-folder must be new or empty, got ."),
        (["--contexts", "0"], f"argument --contexts: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    Pretraining: [
        (["--iterations", "10"], "--iterations must be more than --skip 10, got 10"),
        (["--layers", "0"], f"argument --layers: {COUNT}, got '0'"),
        (["--attentions", "flash"], "expected some of standard, absorbed"),
        (["--micro-batch-size", "3"], "must be a multiple of --micro-batch-size x --gpus = 3"),
        (["--render", "/nowhere.json"], FILE),
    ],
    SharedCache: [
        ([], "a cache is shared by 2 or more processes, got 1"),
        (["--context", "0"], f"argument --context: {COUNT}"),
        (["--layouts", "dp"], "expected some of tp, shared, own"),
        (["--num-cuda-graphs", "-1"], f"argument --num-cuda-graphs: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
    ],
    FP8Training: [
        (["--precisions", "mxfp8"], "expected some of bf16, bf16-absorbed, tensorwise, blockwise"),
        (["--attentions", "flash"], "expected some of absorbed, standard"),
        (["--iterations", "0"], f"argument --iterations: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
    ],
    QKClip: [
        (["--suites", "all"], "expected some of maxima, cost, clip"),
        (["--backends", "flash_attention_3"], "expected some of hopper, triton, "),
        (["--tokens", "8k,16k"], "expected one number, got '8k,16k'"),
        (["--layers", "0"], f"argument --layers: {COUNT}"),
        (["--render", "/nowhere.json"], FILE),
        (["--device", "cuda"], NO_GPU),
    ],
    Serving: [
        (["--rows", "32"], "expected rows such as 32x1k/256 or 64x1k/256*4, got '32'"),
        (["--rows", "64x1k/256*1"], "expected at least 2 rounds after *, got '64x1k/256*1'"),
        (["--rows", "0x1k/256"], f"argument --rows: {COUNT}"),
        (["--implementations", "sglang"], "of ours, vllm, ours-server, vllm-server, ours-parity"),
        (["--implementations", "vllm"], "needs the package vllm, which is not installed here"),
        (["--vllm", "nowhere"], "--implementations vllm,vllm-server needs the package vllm, which"),
        ([*OURS, "--prefill-graph-tokens", "-1"], "must be from 0 to --max-num-batched-tokens"),
        ([*OURS, "--prefill-graph-tokens", "64", "--eager"], "and 0 with --eager, got 64"),
        ([*OURS, "--prefill-tokens", "1k,2k"], "argument --prefill-tokens: expected a whole"),
        ([*OURS, "--server-packages", "nowhere"], "--server-packages must be a folder, got now"),
        ([*OURS, "--logs", "/proc/none"], "--logs"),
        (["--implementations", "vllm", "--profile", "p"], "--profile needs some of ours, ours-par"),
        (["--temperature", "-1"], "argument --temperature: expected a number of at least 0"),
        ([*OURS, "--render", "/nowhere.json"], FILE),
        ([*OURS, "--device", "cuda"], NO_GPU),
    ],
}
WITHOUT_FOLDER = {
    DSA,
    DSADecode,
    DSALayer,
    Decode,
    Drawing,
    Engine,
    Fusions,
    GroupedExperts,
    Load,
    PrefixTiers,
    QKClip,
}
WITHOUT_FOLDER |= {DecodeSteps, InvariantProducts, LatentAttention, Serving, SharedCache}
WITHOUT_FOLDER |= {GroupedExperts, TrainingGraphs}
# Whose published results take seconds to draw.
MANY_PANELS = {Attention, ContextParallel}


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [(script, *one) for script, mistakes in MISTAKES.items() for one in mistakes],
)
def test_mistakes(script, options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = [] if script in WITHOUT_FOLDER else [str(tmp_path / "out")]
    assert script.main([*folder, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{script.script}: error: ")
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "files"),
    [
        (Attention, "attention/[cl]*.json"),
        (Attention, "fp8/layer.json"),
        (CachedAttention, "inference/[po][rf][ef]*.json"),
        (ContextParallel, "context-parallel/*.json"),
        (Conversion, "conversion/benchmark.json"),
        (FP8Training, "fp8/fp8_training.json"),
        (Pretraining, "pretraining/*.json"),
    ],
)
def test_published_results_are_shown_again(script, files, tmp_path, capsys, monkeypatch):
    """Also those that older versions wrote."""
    if script in MANY_PANELS:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = sorted(map(str, DOCS.glob(files)))
    assert found
    assert script.main([str(tmp_path), "--render", *found]) == 0
    out = capsys.readouterr().out
    assert len(json.loads(out.splitlines()[-1])) == len(found)
    assert out.count("\nMeasured on ") == len(found) and out.count("\n") > 3 * len(found)
    assert (tmp_path / f"{script.files}.png").exists() == (script not in MANY_PANELS)


@pytest.mark.parametrize(
    ("script", "file", "figure"),
    [
        (Decode, "decode/lengths.json", "tbps"),
        (Drawing, "generation/drawing.json", "torch_us"),
        (Engine, "inference/engine.json", "generated"),
        (Fusions, "attention/fusions.json", "ours step_us"),
        (InvariantProducts, "inference/products.json", "tflops"),
        (QKClip, "recipes/qk_clip.json", "step_ratio"),
        (QKClip, "recipes/qk_clip-maxima.json", "worst"),
    ],
)
def test_published_results_without_a_folder_are_shown_again(script, file, figure, capsys):
    assert script.main(["--render", str(DOCS / file)]) == 0
    [last] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(figure in row for row in last["rows"]) > 1
