"""docs/measurements/performance.md and its plot are what the recorded results say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from checks import performance_table
from checks.docs_tables import DOCS, MEASUREMENTS
from checks.performance import decoding, latent, layers, plot, rings, serving, sparse, tables
from checks.performance.row import Row
from checks.performance.sections import SECTIONS, Measured, Section

FILE = f"{MEASUREMENTS}/attention/layer.json"


def test_page_and_plot_are_what_the_data_say(capsys):
    code = performance_table.main([])
    assert code == 0, f"run performance_table.py --write: {capsys.readouterr().out}"


@pytest.fixture
def copied(tmp_path) -> Path:
    """Docs with one file of data, for speed, and a page that fits it."""
    docs = tmp_path / "docs"
    (docs / MEASUREMENTS / "attention").mkdir(parents=True)
    for name in (FILE, performance_table.PAGE):
        shutil.copy(DOCS / name, docs / name)
    pytest.importorskip("matplotlib")
    assert performance_table.main(["--docs", str(docs), "--write"]) == 0
    return docs


def change(file: Path, **milliseconds: float) -> None:
    """The step of both layers of 128 heads over one sequence of 64k, nothing recomputed."""
    content = json.loads(file.read_text())
    for row in content["rows"]:
        case = row["case"]
        wanted = (128, 65536, "sbhd", False)
        if (case["heads"], case["tokens"], case["layout"], case["recompute"]) == wanted:
            row["step"]["median"] = milliseconds[case["implementation"]] / 1e3
    file.write_text(json.dumps(content))


def test_a_changed_number_is_found_and_written(copied, capsys):
    docs = ["--docs", str(copied)]
    assert performance_table.main(docs) == 0
    change(copied / FILE, ours=1500, megatron=1000)
    capsys.readouterr()
    assert performance_table.main(docs) == 1
    # It becomes the slowest of its group, so the plot shows it, too.
    assert (
        capsys.readouterr().out == f"Differ: {performance_table.PAGE}, {performance_table.PLOT}\n"
    )
    assert performance_table.main([*docs, "--write"]) == 0
    line = "| 128 heads, 64k, one sequence | 1500 ms | Megatron + TE | 1000 ms | **1.50** | - |"
    assert line in (copied / performance_table.PAGE).read_text()
    assert ["128 heads, 64k, one sequence  /  Megatron + TE", 1.5] in (
        json.loads(plot.drawn(copied / performance_table.PLOT))[
            "Attention layer, forward and backward"
        ]
    )
    assert performance_table.main(docs) == 0


def test_a_missing_plot_is_found(copied, capsys):
    (copied / performance_table.PLOT).unlink()
    capsys.readouterr()
    assert performance_table.main(["--docs", str(copied)]) == 1
    assert capsys.readouterr().out == f"Differ: {performance_table.PLOT}\n"


def times(median: float, repetitions: int = 9) -> dict:
    return {
        "median": median,
        "least": 0.9 * median,
        "most": 1.2 * median,
        "repetitions": repetitions,
    }


def written(path: Path, cases: dict[tuple, dict], names: tuple[str, ...]) -> Path:
    """A file of rows: values of the case by ``names`` -> fields of the row."""
    rows = [{"suite": "layer", "case": dict(zip(names, c)), **row} for c, row in cases.items()]
    path.write_text(json.dumps({"environment": {}, "rows": rows}))
    return path


FORWARD = {"forward": times(1)}


def ratios(rows) -> dict[tuple[str, str], float]:
    return {row.name: row.ratio for row in rows}


class TestReaders:
    DSA = ("work", "heads", "kv", "shared", "implementation")

    def test_sparse_attention(self, tmp_path):
        one, other = ("forward", 16, 8192, False), ("backward", 16, 8192, True)
        cases = {
            (*one, "hopper"): {"times": times(1)},
            (*one, "triton"): {"times": times(9)},
            (*one, "FlashMLA"): {"times": times(2)},
            (*one, "TileLang"): {"error": "not installed"},
            (*other, "hopper"): {"times": times(3)},
            (*other, "TileLang"): {"times": times(2)},
            # Nobody to compare with.
            ("forward", 128, 8192, False, "hopper"): {"times": times(1)},
        }
        assert ratios(sparse.sparse_rows(written(tmp_path / "a.json", cases, self.DSA))) == {
            ("forward, 16 heads, 8k, random choice", "FlashMLA"): 0.5,
            ("backward, 16 heads, 8k, shared choice", "TileLang"): 1.5,
        }

    def test_sparse_decode(self, tmp_path):
        cases = {
            ("sparse, hopper", 16, 32, 4096): {"times": times(4), "more": {"attend_us": 3e6}},
            ("dense, hopper", 16, 32, 4096): {"times": times(2)},
            ("FlashMLA", 16, 32, 4096): {"times": times(6)},
            ("sparse, hopper", 16, 32, 8192): {"times": times(4), "more": {"attend_us": 3e6}},
        }
        file = written(tmp_path / "a.json", cases, ("implementation", "heads", "batch", "kv"))
        rows = list(sparse.sparse_decode_rows(file))
        # FlashMLA does not choose, so it is compared with our attention alone.
        assert ratios(rows) == {
            ("decode, 32 requests of 4k, 16 heads", "our dense decode"): 2,
            ("decode, attention alone, 32 requests of 4k, 16 heads", "FlashMLA"): 0.5,
        }
        assert [row.spread is None for row in rows] == [False, True]

    def test_sparse_layers(self, tmp_path):
        works = [
            {"name": "sparse", "step": times(2)},
            {"name": "megatron-cudnn", "step": times(4)},
            {"name": "megatron", "error": "out of memory"},
            {"name": "dense", "step": times(1)},
        ]
        file = written(tmp_path / "a.json", {(128, 8192): {"works": works}}, ("heads", "tokens"))
        assert ratios(sparse.sparse_layer_rows(file)) == {
            ("layer, 128 heads, 8k", "Megatron, cuDNN and FlashMLA"): 0.5,
            ("layer, 128 heads, 8k", "our dense layer"): 2,
        }

    def test_attention_alone_may_lack_backward(self, tmp_path):
        both = {"forward": times(3), "backward": times(2)}
        cases = {
            ("ours, hopper", "absorbed", 16, 8192): both,
            ("torch, efficient", "absorbed", 16, 8192): {**FORWARD, "error": "out of memory"},
            ("ours, flash_attention_4", "expanded", 16, 8192): both,
            ("FlashAttention-3", "expanded", 16, 8192): {"error": "not installed"},
        }
        names = ("implementation", "form", "heads", "tokens")
        found = {("576/512 forward, 16 heads, 8k", "PyTorch, memory-efficient"): 3}
        assert ratios(layers.core_rows(written(tmp_path / "a.json", cases, names))) == found

    def test_layers_of_the_same_recomputation_and_precision_are_compared(self, tmp_path):
        names = ("implementation", "recompute", "heads", "tokens", "layout", "precision")
        cases = {
            ("ours", True, 16, 4096, "sbhd", "bf16"): {**FORWARD, "step": times(1)},
            ("megatron", True, 16, 4096, "sbhd", "bf16"): {**FORWARD, "step": times(2)},
            ("megatron", False, 16, 4096, "sbhd", "bf16"): {**FORWARD, "step": times(8)},
            ("ours", False, 16, 4096, "thd", "delayed"): {**FORWARD, "step": times(3)},
            ("megatron", False, 16, 4096, "thd", "delayed"): {**FORWARD, "step": times(2)},
            ("ours", False, 16, 8192, "thd", "bf16"): {**FORWARD, "step": times(3)},
        }
        file = written(tmp_path / "a.json", cases, names)
        fp8 = {("16 heads, 4k, pack, delayed", "Megatron + TE"): 1.5}
        bf16 = {("16 heads, 4k, one sequence, recomputed", "Megatron + TE"): 0.5}
        assert ratios(layers.layer_rows(file)) == bf16 | fp8
        assert ratios(layers.fp8_rows(file)) == fp8

    def test_a_ring_with_other_recomputation_is_named(self, tmp_path):
        content = json.loads(
            (DOCS / MEASUREMENTS / "context-parallel" / "h200-x2.json").read_text()
        )
        ours, theirs = content["rows"][:2]
        ours["step_seconds"], theirs["step_seconds"] = [1.0], [2.0]
        theirs["case"]["recompute"] = "none"
        file = tmp_path / "a.json"
        file.write_text(json.dumps({**content, "rows": [ours, theirs]}))
        [row] = rings.ring_rows(file)
        assert row.work == "CP 2, 16 heads, 16k, one sequence, recomputed by ours only"
        assert (row.ratio, row.spread) == (0.5, None)
        # The other way around it would flatter.
        ours["case"]["recompute"], theirs["case"]["recompute"] = "none", "mla_up_proj"
        file.write_text(json.dumps({**content, "rows": [ours, theirs]}))
        assert list(rings.ring_rows(file)) == []

    def test_uneven_decode(self, tmp_path):
        names = ("implementation", "heads", "batch", "kv", "query_length", "block_size", "lengths")
        cases = {
            ("ours, hopper", 16, 8, 8192, 1, 64, lengths): {"times": times(3)}
            for lengths in ("equal", "one_long")
        }
        cases[("vLLM, FlashAttention-3", 16, 8, 8192, 1, 64, "one_long")] = {"times": times(2)}
        file = written(tmp_path / "a.json", cases, names)
        found = {("8 requests up to 8k, one long, 16 heads", "FlashAttention-3"): 1.5}
        assert ratios(decoding.decode_rows(file)) == found

    def test_latent(self, tmp_path):
        """Calls that are queued and calls that are waited for are rows of their own."""
        cases = {
            ("forward", 16, 8192, name): {"times": times(a), "called": times(b)}
            for name, a, b in (("ours, hopper", 3, 8), ("FlashAttention-3", 2, 4))
        }
        cases[("forward", 16, 8192, "ours, triton")] = {"times": times(9), "called": times(9)}
        cases[("backward", 16, 8192, "ours, hopper")] = {"times": times(9), "called": times(9)}
        file = written(tmp_path / "a.json", cases, ("work", "heads", "tokens", "implementation"))
        found = {"forward, 16 heads, 8k, queued": 1.5, "forward, 16 heads, 8k, called": 2.0}
        assert {
            name: ratio for (name, _), ratio in ratios(latent.latent_rows(file)).items()
        } == found

    def test_serving(self, tmp_path):
        """Rates of prompts and times of steps; a row that the peer lacks is left out."""
        sizes = [{"requests": n, "prompt": 1024, "output": 256} for n in (1, 32)]
        figures = {"prefill_tokens_per_second": 1024.0, "step_ms": 6.0}
        theirs = {"prefill_tokens_per_second": 4096.0, "step_ms": 3.0}
        rows = [
            ("ours", sizes[0], figures),
            ("vllm", sizes[0], theirs),
            ("ours", sizes[1], figures),
        ]
        content = {
            "environment": {},
            "rows": [
                {"case": {"implementation": name, "size": size, "temperature": 0.0}, **more}
                for name, size, more in rows
            ],
        }
        file = tmp_path / "a.json"
        file.write_text(json.dumps(content))
        assert ratios(serving.serving_rows(file)) == {
            ("1k of prompts, 1 x 1k/256", "vLLM"): 4.0,
            ("decode step, 1 x 1k/256", "vLLM"): 2.0,
        }


class TestChoice:
    def rows(self, **by_work: list[float]) -> list[Row]:
        from benchmarks.kit.report import Times

        second = Times(1.0, 0.5, 2.0, 3)
        return [
            Row(work, "p", Times(ratio, ratio, ratio, 3), second, {"size": work}, str(number))
            for work, found in by_work.items()
            for number, ratio in enumerate(found)
        ]

    def test_of_repeated_runs_the_median(self):
        every = self.rows(a=[0.9, 1.3, 1.1], b=[0.8, 0.7])
        found = Measured(SECTIONS[0], every)
        assert [row.ratio for row in found.typical] == [1.1, 0.8]
        assert found.repeats(found.typical[0]) == [0.9, 1.3]

    def test_the_slowest_is_shown_in_any_case(self):
        section = Section("t", (), lambda path: [], shown=({"size": ("a", "b")},), drawn=())
        found = Measured(section, self.rows(a=[0.9], b=[1.1], c=[1.2], d=[1.15]))
        assert [row.work for row in found.shown] == ["a", "b", "c"]
        assert [row.work for row in found.drawn] == ["c"]

    def test_spread_is_what_single_repetitions_allow(self):
        [row] = self.rows(a=[1.0])
        assert row.spread == (0.5, 2.0)


def test_texts():
    assert tables.time_text(1.4346, 1.3) == "1435 ms"
    assert tables.time_text(0.01234, 0.01) == "12.3 ms"
    assert tables.time_text(0.00123, 0.0009) == "1230 µs"
    moved = "python scripts/bench_decode.py --kv 8k --json docs/decode/decode.json"
    present = (
        "python scripts/benchmarks/decode.py --kv 8k --json docs/measurements/decode/decode.json"
    )
    assert tables.present_command(moved) == tables.present_command(present) == present
    values = {"1": [1, 2, 3, 5], "2": [4]}
    assert tables._values_text(values, 5) == "1 (run 1-3, 5); 2 (run 4)"
    assert tables._values_text({"1": [1, 2]}, 2) == "1"


def test_every_file_of_the_sections_is_written_by_a_benchmark_or_to_come():
    files = {file for section in SECTIONS for file in section.files}
    missing = {file for file in files if not (DOCS / MEASUREMENTS / file).exists()}
    assert missing <= {"dsa/layer.json", "generation/traffic.json"}
