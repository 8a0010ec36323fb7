"""Every benchmark: mistakes, published results shown again, and tiny cases on a CPU.

What is compared must be right there, too: a benchmark whose implementations compute different
things would compare their times all the same.
"""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import serving, smoke
from benchmarks.attention import AttentionReport
from benchmarks.attention_features import FeatureReport
from benchmarks.context_parallel import CPReport
from benchmarks.decode import CASCADES
from benchmarks.decode import IMPLEMENTATIONS as DECODERS
from benchmarks.kit import Benchmark, arguments
from benchmarks.kit.arguments import KNOWN, Option
from benchmarks.shared_prefix import WORKS, PrefixReport
from checks.tables.measured import (
    features_table,
    long_table,
    shared_prefix_table,
    training_step_table,
)
from tests.support import needs
from tests.support.programs import run_script

FOLDER = Path(__file__).resolve().parents[4] / "scripts/benchmarks"
DOCS = FOLDER.parents[1] / "docs" / "measurements"
COUNT = "expected a whole number above 0"
OURS = "--implementations ours "
Rows = list[dict]


def _registered() -> dict[str, type[Benchmark]]:
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        started = re.search(r"^    kit\.main\((\w+)\)$", path.read_text(), re.MULTILINE)
        if started:
            found[path.stem] = getattr(
                importlib.import_module(f"benchmarks.{path.stem}"), started[1]
            )
    return found


