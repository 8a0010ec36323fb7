"""Tables of single pages, from the JSON files under docs/measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.attention import AttentionReport
from benchmarks.attention_features import FeatureReport
from benchmarks.context_parallel import CPReport
from benchmarks.decode import DecodeReport
from benchmarks.dsa import DSAReport
from benchmarks.kit.tables import markdown_table, tokens_text
from benchmarks.long_context import LongReport
from benchmarks.served import report as serving
from benchmarks.served.report import ServingReport
from benchmarks.shared_prefix import PrefixReport
from benchmarks.training_step import StepReport
from checks.oracle_report import read_summary
from checks.tables import by_input, table, without_errors

NONE = "Not measured yet."
# By a head, what the column says of a row.
Columns = dict[str, Callable[[Any], str]]
MACHINES = {"cpu": "CPU, gloo", "h200": "H200, NCCL"}
_RECOMPUTED = {"R": "mla_up_proj", "no R": "none"}
_STEP = "step, ours of Megatron's"


def _of(*files: str) -> Callable[[Callable[..., str]], Callable[[Path], str]]:
    """Make a table of files one of their folder; those that are not there are left out."""

    def decorate(made: Callable[..., str]) -> Callable[[Path], str]:
        def of_folder(docs: Path) -> str:
            found = [docs / file for file in files if (docs / file).is_file()]
            return (found and made(*found)) or NONE

        return of_folder

    return decorate


class _Pair(NamedTuple):
    """Ours and Megatron's of the same sizes and recomputation, or None where one is missing."""

    group: tuple[str, str]  # of ranges: heads or GPUs, and layout
    sizes: tuple[str, ...]  # cells of a table
    recompute: str  # of ``_RECOMPUTED``
    ours: dict[str, float] | None  # milliseconds of a step, and MiB kept
    theirs: dict[str, float] | None

    def ratio(self, name: str) -> float | None:
        """Ours of theirs."""
        return self.ours[name] / self.theirs[name] if self.ours and self.theirs else None


def _pairs_table(head: list[str], pairs: Iterable[_Pair], digits: int) -> str:
    """Both layers recompute ``mla_up_proj`` (R), then neither does."""
    lines: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for pair in pairs:
        cells = []
        for name, text in (("step", f"{{:.{digits}f}}"), ("kept", "{:.0f}")):
            cells += [text.format(x[name]) if x else "-" for x in (pair.theirs, pair.ours)]
            ratio = pair.ratio(name)
            cells += ["-" if ratio is None else f"{ratio:.2f}"]
        lines.setdefault(pair.sizes, {})[pair.recompute] = cells
    names = ("Megatron ms", "ours ms", "ratio", "Megatron MiB", "ours MiB", "ratio")
    found = [
        [*sizes, *(cell for way in _RECOMPUTED.values() for cell in ways.get(way, ["-"] * 6))]
        for sizes, ways in lines.items()
    ]
    head = [*head, *(f"{way}: {name}" for way in _RECOMPUTED for name in names)]
    return markdown_table(head, found, ["layout"])


def _pairs_ranges(group: str, pairs: Iterable[_Pair], kept: str) -> str:
    """The least and the greatest ratio over all other sizes."""
    found: dict[tuple, list[_Pair]] = {}
    for pair in pairs:
        if pair.ours and pair.theirs:
            way = "-" if pair.recompute == "none" else pair.recompute
            found.setdefault((*pair.group, way), []).append(pair)
    if not found:
        return "Not measured: both layers with the same recomputation."
    lines = []
    for key, group_pairs in found.items():
        ratios = [[pair.ratio(name) for pair in group_pairs] for name in ("step", "kept")]
        lines.append([*key, *(f"{min(one):.2f} to {max(one):.2f}" for one in ratios)])
    head = [group, "layout", "both recompute", _STEP, kept]
    return markdown_table(head, lines, ["layout", "both recompute"])


