"""The comparisons of the page: which files, and which of their rows are shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from checks.performance.decoding import decode_rows
from checks.performance.latent import latent_rows
from checks.performance.layers import FLASH_4, PYTORCH, core_rows, fp8_rows, layer_rows
from checks.performance.rings import ring_rows
from checks.performance.row import Row
from checks.performance.serving import serving_rows
from checks.performance.sparse import sparse_decode_rows, sparse_layer_rows, sparse_rows
from checks.performance.training import pretraining_rows

_ALL: tuple[dict, ...] = ({},)
K = 1024


@dataclass(frozen=True)
class Section:
    """Rows of one kind of work.

    Attributes:
        title: Of the group, in the table and in the plot.
        files: Under docs/; those that do not exist are left out.
        read: The rows of a file.
        shown: What the table shows: choices of facts. The row in which ours is slowest beside a
            peer is shown in any case.
        drawn: What of it the plot shows besides that row.
    """

    title: str
    files: tuple[str, ...]
    read: Callable[[Path], Iterable[Row]]
    shown: tuple[dict, ...] = _ALL
    drawn: tuple[dict, ...] = _ALL

    def measured(self, docs: Path) -> Measured:
        """Its rows under ``docs``."""
        rows = [
            replace(row, file=file)
            for file in self.files
            if (docs / file).exists()
            for row in self.read(docs / file)
        ]
        return Measured(self, rows)


@dataclass(frozen=True)
class Measured:
    """A section with its data.

    Attributes:
        section: What is compared.
        every: All rows of all files, in the order of the files.
    """

    section: Section
    every: list[Row]

    @property
    def typical(self) -> list[Row]:
        """Of every work the run with the median ratio; of an even number the slower of both."""
        found: dict[tuple, list[Row]] = defaultdict(list)
        for row in self.every:
            found[row.name].append(row)
        ordered = (sorted(rows, key=lambda row: row.ratio) for rows in found.values())
        return [rows[len(rows) // 2] for rows in ordered]

    @property
    def shown(self) -> list[Row]:
        """The rows of the table."""
        return self._chosen(self.section.shown)

    @property
    def drawn(self) -> list[Row]:
        """The bars of the plot."""
        return self._chosen(self.section.drawn)

    def repeats(self, row: Row) -> list[float]:
        """Ratios of the same work in other files."""
        return [one.ratio for one in self.every if one.name == row.name and one.file != row.file]

    def _chosen(self, choices: tuple[dict, ...]) -> list[Row]:
        slowest = max(self.typical, key=lambda row: row.ratio, default=None)
        return [row for row in self.typical if row is slowest or row.fits(choices)]


def measured(docs: Path) -> list[Measured]:
    """All sections that have rows."""
    return [one for one in (section.measured(docs) for section in SECTIONS) if one.every]


SECTIONS = (
    Section(
        "Attention layer, forward and backward",
        (
            "attention/layer.json",
            "remeasured/layer-16-heads-a.json",
            "remeasured/layer-16-heads-b.json",
            "remeasured/layer.json",
            "remeasured/layer-again.json",
        ),
        layer_rows,
        shown=({"tokens": (8 * K, 64 * K)}, {"tokens": (4 * K,), "heads": (16,)}),
        drawn=({"tokens": (8 * K,), "recompute": (False,)},),
    ),
    Section(
        "Attention layer, without flash-attn-4",
        ("attention/layer-hopper-expanded.json",),
        layer_rows,
        drawn=({"tokens": (8 * K,), "heads": (128,)},),
    ),
    Section(
        "Attention layer, FP8",
        ("fp8/layer.json",),
        fp8_rows,
        drawn=({"precision": ("blockwise",), "recompute": (False,), "heads": (128,)},),
    ),
    Section(
        "Attention alone, widths of keys/values",
        ("attention/core.json", "remeasured/core.json"),
        core_rows,
        shown=({"tokens": (8 * K,)},),
        drawn=({"tokens": (8 * K,), "heads": (128,), "peer": (FLASH_4, PYTORCH)},),
    ),
    Section(
        "Attention over the latent, forward",
        ("kernels/latent.json",),
        latent_rows,
        drawn=({"tokens": (8 * K,), "heads": (128,)},),
    ),
    Section(
        "Context parallelism, layer, forward and backward",
        (
            "context-parallel/h200-x2.json",
            "context-parallel/h200-x2-none.json",
            "context-parallel/h200-x4.json",
            "remeasured/context-parallel-before.json",
            "remeasured/context-parallel.json",
        ),
        ring_rows,
        shown=({"tokens": (32 * K,)}, {"tokens": (128 * K,), "heads": (128,)}),
        drawn=({"tokens": (128 * K,), "heads": (128,), "recompute": ("mla_up_proj",)},),
    ),
    Section(
        "Context parallelism, without flash-attn-4",
        ("context-parallel/h100-x2-hopper-expanded.json",),
        ring_rows,
        drawn=({"tokens": (32 * K,), "heads": (128,), "cp_comm_type": ("all_gather",)},),
    ),
    Section(
        "Pretraining in Megatron's loop",
        (
            "pretraining/pretraining.json",
            "pretraining/pretraining-1.json",
            "pretraining/pretraining-2.json",
        ),
        pretraining_rows,
    ),
    Section(
        "Decode, attention over a paged cache",
        (
            "decode/blocks.json",
            "decode/decode.json",
            "decode/flash-attention-3.json",
            "decode/lengths.json",
            "decode/one-long.json",
        ),
        decode_rows,
        shown=({"kv": (8 * K,), "batch": (1, 128)}, {"kv": (32 * K,), "batch": (32,)}),
        drawn=(
            {
                "kv": (8 * K,),
                "batch": (128,),
                "heads": (16, 128),
                "lengths": ("equal", "uniform"),
                "query_length": (1,),
                "block_size": (64,),
            },
        ),
    ),
    Section(
        "LLM and server, 4 dense and 4 MoE layers, requests x prompt/output",
        (
            "generation/serving.json",
            "generation/serving-128x8k.json",
            "generation/serving-server.json",
            "generation/traffic.json",
        ),
        serving_rows,
        drawn=({"requests": (128,)},),
    ),
    Section(
        "Sparse attention over 2k chosen keys",
        ("dsa/kernels.json",),
        sparse_rows,
        shown=({"heads": (16, 128)},),
        drawn=({"heads": (16, 128), "kv": (32 * K,), "shared": (False,)},),
    ),
    Section(
        "Sparse decode: 2k of the keys are chosen and attended to; alone: given the choice",
        ("dsa/decode.json",),
        sparse_decode_rows,
        drawn=({"heads": (128,), "kv": (32 * K, 128 * K)},),
    ),
    Section(
        "Sparse layer, forward and backward",
        ("dsa/layer.json", "dsa/layer-4k.json", "dsa/layer-tilelang.json"),
        sparse_layer_rows,
    ),
)
