"""Documents of one window as sequences of their own (``thd``)."""

from __future__ import annotations

import itertools

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from absorbed_mla.sequences import SequenceLayout
from training.context_parallel import ContextParallelPart


def document_starts(tokens: list[int], eod: int) -> list[int]:
    """Where documents begin: at 0 and after every end token but a last one."""
    return [0] + [i + 1 for i, token in enumerate(tokens[:-1]) if token == eod]


def pack_documents(tokens: list[int], eod: int, part: ContextParallelPart) -> SequenceLayout:
    """Where the documents of a window lie, each in a slot that ``part`` can cut."""
    bounds = [*document_starts(tokens, eod), len(tokens)]
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    slots = padded_slots(lengths, part.slot_multiple, part.total_multiple)
    ends = list(itertools.accumulate(slots))
    return SequenceLayout(
        num_tokens=ends[-1],
        starts=(0, *ends[:-1]),
        lengths=tuple(lengths),
        slots=tuple(slots),
        packed=True,
    )


def padded_slots(lengths: list[int], slot_multiple: int, total_multiple: int) -> list[int]:
    """Lengths rounded up to ``slot_multiple``, and the last one on until the sum fits as well.

    Args:
        lengths: Tokens of each document.
        slot_multiple: Divides every slot.
        total_multiple: Divides their sum; a multiple of ``slot_multiple``.
    """
    slots = [length + -length % slot_multiple for length in lengths]
    slots[-1] += -sum(slots) % total_multiple
    return slots


def real_tokens(pack: SequenceLayout) -> Tensor:
    """Bool [S]: which tokens of a pack are not padding."""
    lengths = torch.tensor(pack.lengths).repeat_interleave(torch.tensor(pack.slots))
    return pack.positions(torch.device("cpu")) < lengths


def packed_seq_params(pack: SequenceLayout, device: torch.device) -> PackedSeqParams:
    """Megatron's description of a whole pack, on all context-parallel ranks the same."""
    cu_seqlens = _cumulated(pack.lengths, device)
    padded = _cumulated(pack.slots, device) if pack.slots != pack.lengths else None
    longest = max(pack.slots)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _cumulated(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