def _layer_pairs(docs: Path) -> list[_Pair]:
    """Whole layers on one GPU."""
    report = AttentionReport.read(docs / "attention" / "layer.json")
    rows = [row for row in report.of("layer") if row.case.implementation == "ours"]
    rows.sort(key=lambda row: (-row.case.heads, row.case.layout, row.case.tokens))
    pairs = []
    for row in rows:
        case = row.case
        figures = (
            {"step": 1e3 * one.step.median, "kept": one.kept_bytes / 2**20}
            for one in (row, report.peer(row))
        )
        sizes = str(case.heads), tokens_text(case.tokens), case.layout
        recompute = "mla_up_proj" if case.recompute else "none"
        pairs.append(_Pair((str(case.heads), case.layout), sizes, recompute, *figures))
    return pairs


def _ring_pairs(docs: Path) -> list[_Pair]:
    """A layer under context parallelism, ours with ``all_gather``; kept is less its output."""
    found: dict[tuple, dict[str, dict]] = {}
    for file in sorted((docs / "context-parallel").glob("*.json")):
        report = CPReport.read(file)
        hidden = report.environment["dims"]["hidden-size"]
        for row in report.rows:
            case = row.case
            if row.error or (case.implementation, case.cp_comm_type) == ("ours", "p2p"):
                continue
            output = case.tokens // row.cp_size * hidden * 2  # in bf16
            kept = (row.kept_bytes - output) / 2**20
            sizes = (row.cp_size, case.layout, case.documents, case.heads, case.tokens)
            pair = found.setdefault((*sizes, case.recompute), {})
            pair[case.implementation] = {"step": 1e3 * median(row.step_seconds), "kept": kept}
    pairs = []
    for (cp_size, layout, documents, heads, tokens, recompute), pair in sorted(found.items()):
        pack = layout if layout == "sbhd" else f"thd, {documents} documents"
        sizes = str(cp_size), pack, str(heads), tokens_text(tokens)
        both = pair.get("ours"), pair.get("megatron")
        pairs.append(_Pair((str(cp_size), layout), sizes, recompute, *both))
    return pairs


def _beside(rows: Iterable[Any], columns: Columns, ours: str, theirs: str, ratios: str) -> str:
    """Rows of two that take turns: milliseconds of both, by their names, and ratios."""
    columns = {
        "computed": lambda row: row.case.work,
        **columns,
        "ran": lambda row: row.ran,
        "ms": lambda row: f"{row.more[ours]:.1f} / {row.more[theirs]:.1f}",
    }
    for name in ratios.split():
        columns[name] = lambda row, name=name: f"{row.more[name]:.3f}" if name in row.more else ""
    words = ("computed", "feature", "prompt + answers", "ran", "ms")
    return table(without_errors(rows), columns, words)


@_of("shared-prefix/shared_prefix.json")
def shared_prefix_table(file: Path) -> str:
    """Packs in which a prompt stands once, over packs in which each answer has a copy."""
    columns: Columns = {
        "heads": lambda row: str(row.case.heads),
        "prompt + answers": lambda row: str(row.case).rpartition(" ")[2],
    }
    names = "shared step_ms", "unshared step_ms", "step forward kept peak tokens pairs"
    return _beside(PrefixReport.read(file).rows, columns, *names)


@_of("attention/sinks.json", "attention/attention_features.json")
def features_table(*files: Path) -> str:
    """Attention with sinks, windows and gates over the same without them."""
    columns: Columns = {
        "feature": lambda row: row.case.name,
        "heads": lambda row: str(row.case.heads),
        "tokens": lambda row: tokens_text(row.case.tokens),
    }
    names = "step_ms", "without: step_ms", "step forward pairs"
    rows = [row for file in files for row in FeatureReport.read(file).rows]
    return _beside(rows, columns, *names)


