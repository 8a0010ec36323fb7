"""What lies between the spans of a wave: rows that kernels are to leave out.

Kernels allocate the LSE themselves and write the rows of spans alone: the others hold anything.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from absorbed_mla.core_attention.by_identity import cached_by_identity
from absorbed_mla.core_attention.device_table import in_use, to_device
from absorbed_mla.core_attention.masks.varlen import Wave, covers


def put_queries(total: Tensor, part: Tensor, wave: Wave) -> None:
    """Write what a kernel found for a wave, less what it wrote between spans.

    Args:
        total: Of all queries, which are its last axis.
        part: Of the wave's queries, which are its last axis.
        wave: Whose queries ``part`` is of.
    """
    rows = total[..., wave.queries]
    if covers(wave.spans, rows.shape[-1]):
        rows.copy_(part)
    else:
        seen = in_use(_in_spans(wave, total.device))
        rows.copy_(torch.where(seen, part, rows))


def lengths_alone(wave: Wave, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 [spans + 1]: sums of the numbers of queries, and of keys, in the spans before each.

    Unlike starts they do not count what lies between spans.
    """
    queries, keys = _lengths_alone(wave, device)
    in_use(queries)  # both are views of one
    return queries, keys


@cached_by_identity(maxsize=256)
def _in_spans(wave: Wave, device: torch.device) -> Tensor:
    """Bool: which of the wave's queries are in a span."""

    def table() -> Tensor:
        first = wave.queries.start
        seen = torch.zeros(wave.queries.stop - first, dtype=torch.bool)
        for span in wave.spans:
            seen[span.query_start - first : span.query_end - first] = True
        return seen

    return to_device(table, device)


@cached_by_identity(maxsize=256)
def _lengths_alone(wave: Wave, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = [
        [0, *accumulate(span.query_end - span.query_start for span in wave.spans)],
        [0, *accumulate(span.key_end - span.key_start for span in wave.spans)],
    ]
    both = to_device(lambda: torch.tensor(rows, dtype=torch.int32), device)
    return both[0], both[1]