BENCHMARKS = _registered()
# Beside those that follow from the types of the options.
MISTAKES = {
    "attention": [
        ("--layouts bshd", "expected some of sbhd, thd"),
        ("--suite none", "argument --suite: invalid choice"),
    ],
    "context_parallel": [
        ("", "context parallelism needs 2 or more processes, got 1"),
        ("--cp-comm-types a2a", "expected some of all_gather, p2p"),
        ("--recompute core_attn", "expected some of none, mla_up_proj"),
    ],
    "decode": [
        ("--implementations FlashMLA,other", "expected some of ours, "),
        ("--kv 1 --query-lengths 1,2", "2 new tokens are more than 1"),
        ("--kv 64 --query-lengths 1 --shared-prefix 64", "at most 63 keys, of requests of equal"),
    ],
    "dsa": [("--topk 9999", "--topk must be at most the keys of --kv and --indexer")],
    "long_context": [("--sizes 4k --cp 6", "divide into 2 --cp chunks, at least 2 of --cp: got 4")],
    "serving": [
        ("--rows 32", "expected rows such as 32x1k/256 or 64x1k/256*4, got '32'"),
        ("--rows 64x1k/256*1", "expected at least 2 rounds after *, got '64x1k/256*1'"),
        ("--rows 0x1k/256", f"argument --rows: {COUNT}"),
        ("--implementations sglang", "of ours, vllm, ours-server, vllm-server, ours-parity"),
        ("--vllm nowhere", "--implementations vllm,vllm-server needs the package vllm, which"),
        (OURS + "--prefill-tokens 1k,2k", "argument --prefill-tokens: expected a whole"),
        (OURS + "--server-packages nowhere", "--server-packages must be a folder, got now"),
        (OURS + "--logs /proc/none", "--logs"),
        (OURS + "--scale-down 3", "--scale-down 3 does not divide vocab_size 129280"),
        (OURS + "--experts 1", "--experts must be at least 2, got 1"),
        ("--temperature -1", "argument --temperature: expected a number of at least 0"),
    ],
    "attention_features": [("--features other", "expected some of sinks, window, gate headwise")],
    "training_step": [
        (
            "--rows v3/4k,v3",
            "expected rows such as v3/16k or v3/16k/thd, of v3 or v2-lite, got 'v3'",
        ),
        ("--rows v3/4k/bshd", "got 'v3/4k/bshd'"),
        ("--implementations theirs", "expected some of megatron, ours, ours-graphs, separated"),
    ],
    "resharding": [("", "resharding needs 2 or more processes, got 1; start this script by")],
    "weight_updates": [("--scale-down 3", "--scale-down 3 does not divide vocab_size 129280")],
    "shared_prefix": [],
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
        yield "--seconds-per-row nan", "expected a number of seconds above 0, got 'nan'"
    if "device" in options:
        message = "--device cuda needs a GPU, and there is none; give --device cpu"
        yield f"{own}--device cuda", message
    yield f"{own}--render /nowhere.json", "--render must be JSON that this script wrote"
    yield from MISTAKES[name]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_mistakes(name, tmp_path, capsys, monkeypatch):
    """They are one line, before anything is written."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
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
        *("attention/core*.json", "attention/layer*.json", "fp8/layer.json"),
        *("remeasured/core.json", "remeasured/layer*.json"),
    ),
    "context_parallel": ("context-parallel/*.json", "remeasured/context-parallel*.json"),
    "decode": (
        *("decode/[bdlo]*.json", "decode/flash*.json", "decode/fp8.json", "decode/fp8-p*.json"),
    ),
    "dsa": ("dsa/kernels.json",),
    "long_context": ("long-context/*.json",),
    "serving": tuple(f"generation/{name}.json" for name in ("serving*", "structured", "traffic*")),
    "resharding": ("inference/resharding*.json",),
    "weight_updates": ("inference/weight-updates*.json",),
    "shared_prefix": ("shared-prefix/*.json",),
    "attention_features": ("attention/attention_features.json", "attention/sinks.json"),
    "training_step": ("training-step/*.json",),
}
FIGURES = {"attention": "step of megatron's", "decode": "tbps", "dsa": "tflops"}
# Whose published results take seconds to draw.
MANY_PANELS = {"attention", "context_parallel"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_published_results_are_shown_again(name, tmp_path, capsys, monkeypatch):
    """Also those that older versions wrote."""
    benchmark = BENCHMARKS[name]
    if name in MANY_PANELS:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = [str(file) for files in PUBLISHED[name] for file in sorted(DOCS.glob(files))]
    if not found and name in ("training_step", "long_context"):
        pytest.skip("not measured yet")
    assert found
    folder = [str(tmp_path)] if benchmark.files else []
    assert benchmark.main([*folder, "--render", *found]) == 0
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    assert len(last) == len(found) == out.count("\nMeasured on ")
    rows = [row for report in last for row in report["rows"]]
    assert len(rows) >= len(found)
    if name in FIGURES:
        assert sum(FIGURES[name] in row for row in rows) > 1
    if folder:
        assert (tmp_path / f"{benchmark.files}.png").exists() == (name not in MANY_PANELS)


# By options that have other names since or are no more, and in words.
NOT_REPEATED = ("decode/flash-attention-3.json", "attention/layer.json", "h200-x2.json", "x4.json")


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
            if script and not str(file).endswith(NOT_REPEATED):
                BENCHMARKS[name].parse(shlex.split(words))
                parsed += 1
    assert parsed > 25


def test_every_result_in_the_docs_is_a_programs():
    """Of one that is here, or of a commit that a page names."""
    shown = {file for files in PUBLISHED.values() for one in files for file in DOCS.glob(one)}
    pages = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    for file in set(DOCS.rglob("*.json")) - shown:
        content = json.loads(file.read_text())
        about = content.get("environment", {}) if isinstance(content, dict) else {}
        found = re.search(r"benchmarks/(\w+\.py)", str(about.get("command", "")))
        if found:
            assert re.search(rf"{found[1]}` of [0-9a-f]{{8}}", pages), file


# Its servers are programs of their own: see test_serving.py.
ELSEWHERE = {"serving"}
# Why something of a benchmark cannot run here.
REASONS = re.compile(
    "needs a GPU|compute capability 9.0|computes in fp16 and bf16|transformer-engine|"
    "cannot be imported|no such kernel|last dimension|not captured in CUDA graphs"
)


def measured(rows: Rows) -> Rows:
    return [row for row in rows if not row.get("error")]


def attention(rows: Rows, out: str, folder: Path) -> None:
    found = AttentionReport.read(folder / "attention.json")
    layers = [(row.case.recompute, row.case.layout) for row in found.of("layer")]
    assert layers == [(True, "sbhd"), (True, "thd"), (False, "sbhd"), (False, "thd")]
    assert {row.suite for row in found.rows[8:]} == {"core"}
    assert {row.ran for row in found.of("layer")} == {"absorbed, reference"}
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
    for module in ("transformer_engine", "vllm", "flash_attn"):
        assert any(f"No module named '{module}'" in error for error in why.values())


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


def decode(rows: Rows, out: str, folder: Path) -> None:
    assert [row["implementation"] for row in rows] == [*DECODERS, *CASCADES]
    plain, fp8, cascade = measured(rows)
    assert plain["implementation"] == "ours, reference" and plain["tbps"] > 0
    assert plain["difference"] == fp8["difference"] == 0.0 and not plain["graph"]
    assert fp8["implementation"] == "ours, reference, fp8"
    assert cascade["implementation"] == "ours, reference, cascade"
    assert 0 < cascade["difference"] < 1e-6
    assert "- it needs a GPU: FlashMLA n=2" in out


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


def long_context(rows: Rows, out: str, folder: Path) -> None:
    """Messages of half of 64 tokens: [latent | k_rope] of 32 + 16 numbers, index keys of 32."""
    settings = ["reference, indexer reference", "reference, indexer reference_fp8", "reference"]
    pieces = {f"{name}_ms" for name in ("select", "loss", "attention_forward", "other")}
    for row, setting in zip(rows, settings, strict=True):
        assert row["settings"] == f"absorbed {setting}, all_gather kept"
        sparse = row["work"] != "dense"
        assert row["forward_bytes"] == row["backward_bytes"] == 32 * 4 * (48 + 32 * sparse)
        assert pieces - row.keys() == (set() if sparse else {"select_ms", "loss_ms"})
        found = sum(row.get(name, 0) for name in (*pieces, "attention_backward_ms"))
        assert found == pytest.approx(row["step_ms"], abs=0.05) and row["other_ms"] > 0
    (folder / "long-context").symlink_to(folder)
    (folder / "long.json").symlink_to(folder / "out.json")
    assert long_table(folder).count("\n| dsa_fp8 | 64 | 2 | 2 | ") == 1


def resharding(rows: Rows, out: str, folder: Path) -> None:
    """To a whole model a rank sends its half, to halves of one nothing."""
    whole, parts = rows[1], rows[3]
    assert [row["work"] for row in measured(rows)] == ["all_gather", "to whole", "copy", "to parts"]
    missing = whole["gibibytes"] - parts["gibibytes"]
    assert missing <= whole["sent_gibibytes"] < 1.02 * missing and not parts["sent_gibibytes"]


def weight_updates(rows: Rows, out: str, folder: Path) -> None:
    assert [row["work"] for row in measured(rows)] == [
        "copy",
        "update",
        "update here",
        "sleep 1",
        "sleep 2",
    ]
    assert all(row["gigabytes_per_second"] > 0 for row in rows)


def shared_prefix(rows: Rows, out: str, folder: Path) -> None:
    """24 tokens and 4 answers of 8, each behind a copy of them in the other pack."""
    assert [row["work"] for row in measured(rows)] == [*WORKS]
    ran = [row.ran for row in PrefixReport.read(folder / "shared_prefix.json").rows]
    assert ran == ["reference", *["absorbed, reference"] * 2, "reference"]
    for row in rows:
        assert row["tokens"] == 56 / 128 and row["pairs"] == (300 + 4 * 228) / (4 * 528)
        assert row["step"] == row["shared step_ms"] / row["unshared step_ms"] > 0
        assert 0 < row["difference"] < 1e-5
    (folder / "shared-prefix").symlink_to(folder)
    line = "| attention layer | 2 | 24+4x8 | absorbed, reference | "
    assert line in shared_prefix_table(folder)


def attention_features(rows: Rows, out: str, folder: Path) -> None:
    """A gate is in the layer alone, and a window of 32 is longer than the sequence."""
    names = [(row["work"].partition(",")[0], row["feature"]) for row in measured(rows)]
    alone, gates = (
        [("attention alone", x) for x in ("sinks", "window")],
        ("headwise", "elementwise"),
    )
    of_layer = ["sinks", "window", *(f"gate {x}" for x in gates)]
    assert names == [*alone * 2, *(("attention layer", x) for x in of_layer)]
    assert {row["pairs"] for row in rows if row["window"]} == {(15 + 19 * 5) / 300}
    assert all(row["step"] == row["step_ms"] / row["without: step_ms"] for row in rows)
    ran = {row.ran for row in FeatureReport.read(folder / "attention_features.json").rows}
    assert ran == {"reference", "absorbed, reference"}
    (folder / "attention").symlink_to(folder)
    assert "| attention layer | window 5 | 2 | 24 | absorbed, reference | " in features_table(
        folder
    )


def training_step(rows: Rows, out: str, folder: Path) -> None:
    """Megatron's loss from the same weights; a pack costs less in attention; FLOPs by hand."""
    found = measured(rows)
    assert [(row["implementation"], row["layout"]) for row in found] == [
        (implementation, layout)
        for layout in ("sbhd", "thd")
        for implementation in ("megatron", "ours")
    ]
    assert [row.get("difference", 1) < 1e-5 for row in found] == [False, True] * 2
    assert all(0 < row["host_ms"] <= row["step_ms"] and 3 < row["loss"] < 5 for row in found)
    # V3 / 64: 4 heads of 32 + 16 and 32, ranks 32 and 16; dense 256, 2 of 4 experts of 32 and one.
    hidden, tokens = 128, 32
    attention = hidden * 32 + 32 * 4 * 48 + hidden * 32 + 16 * 4 * 64 + 4 * 32 * hidden
    weights = 2 * attention + 3 * hidden * (256 + 3 * 32) + hidden * (4 + 64)
    assert found[0]["flops"] == 6 * (weights * tokens + 2 * tokens**2 / 2 * 4 * 80)
    assert found[0]["flops"] > found[2]["flops"]
    assert "- it needs a GPU and transformer-engine: ours-graphs v3 S=32 sbhd recompute" in out
    (folder / "training-step").symlink_to(folder)
    assert "| v3 S=32 thd recompute | " in training_step_table(folder)


CHECKS: dict[str, Callable[[Rows, str, Path], None]] = {
    one.__name__: one
    for one in (
        *(attention, attention_features, context_parallel, decode, dsa, long_context),
        *(shared_prefix, training_step),
        *(resharding, weight_updates),
    )
}


def test_every_benchmark_is_run():
    assert CHECKS.keys() | ELSEWHERE == BENCHMARKS.keys() == MISTAKES.keys() == PUBLISHED.keys()


@needs.no_gpu
@pytest.mark.parametrize("name", CHECKS)
def test_tiny_cases_on_a_cpu(name, tmp_path, capsys):
    """In a process of its own, which leaves its groups; and they are shown again."""
    benchmark = BENCHMARKS[name]
    folder = [tmp_path] if benchmark.files else []
    file = tmp_path / (f"{benchmark.files}.json" if folder else "out.json")
    command = [FOLDER / f"{name}.py", *folder, "--quick", *(() if folder else ("--json", file))]
    ranks = 2 if name in ("context_parallel", "resharding") else 0
    done = run_script(*command, ranks=ranks, CUDA_VISIBLE_DEVICES="", GIT_COMMIT="abc")
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


def test_smoke_has_a_case_of_every_benchmark(tmp_path, monkeypatch):
    """Whose options are accepted; what needs more than there is is skipped by name."""
    monkeypatch.setattr(serving, "vllm_version", lambda _: "0.24.0")
    for one in smoke.SMOKES:
        words = shlex.split(one.options.format(out=tmp_path))
        BENCHMARKS[one.script].parse(words)
    assert {one.script for one in smoke.SMOKES} == BENCHMARKS.keys()
    skipped = {smoke.missing(one, 1) for one in smoke.SMOKES}
    assert {"", "it needs 2 GPUs", "it needs transformer_engine", "it needs vllm"} == skipped


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('[{"rows": [{"ms": 1}, {"error": "it needs a GPU"}]}]', ""),
        ('[{"rows": [{"error": "it needs a GPU"}]}]', "no figures: it needs a GPU"),
        ('[{"rows": [{"ms": 1}, {"error": "KeyError: x"}]}]', "KeyError: x"),
        ('[{"rows": [{"error": "rank 1: OutOfMemoryError: x"}, {"ms": 1}]}]', "rank 1: OutOf"),
        ("Traceback", "its last line is no report"),
    ],
)
def test_smoke_tells_failures_from_refusals(line, problem):
    found = smoke.problem(["some", line])
    assert found.startswith(problem) and bool(found) == bool(problem)