@_of("training-step/training_step.json")
def training_step_table(file: Path) -> str:
    """Whole steps of whole models; pairs are Megatron's and ours."""
    report = StepReport.read(file)

    def figure(implementation: str, name: str, text: str, found: dict[str, Any]) -> str:
        row = found.get(implementation)
        value = report.figures(row).get(name) if row else None
        return "-" if value is None else text.format(value)

    columns: Columns = {
        "model, batch, linears": lambda found: str(next(iter(found.values())).case).split(" ", 1)[1]
    }
    for head, name, text in (
        ("ms", "step_ms", "{:.0f}"),
        ("MFU", "mfu", "{:.2f}"),
        ("peak GiB", "peak_gib", "{:.1f}"),
        ("device idle", "idle", "{:.2f}"),
        ("launches", "launches", "{:.0f}"),
    ):
        for one in ("megatron", "ours"):
            owner = one.replace("m", "M")
            columns[f"{owner}: {head}"] = partial(figure, one, name, text)
    for one in ("ours", "ours-graphs"):
        columns[f"{one} / Megatron"] = partial(figure, one, "step of megatron's", "{:.2f}")
    return table(by_input(report.measured), columns, ["model, batch, linears"])


def accuracy_table(docs: Path) -> str:
    """The worst error of each precision, and the largest share of its own bound."""
    groups: dict[tuple, list[dict]] = {}
    for machine, name in MACHINES.items():
        for case in read_summary(docs / "accuracy" / machine / "summary.json"):
            interpreted = machine == "cpu" and case["core_attention_backend"] == "triton"
            layers = case["backend"] + (", `triton` interpreted" if interpreted else "")
            key = (name, case["dtype"], case["rotary_table"], layers)
            groups.setdefault(key, []).append(case)
    lines = []
    for (machine, dtype, rotary, layers), cases in sorted(groups.items()):
        cached = [case for case in cases if case["layout"].startswith("cached")]
        whole = [case for case in cases if case not in cached]
        kinds = [[c for c in whole if (c["context_parallel"] > 1) is cp] for cp in (False, True)]
        bounds = (min(c["least_bound"] for c in cases), max(c["greatest_bound"] for c in cases))
        lines.append(
            [
                machine,
                layers,
                f"{dtype}, {rotary.split()[0]} table" if dtype == "float64" else dtype,
                str(sum(case["combinations"] for case in cases)),
                *map(_worst, (*kinds, cached)),
                " to ".join(dict.fromkeys(f"{bound:.1e}" for bound in bounds)),
                f"{max(case['worst_error_over_bound'] for case in cases):.2g}",
            ]
        )
    head = ["machine", "layers", "precision", "combinations", "worst, TP 1, 2, 4", "worst, CP"]
    head += ["worst, from a cache", "bounds", "worst error / bound"]
    return markdown_table(head, lines, ["machine", "layers", "precision"])


def _worst(cases: list[dict]) -> str:
    return f"{max(case['worst_relative_error'] for case in cases):.1e}" if cases else "-"


# Decode over a paged cache.
_OURS, _PEER = "ours, hopper", "FlashMLA"


def decode_table(docs: Path) -> str:
    """Microseconds and rates of requests of 8,192 keys."""
    report = DecodeReport.read(docs / "decode" / "decode.json")
    names = {"`hopper`": _OURS, "`triton`": "ours, triton", _PEER: _PEER}
    found = [
        one
        for one in by_input(report.measured)
        if one[_OURS].case.kv == 8192 and all(name in one for name in names.values())
    ]

    def time_and_rate(name: str, one: dict[str, Any]) -> str:
        """TB/s of latents below 64 heads, TFLOP/s from there on."""
        figures, row = report.figures(one[name]), one[name]
        few = row.case.heads < 64
        rate = f"{figures['tbps']:.2f}" if few else f"{figures['tflops']:.0f}"
        return f"{row.times.median * 1e6:.1f} ({rate})"

    columns: Columns = {
        "heads": lambda one: str(one[_OURS].case.heads),
        "requests": lambda one: str(one[_OURS].case.batch),
        **{head: partial(time_and_rate, name) for head, name in names.items()},
    }
    return table(sorted(found, key=lambda one: one[_OURS].case.heads), columns)


