"""Windows of tokens to what a GPT model takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from absorbed_mla.sequences import SequenceLayout
from training.context_parallel import ContextParallelPart
from training.data import Windows, window_indices
from training.packing import pack_documents, packed_seq_params, real_tokens

_WHOLE = ContextParallelPart()


@dataclass(frozen=True)
class Batch:
    """One context-parallel rank's part of a microbatch.

    Attributes:
        tokens: int64 [b, s].
        labels: int64 [b, s], the next token.
        position_ids: int64 [b, s], within the sequence.
        loss_mask: float32 [b, s], 0 where the label is another document's, and for padding.
        packed_seq_params: Document boundaries of the whole pack, or None.
        padding_mask: Bool [b, s], True for padding; None where there cannot be any.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    packed_seq_params: PackedSeqParams | None
    padding_mask: Tensor | None = None


def make_batch(
    rows: np.ndarray,
    device: torch.device,
    packed_eod: int | None = None,
    part: ContextParallelPart = _WHOLE,
) -> Batch:
    """Build a batch from windows.

    Args:
        rows: int32 [b, s + 1].
        device: Where the tensors go.
        packed_eod: The token that ends documents, to make every document of a window a sequence
            of its own (``thd``, b = 1); None attends over the whole window.
        part: Which tokens to keep. Documents are padded with ``packed_eod`` where it cuts them.

    Raises:
        ValueError: If windows are not packed and ``part`` cannot cut them.
    """
    windows = torch.from_numpy(rows.astype(np.int64))
    tokens, labels = windows[:, :-1], windows[:, 1:]
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32)
    sequences, padding_mask = SequenceLayout.dense(tokens.shape[1]), None
    if packed_eod is not None:
        loss_mask[tokens == packed_eod] = 0
        sequences = pack_documents(tokens[0].tolist(), packed_eod, part)
        real = real_tokens(sequences)
        tokens, labels = (_spread(x, real, packed_eod) for x in (tokens, labels))
        loss_mask = _spread(loss_mask, real, 0)
        if part.size > 1:
            padding_mask = part.of(~real[None], sequences).to(device)
    positions = sequences.positions(torch.device("cpu")).expand_as(tokens)
    own = [
        part.of(values, sequences).contiguous().to(device)
        for values in (tokens, labels, positions, loss_mask)
    ]
    packed = packed_seq_params(sequences, device) if sequences.packed else None
    return Batch(*own, packed, padding_mask)


def _spread(values: Tensor, real: Tensor, padding: int) -> Tensor:
    """Values [1, s] of a window in the real places of a pack [1, S], and padding in the others."""
    spread = values.new_full((1, len(real)), padding)
    spread[:, real] = values
    return spread


@dataclass(frozen=True)
class BatchSource:
    """Makes the microbatches of an iteration on this data-parallel rank.

    Attributes:
        windows: The data.
        micro_batch_size: Windows per microbatch.
        global_batch_size: Windows per iteration, over all ranks.
        dp_rank: This data-parallel rank, context-parallel ranks not counted.
        dp_size: Number of them.
        device: Where batches go.
        packed_eod: As in :func:`make_batch`.
        part: As in :func:`make_batch`. Its other ranks have the same windows.
    """

    windows: Windows
    micro_batch_size: int
    global_batch_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    packed_eod: int | None
    part: ContextParallelPart = _WHOLE

    @property
    def num_microbatches(self) -> int:
        """Microbatches per iteration on each rank."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def iteration(self, iteration: int) -> Iterator[Batch]:
        """The microbatches of ``iteration``, counted from 0."""
        for microbatch in range(self.num_microbatches):
            indices = window_indices(
                iteration,
                microbatch,
                self.dp_rank,
                dp_size=self.dp_size,
                micro_batch_size=self.micro_batch_size,
                global_batch_size=self.global_batch_size,
            )
            rows = np.stack([self.windows[i] for i in indices])
            yield make_batch(rows, self.device, self.packed_eod, self.part)
