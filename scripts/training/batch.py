"""Windows of tokens to what a GPT model takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from training.data import Windows, window_indices


@dataclass(frozen=True)
class Batch:
    """One microbatch.

    Attributes:
        tokens: int64 [b, s].
        labels: int64 [b, s], the next token.
        position_ids: int64 [b, s].
        loss_mask: float32 [b, s], 0 where the label is another document's.
        packed_seq_params: Document boundaries, or None.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    packed_seq_params: PackedSeqParams | None


def make_batch(rows: np.ndarray, device: torch.device, packed_eod: int | None = None) -> Batch:
    """Build a batch from windows.

    Args:
        rows: int32 [b, s + 1].
        device: Where the tensors go.
        packed_eod: The token that ends documents, to make every document of a window a sequence
            of its own (``thd``, b = 1); None attends over the whole window.
    """
    rows = torch.from_numpy(rows.astype(np.int64)).to(device)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    position_ids = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    loss_mask = torch.ones(tokens.shape, dtype=torch.float32, device=device)
    packed = None
    if packed_eod is not None:
        loss_mask[tokens == packed_eod] = 0
        starts = document_starts(tokens[0].tolist(), packed_eod)
        packed = _packed_seq_params(starts, tokens.shape[1], device)
        cu_seqlens = packed.cu_seqlens_q.long()
        lengths = cu_seqlens.diff()
        position_ids = position_ids - cu_seqlens[:-1].repeat_interleave(lengths)
    return Batch(tokens, labels, position_ids, loss_mask, packed)


def document_starts(tokens: list[int], eod: int) -> list[int]:
    """Where documents begin: at 0 and after every end token but a last one."""
    return [0] + [i + 1 for i, token in enumerate(tokens[:-1]) if token == eod]


def _packed_seq_params(starts: list[int], total: int, device: torch.device) -> PackedSeqParams:
    bounds = [*starts, total]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in zip(bounds, bounds[1:]))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


@dataclass(frozen=True)
class BatchSource:
    """Makes the microbatches of an iteration on this data-parallel rank.

    Attributes:
        windows: The data.
        micro_batch_size: Windows per microbatch.
        global_batch_size: Windows per iteration, over all ranks.
        dp_rank: This data-parallel rank.
        dp_size: Number of them.
        device: Where batches go.
        packed_eod: As in :func:`make_batch`.
    """

    windows: Windows
    micro_batch_size: int
    global_batch_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    packed_eod: int | None

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
            yield make_batch(rows, self.device, self.packed_eod)