def decode_lengths_table(docs: Path) -> str:
    """Microseconds of requests of unequal lengths, and the ratio to FlashMLA's."""
    lines = []
    for name in ("lengths.json", "one-long.json"):
        for found in by_input(DecodeReport.read(docs / "decode" / name).measured):
            case = found[_OURS].case
            if case.lengths != "equal":
                ours, peer = (found[one].times.median * 1e6 for one in (_OURS, _PEER))
                lengths = f"{case.lengths.replace('_', ' ')}, up to {tokens_text(case.kv)}"
                sizes = [lengths, str(case.heads), str(case.batch)]
                lines.append([*sizes, f"{ours:.1f}", f"{peer:.1f}", f"{ours / peer:.2f}"])
    head = ["lengths", "heads", "requests", "us", _PEER, "ratio"]
    return markdown_table(head, lines, ["lengths"])


# DeepSeek Sparse Attention.
_CHOICE = {
    "heads": lambda found: str(found["hopper"].case.heads),
    "keys": lambda found: tokens_text(found["hopper"].case.kv),
    "choice": lambda found: "shared" if found["hopper"].case.shared else "random",
}


def _rates(*names: str) -> Columns:
    """TFLOP/s of implementations."""

    def rate(name: str, found: dict) -> str:
        return f"{found[name].more['flops'] / found[name].times.median / 1e12:.0f}"

    return {f"`{name}`": partial(rate, name) for name in names}


def _sparse(docs: Path, work: str) -> list[dict[str, Any]]:
    measured = DSAReport.read(docs / "dsa" / "kernels.json").measured
    return by_input(row for row in measured if row.case.work == work)


def sparse_forward_table(docs: Path) -> str:
    """TFLOP/s of every implementation."""
    columns = _CHOICE | _rates("hopper", "triton", "FlashMLA", "TileLang")
    return table(_sparse(docs, "forward"), columns, ["choice"])


def sparse_backward_table(docs: Path) -> str:
    """TFLOP/s of backward, and how much longer a deterministic one takes."""

    def longer(found: dict) -> str:
        fixed, plain = (found[name].times.median for name in ("hopper, in order", "hopper"))
        return f"{fixed / plain:.2f}"

    columns = _CHOICE | _rates("hopper", "triton", "TileLang")
    columns["deterministic `hopper`, time"] = longer
    return table(_sparse(docs, "backward"), columns, ["choice"])


def indexer_table(docs: Path) -> str:
    """Milliseconds of scores and choice, and the least of the choice that fp32 agrees with."""
    rows = (row for found in _sparse(docs, "indexer") for row in found.values())
    columns: Columns = {
        "keys": lambda row: tokens_text(row.case.kv),
        "backend": lambda row: f"`{row.case.implementation}`",
        "ms": lambda row: f"{row.times.median * 1e3:.2f}",
        "scores alone, ms": lambda row: f"{row.more['scores_ms']:.2f}",
        "share": lambda row: f"{row.more['share']:.2f}",
        "bound": lambda row: f"{row.more['bound']:.2f}",
        "agreement": lambda row: f"{row.more['agreement']:.3f}",
    }
    return table(rows, columns, ["backend"])


LLM_FILE = "accuracy/llm.json"
# Whether TransformerEngine is there, and whether steps are CUDA graphs.
_WAYS = {
    "local": (False, False),
    "local, graphs": (False, True),
    "TransformerEngine": (True, False),
    "TransformerEngine, graphs": (True, True),
}


