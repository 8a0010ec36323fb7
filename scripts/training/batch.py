"""Batches: windows of tokens as model inputs, packed by document if requested, split for CP.

In a packed window each document is a sequence of its own (``thd``). Under context parallelism each
rank takes an early and a late chunk of every sequence, so documents are padded to slots of a length
that splits into 2 x CP chunks. "s" is the length of a window, "S" its length with padding.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.sequences import SequenceLayout
from training.megatron_loop import get_args

# In Megatron's logs.
LOSS = "lm loss"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ContextParallelPart:
    """The tokens of each sequence that belong to one context-parallel rank; by default all.

    Attributes:
        size: Number of context-parallel ranks.
        rank: This rank.
        sequence_parallel_size: Tensor-parallel ranks that these tokens are split over; 1 without
            sequence parallelism.
    """

    size: int = 1
    rank: int = 0
    sequence_parallel_size: int = 1

    @classmethod
    def of_process(cls, args: argparse.Namespace) -> ContextParallelPart:
        """That of this process, from Megatron's process groups."""
        return cls(
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_context_parallel_rank(),
            args.tensor_model_parallel_size if args.sequence_parallel else 1,
        )

    def pack(self, tokens: list[int], eod: int) -> SequenceLayout:
        """The layout of a window's documents, each in a slot with padding so that it can be split.

        Args:
            tokens: The window.
            eod: Token that ends documents.
        """
        ends = (i + 1 for i, token in enumerate(tokens[:-1]) if token == eod)
        lengths = [end - start for start, end in itertools.pairwise([0, *ends, len(tokens)])]
        multiple = 2 * self.size if self.size > 1 else 1
        slots = [length + -length % multiple for length in lengths]
        if self.size > 1:
            slots[-1] += -sum(slots) % (multiple * self.sequence_parallel_size)
        starts = [0, *itertools.accumulate(slots)]
        return SequenceLayout(
            starts.pop(), tuple(starts), tuple(lengths), tuple(slots), packed=True
        )

    def of(self, values: Tensor, sequences: SequenceLayout) -> Tensor:
        """Select this rank's columns of ``values``: [b, S] to [b, S / size]."""
        if self.size == 1:
            return values
        return values[:, ContextParallelLayout(sequences, self.size, self.rank).tokens()]


_WHOLE = ContextParallelPart()


def packed_seq_params(pack: SequenceLayout, device: torch.device) -> PackedSeqParams:
    """Megatron's description of a whole pack, the same on all context-parallel ranks."""
    bounds, padded_bounds = (
        torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
        for sizes in (pack.lengths, pack.slots)
    )
    padded = padded_bounds if pack.slots != pack.lengths else None
    longest = max(pack.slots)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


@dataclass(frozen=True)
class Batch:
    """One context-parallel rank's part of a microbatch.

    Attributes:
        tokens: int64 [b, s].
        labels: int64 [b, s], the next token.
        position_ids: int64 [b, s], within the sequence.
        loss_mask: float32 [b, s], 0 for padding and where the label belongs to the next document.
        packed_seq_params: Document boundaries of the whole pack; None if it is not packed.
        padding_mask: Bool [b, s], True for padding; None if documents are not padded.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    packed_seq_params: PackedSeqParams | None
    padding_mask: Tensor | None = None


def make_batch(
    windows: Tensor,
    device: torch.device,
    packed_eod: int | None = None,
    part: ContextParallelPart = _WHOLE,
) -> Batch:
    """Build a batch from windows.

    Args:
        windows: int32 [b, s + 1].
        device: Device of the tensors.
        packed_eod: Token that ends documents; the documents of the window (b = 1) are packed. None
            makes each window one sequence.
        part: Which tokens to return. Documents that it splits are padded with ``packed_eod``.

    Raises:
        ValueError: If windows are not packed and ``part`` cannot split them evenly.
    """
    windows = windows.long()
    tokens, labels = windows[:, :-1], windows[:, 1:]
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    sequences, padding_mask = SequenceLayout.dense(tokens.shape[1]), None
    if packed_eod is not None:
        sequences = part.pack(tokens[0].tolist(), packed_eod)
    positions = sequences.positions(_CPU)
    if packed_eod is not None:
        loss_mask[tokens == packed_eod] = 0
        lengths, slots = torch.tensor(sequences.lengths), torch.tensor(sequences.slots)
        real = positions < lengths.repeat_interleave(slots)
        tokens, labels = (_pad(x, real, packed_eod) for x in (tokens, labels))
        loss_mask = _pad(loss_mask, real, 0)
        if part.size > 1:
            padding_mask = part.of(~real[None], sequences).to(device)
    own = [
        part.of(values, sequences).contiguous().to(device)
        for values in (tokens, labels, positions.expand_as(tokens), loss_mask)
    ]
    packed = packed_seq_params(sequences, device) if sequences.packed else None
    return Batch(*own, packed, padding_mask)


def _pad(values: Tensor, real: Tensor, padding: int) -> Tensor:
    """A tensor [1, S] with ``values`` [1, s] where ``real`` [S] is True, else ``padding``."""
    padded = values.new_full((1, len(real)), padding)
    padded[:, real] = values
    return padded


def stage_padding(padding_mask: Tensor | None, sequence_parallel: bool) -> Tensor | None:
    """The padding mask, bool [b, s], as this pipeline stage expects it.

    Under sequence parallelism Megatron's first stage splits it together with the embedding; later
    stages expect only this rank's tokens.
    """
    if padding_mask is None or not sequence_parallel:
        return padding_mask
    if parallel_state.is_pipeline_first_stage():
        return padding_mask
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return padding_mask.chunk(tp, dim=1)[rank].contiguous()


def forward_step(
    packed_eod: int | None,
    count: Callable[[Tensor], None],
    batches: Iterator[Tensor],
    model: nn.Module,
) -> tuple[Tensor, Callable]:
    """The losses [b, s] of one microbatch, and what makes one number of them.

    Args:
        packed_eod: As in :func:`make_batch`.
        count: Is told the number of tokens with a loss, while the model trains.
        batches: Windows [b, s + 1].
        model: This stage of it.
    """
    args = get_args()
    device = torch.device(torch.cuda.current_device())
    batch = make_batch(next(batches), device, packed_eod, ContextParallelPart.of_process(args))
    if model.training:
        count(batch.loss_mask.sum())
    losses = model(
        batch.tokens,
        batch.position_ids,
        None,  # no mask: the layers are causal
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params,
        padding_mask=stage_padding(batch.padding_mask, args.sequence_parallel),
    )
    return losses, functools.partial(_summed_loss, batch.loss_mask)


def _summed_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the losses [b, s] of all tokens that are not masked, their number, and both for logs.

    Megatron divides the first by the number of tokens of all ranks, as ``calculate_per_token_loss``
    asks it to.
    """
    total, count = (losses.float() * loss_mask).sum(), loss_mask.sum()
    return total, count.int(), {LOSS: torch.stack([total.detach(), count]).double()}
