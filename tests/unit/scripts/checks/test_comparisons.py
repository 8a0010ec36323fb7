"""What checks/tables/ reads of measured data for measurements/performance.md, and what it shows."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.kit.report import Times
from checks import docs_tables
from checks.docs_tables import DOCS, MEASUREMENTS, PLOT
from checks.tables import comparisons, performance, plot
from checks.tables.comparisons import SECTIONS, Measured, Row, Section

FILE, PAGE = f"{MEASUREMENTS}/attention/layer.json", f"{MEASUREMENTS}/performance.md"


def times(median: float) -> dict:
    return {"median": median, "least": 0.9 * median, "most": 1.2 * median, "repetitions": 9}


@pytest.fixture
def copied(tmp_path) -> Path:
    """Docs with one file of data, for speed, and a page and a plot that fit it."""
    docs = tmp_path / "docs"
    (docs / MEASUREMENTS / "attention").mkdir(parents=True)
    for name in (FILE, PAGE):
        shutil.copy(DOCS / name, docs / name)
    pytest.importorskip("matplotlib")
    assert docs_tables.main(["--docs", str(docs)]) == 0
    return docs


def test_a_changed_number_is_found_and_written(copied, capsys):
    """In the page and in the plot, which shows the slowest of a group in any case."""
    words = ["--docs", str(copied)]
    assert docs_tables.main([*words, "--check"]) == 0
    content = json.loads((copied / FILE).read_text())
    for row in content["rows"]:
        case = row["case"]
        wanted = (128, 65536, "sbhd", False)
        if (case["heads"], case["tokens"], case["layout"], case["recompute"]) == wanted:
            row["step"]["median"] = {"ours": 1.5, "megatron": 1.0}[case["implementation"]]
    (copied / FILE).write_text(json.dumps(content))
    capsys.readouterr()
    assert docs_tables.main([*words, "--check"]) == 1
    assert capsys.readouterr().out == "Differ: performance.md, performance.png\n"
    assert docs_tables.main(words) == 0
    line = "| 128 heads, 64k, one sequence | 1500 ms | Megatron + TE | 1000 ms | **1.50** | - |"
    assert line in (copied / PAGE).read_text()
    drawn = json.loads(plot.drawn(copied / PLOT))["Attention layer, forward and backward"]
    assert ["128 heads, 64k, one sequence  /  Megatron + TE", 1.5] in drawn
    (copied / PLOT).unlink()
    capsys.readouterr()
    assert docs_tables.main([*words, "--check"]) == 1
    assert capsys.readouterr().out == "Differ: performance.png\n"


ONE, TWO, THREE, NINE = ({"times": times(x)} for x in (1, 2, 3, 9))
FORWARD = {"forward": times(1)}
BOTH = {"forward": times(3), "backward": times(2)}
ATTEND = {"times": times(4), "more": {"attend_us": 3e6}}
SERVED = {"prefill_tokens_per_second": 1024.0, "step_ms": 6.0}
WORKS = {"sparse": times(2), "megatron-cudnn": times(4), "dense": times(1)}
LAYER = "implementation recompute heads tokens layout precision"
LAYERS = {
    ("ours", True, 16, 4096, "sbhd", "bf16"): {**FORWARD, "step": times(1)},
    ("megatron", True, 16, 4096, "sbhd", "bf16"): {**FORWARD, "step": times(2)},
    ("megatron", False, 16, 4096, "sbhd", "bf16"): {**FORWARD, "step": times(8)},
    ("ours", False, 16, 4096, "thd", "delayed"): {**FORWARD, "step": times(3)},
    ("megatron", False, 16, 4096, "thd", "delayed"): {**FORWARD, "step": times(2)},
    ("ours", False, 16, 8192, "thd", "bf16"): {**FORWARD, "step": times(3)},
}
FP8 = {("16 heads, 4k, pack, delayed", "Megatron + TE"): 1.5}
BF16 = {("16 heads, 4k, one sequence, recomputed", "Megatron + TE"): 0.5}
# By reader: names of what a case says, rows by their case, and the ratios that are read of them.
READ = {
    "sparse_rows": (
        "work heads kv shared implementation",
        {
            ("forward", 16, 8192, False, "hopper"): ONE,
            ("forward", 16, 8192, False, "triton"): NINE,
            ("forward", 16, 8192, False, "FlashMLA"): TWO,
            ("forward", 16, 8192, False, "TileLang"): {"error": "not installed"},
            ("backward", 16, 8192, True, "hopper"): THREE,
            ("backward", 16, 8192, True, "TileLang"): TWO,
            ("forward", 128, 8192, False, "hopper"): ONE,  # nobody to compare with
        },
        {
            ("forward, 16 heads, 8k, random choice", "FlashMLA"): 0.5,
            ("backward, 16 heads, 8k, shared choice", "TileLang"): 1.5,
        },
    ),
    # FlashMLA does not choose, so it is compared with our attention alone.
    "sparse_decode_rows": (
        "implementation heads batch kv",
        {
            ("sparse, hopper", 16, 32, 4096): ATTEND,
            ("dense, hopper", 16, 32, 4096): TWO,
            ("FlashMLA", 16, 32, 4096): {"times": times(6)},
            ("sparse, hopper", 16, 32, 8192): ATTEND,
        },
        {
            ("decode, 32 requests of 4k, 16 heads", "our dense decode"): 2,
            ("decode, attention alone, 32 requests of 4k, 16 heads", "FlashMLA"): 0.5,
        },
    ),
    "sparse_layer_rows": (
        "heads tokens",
        {
            (128, 8192): {
                "works": [{"name": name, "step": step} for name, step in WORKS.items()]
                + [{"name": "megatron", "error": "out of memory"}]
            }
        },
        {
            ("layer, 128 heads, 8k", "Megatron, cuDNN and FlashMLA"): 0.5,
            ("layer, 128 heads, 8k", "our dense layer"): 2,
        },
    ),
    # Attention alone may lack backward.
    "core_rows": (
        "implementation form heads tokens",
        {
            ("ours, hopper", "absorbed", 16, 8192): BOTH,
            ("torch, efficient", "absorbed", 16, 8192): {**FORWARD, "error": "out of memory"},
            ("ours, flash_attention_4", "expanded", 16, 8192): BOTH,
            ("FlashAttention-3", "expanded", 16, 8192): {"error": "not installed"},
        },
        {("576/512 forward, 16 heads, 8k", "PyTorch, memory-efficient"): 3},
    ),
    # The same recomputation and precision are compared.
    "layer_rows": (LAYER, LAYERS, BF16 | FP8),
    "fp8_rows": (LAYER, LAYERS, FP8),
    "decode_rows": (
        "implementation heads batch kv query_length block_size lengths",
        {
            ("ours, hopper", 16, 8, 8192, 1, 64, "equal"): THREE,
            ("ours, hopper", 16, 8, 8192, 1, 64, "one_long"): THREE,
            ("vLLM, FlashAttention-3", 16, 8, 8192, 1, 64, "one_long"): TWO,
        },
        {("8 requests up to 8k, one long, 16 heads", "FlashAttention-3"): 1.5},
    ),
    # Calls that are queued and calls that are waited for are rows of their own.
    "latent_rows": (
        "work heads tokens implementation",
        {
            ("forward", 16, 8192, "ours, hopper"): {**THREE, "called": times(8)},
            ("forward", 16, 8192, "FlashAttention-3"): {**TWO, "called": times(4)},
            ("forward", 16, 8192, "ours, triton"): {**NINE, "called": times(9)},
            ("backward", 16, 8192, "ours, hopper"): {**NINE, "called": times(9)},
        },
        {
            ("forward, 16 heads, 8k, queued", "FlashAttention-3"): 1.5,
            ("forward, 16 heads, 8k, called", "FlashAttention-3"): 2.0,
        },
    ),
    # Rates of prompts and times of steps; a row that the peer lacks is left out.
    "serving_rows": (
        "implementation size temperature",
        {
            ("ours", (1, 1024, 256), 0.0): SERVED,
            ("vllm", (1, 1024, 256), 0.0): {"prefill_tokens_per_second": 4096.0, "step_ms": 3.0},
            ("ours", (32, 1024, 256), 0.0): SERVED,
        },
        {("1k of prompts, 1 x 1k/256", "vLLM"): 4.0, ("decode step, 1 x 1k/256", "vLLM"): 2.0},
    ),
}


@pytest.mark.parametrize("reader", READ)
def test_readers(reader, tmp_path):
    names, cases, expected = READ[reader]
    rows = []
    for values, row in cases.items():
        case = dict(zip(names.split(), values))
        if "size" in case:
            case["size"] = dict(zip(("requests", "prompt", "output"), case["size"]))
        rows.append({"suite": "layer", "case": case, **row})
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"environment": {}, "rows": rows}))
    found = list(getattr(comparisons, reader)(file))
    assert {row.name: row.ratio for row in found} == expected
    if reader == "sparse_decode_rows":
        assert [row.spread is None for row in found] == [False, True]


def test_a_ring_with_other_recomputation_is_named(tmp_path):
    content = json.loads((DOCS / MEASUREMENTS / "context-parallel" / "h200-x2.json").read_text())
    ours, theirs = content["rows"][:2]
    ours["step_seconds"], theirs["step_seconds"] = [1.0], [2.0]
    theirs["case"]["recompute"] = "none"
    file = tmp_path / "a.json"
    file.write_text(json.dumps({**content, "rows": [ours, theirs]}))
    [row] = comparisons.ring_rows(file)
    assert row.work == "CP 2, 16 heads, 16k, one sequence, recomputed by ours only"
    assert (row.ratio, row.spread) == (0.5, None)
    # The other way around it would flatter.
    ours["case"]["recompute"], theirs["case"]["recompute"] = "none", "mla_up_proj"
    file.write_text(json.dumps({**content, "rows": [ours, theirs]}))
    assert list(comparisons.ring_rows(file)) == []


def rows_of(**by_work: list[float]) -> list[Row]:
    second = Times(1.0, 0.5, 2.0, 3)
    return [
        Row(work, "p", Times(ratio, ratio, ratio, 3), second, {"size": work}, str(number))
        for work, found in by_work.items()
        for number, ratio in enumerate(found)
    ]


def test_of_repeated_runs_the_median():
    found = Measured(SECTIONS[0], rows_of(a=[0.9, 1.3, 1.1], b=[0.8, 0.7]))
    assert [row.ratio for row in found.typical] == [1.1, 0.8]
    assert found.repeats(found.typical[0]) == [0.9, 1.3]
    assert found.typical[0].spread == (1.1 / 2.0, 1.1 / 0.5)


def test_the_slowest_is_shown_in_any_case():
    section = Section("t", (), lambda path: [], shown=({"size": ("a", "b")},), drawn=())
    found = Measured(section, rows_of(a=[0.9], b=[1.1], c=[1.2], d=[1.15]))
    assert [row.work for row in found.shown] == ["a", "b", "c"]
    assert [row.work for row in found.drawn] == ["c"]


def test_texts():
    found = [
        performance.time_text(*one) for one in ((1.4346, 1.3), (0.01234, 0.01), (0.00123, 9e-4))
    ]
    assert found == ["1435 ms", "12.3 ms", "1230 µs"]
    moved = "python scripts/bench_decode.py --kv 8k --json docs/decode/decode.json"
    present = (
        "python scripts/benchmarks/decode.py --kv 8k --json docs/measurements/decode/decode.json"
    )
    assert {performance.present_command(one) for one in (moved, present)} == {present}
    assert performance._values_text({"1": [1, 2, 3, 5], "2": [4]}, 5) == "1 (run 1-3, 5); 2 (run 4)"
    assert performance._values_text({"1": [1, 2]}, 2) == "1"


def test_every_file_of_the_sections_is_there_or_to_come():
    files = {file for section in SECTIONS for file in section.files}
    missing = {file for file in files if not (DOCS / MEASUREMENTS / file).exists()}
    assert missing <= {"dsa/layer.json", "generation/traffic.json"}