@_of(LLM_FILE)
def llm_table(file: Path) -> str:
    """Models beside transformers: the worst over alone, together, and with a prefix cache."""
    rows = json.loads(file.read_text())["rows"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        bf16 = [row for row in own if row["dtype"] == "bfloat16"]
        ways = [
            _largest(row for row in bf16 if (row["transformer_engine"], row["graphs"]) == way)
            for way in _WAYS.values()
        ]
        theirs = [row["transformers_bf16"] for row in bf16]
        same = [f"{min(x['same_choice'] for x in some):.3f}" for some in (bf16, theirs)]
        fp32 = _largest(row for row in own if row["dtype"] == "float32")
        lines.append([model, *ways, _largest(theirs), *same, fp32])
    head = ["model", *_WAYS, "transformers", "same tokens", "transformers'", "fp32"]
    return markdown_table(head, lines, ["model"])


def _largest(rows) -> str:
    """The largest difference and the largest root of a mean square."""
    pairs = [(row["worst"], row["rms"]) for row in rows]
    return " / ".join(f"{max(each):.1e}" for each in zip(*pairs)) or "-"


# Several runs, because all rows together take longer than one may.
@_of(*(f"generation/serving{name}.json" for name in ("", "-server", "-128x8k")))
def serving_table(*files: Path) -> str:
    """Every measured row of requests that arrive at once: of ``LLM``, then of the server."""
    found = [ServingReport.read(file) for file in files]

    def place(row: serving.Row) -> tuple:
        case = row.case
        return case.implementation, case.size.prompt, case.size.requests, case.temperature

    rows = sorted((row for one in found for row in one.rows), key=place)
    return serving.table(ServingReport(found[0].environment, rows))


def _of_serving(file: str, *tables: Callable[[ServingReport], str]) -> Callable[[Path], str]:
    """Tables of one of serving.py's files."""

    @_of(f"generation/{file}")
    def made(path: Path) -> str:
        found = ServingReport.read(path)
        return "\n\n".join(filter(None, (one(found) for one in tables)))

    return made


@_of("long-context/long.json", "long-context/dense-1m.json")
def long_table(*files: Path) -> str:
    """One rank's step at long contexts, with the settings; what was not measured says why."""
    numbers = ("step", "select", "attention_forward", "attention_backward", "loss", "other")
    numbers = tuple(f"{name}_ms" for name in (*numbers, "exposed", "total", "exchange"))
    lines = []

    def place(row: Any) -> tuple:
        return row.case.work, row.case.heads, row.case.tokens, row.case.cp

    for row in sorted((row for file in files for row in LongReport.read(file).rows), key=place):
        case, more = row.case, row.more
        if not more:
            continue  # --time-limit left it out
        figures = [f"{more[name]:.0f}" if name in more else "-" for name in numbers]
        received = (f"{more[f'{way}_bytes'] / 2**20:.0f}" for way in ("forward", "backward"))
        case = case.work, tokens_text(case.tokens), str(case.cp), str(case.heads)
        gib, parts = (str(more.get(name, "-")) for name in ("peak_gib", "parts"))
        lines.append([*case, *figures, *received, gib, parts, row.error or more["settings"]])
    head = [one.removesuffix("_ms").replace("_", " ") for one in numbers]
    head = ["attention", "S", "CP", "heads", *head, "MiB forward", "MiB backward", "GiB", "parts"]
    return markdown_table([*head, "settings"], lines, ["attention", "settings"])


TABLES: dict[str, Callable[[Path], str]] = {
    # Whole layers on one GPU, ours and Megatron's with the same recomputation.
    "layers": lambda docs: _pairs_table(["heads", "S", "layout"], _layer_pairs(docs), 2),
    "layer ranges": lambda docs: _pairs_ranges("heads", _layer_pairs(docs), "kept"),
    # A layer under context parallelism; memory kept is less the layer's output.
    "context parallel": lambda docs: _pairs_table(
        ["GPUs", "layout", "heads", "S"], _ring_pairs(docs), 1
    ),
    "context parallel ranges": lambda docs: _pairs_ranges(
        "GPUs", _ring_pairs(docs), "kept, less output"
    ),
    "shared prefixes": shared_prefix_table,
    "features": features_table,
    "training steps": training_step_table,
    "long contexts": long_table,
    "accuracy": accuracy_table,
    "beside transformers": llm_table,
    "sparse forward": sparse_forward_table,
    "sparse backward": sparse_backward_table,
    "indexer": indexer_table,
    "decode": decode_table,
    "decode lengths": decode_lengths_table,
    "beside vllm": serving_table,
    "traffic beside vllm": _of_serving("traffic.json", partial(serving.table, traffic=True)),
    "parity mode beside default": _of_serving(
        "serving-parity.json",
        serving.parity_table,
        partial(serving.parity_table, traffic=True),
    ),
}
