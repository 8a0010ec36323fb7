"""The backend ``hopper`` in parity mode: training forward and decode have the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.core_attention.backends.hopper import HopperBackend
from absorbed_mla.core_attention.device_table import in_use, to_device
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.kernels import operators

# Keys of a block.
_KEYS = 64


class InvariantHopper(HopperBackend):
    """As ``hopper``; keys are added up in pieces (``kernels/hopper/pieces.py``)."""

    def _attend(
        self, operands: tuple[Tensor, ...], rules: ScoreRules, record: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        latent = operands[2]
        sequences = _sequences(rules.spans, len(latent), latent.device)
        return operators.latent_attention_in_pieces(*operands, *sequences, rules.scale, record)


def _sequences(
    spans: Spans, num_keys: int, device: torch.device
) -> tuple[Tensor, Tensor, int, int]:
    """The spans as ``kernels/hopper/forward_in_pieces.py`` wants them, and their greatest sizes."""

    def make() -> tuple[Tensor, Tensor, int, int]:
        rows = [_row(span) for span in spans if span.num_queries]
        table = torch.tensor(rows, dtype=torch.int32).view(-1, 4)
        most = table.amax(0).tolist() if rows else [0] * 4
        starts, queries, first_keys, keys = table.unbind(1)
        blocks = first_keys[:, None] + torch.arange(0, most[3], _KEYS, dtype=torch.int32)
        # Those beyond the last key of a sequence are not read, but must be somewhere.
        blocks.clamp_(max=num_keys - 1)
        lists = to_device(lambda: torch.stack([starts, queries, keys]), device)
        return lists, to_device(lambda: blocks, device), most[1], most[3]

    lists, blocks, queries, keys = spans.tables.get(("sequences", num_keys, device), make)
    return in_use(lists), in_use(blocks), queries, keys


def _row(span: Span) -> tuple[int, int, int, int]:
    assert span.causal_offset == span.num_keys - span.num_queries, "parity mode is causal"
    return span.query_start, span.num_queries, span.key_start, span.num_keys
