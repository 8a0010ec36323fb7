"""Documents for models with multi-token prediction (MTP), packed or alone, and their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from tests.support import world
from tests.support.layouts import Layout, cut_tokens, packed
from tests.support.models import VOCAB

# Of padding; neither it nor its loss may matter.
PADDING = 7


@dataclass(frozen=True)
class PackedDocuments:
    """Documents one after the other, [1, S]; the loss mask is float64, 0 for padding."""

    layout: Layout
    tokens: Tensor
    positions: Tensor
    labels: Tensor
    loss_mask: Tensor

    @property
    def mtp_tokens(self) -> int:
        """Tokens that have a loss of MTP at the first depth: those with two more behind them."""
        return sum(max(0, length - 1) for length in self.layout.lengths)


def documents(lengths: Sequence[int]) -> list[Tensor]:
    """Random ones, each with one token more: the label of its last."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(VOCAB, (length + 1,), generator=generator) for length in lengths]


def pack(texts: Sequence[Tensor], slots: Sequence[int]) -> PackedDocuments:
    """The documents with padding up to ``slots``."""
    lengths = [len(text) - 1 for text in texts]

    def row(parts: Sequence[Tensor], padding: float) -> Tensor:
        filled = (
            torch.nn.functional.pad(part, (0, slot - len(part)), value=padding)
            for part, slot in zip(parts, slots)
        )
        return torch.cat([*filled])[None].to(world.device())

    return PackedDocuments(
        packed(lengths, slots if tuple(slots) != tuple(lengths) else None),
        row([text[:-1] for text in texts], PADDING),
        row([torch.arange(length) for length in lengths], 0),
        row([text[1:] for text in texts], PADDING),
        row([torch.ones(length, dtype=torch.float64) for length in lengths], 0),
    )


def gradients(model: GPTModel, pack: PackedDocuments, mtp_tokens: int = 0) -> dict[str, Tensor]:
    """Of the sum of the losses, and of MTP's mean over ``mtp_tokens`` (0: those of the pack).

    Summed over the context-parallel ranks. Megatron divides MTP's loss by the tokens of a rank,
    which is undone here. ``"loss"`` is the sum itself.
    """
    group = world.cp_group()
    own = torch.tensor(cut_tokens(pack.layout, group.size(), group.rank()), device=world.device())
    counted = _has_next(pack.layout)[own.cpu()].sum().to(world.device())
    MTPLossAutoScaler.set_loss_scale(counted / (mtp_tokens or pack.mtp_tokens))
    model.zero_grad()
    model.train()
    mask = pack.loss_mask[:, own]
    losses = model(
        pack.tokens[:, own],
        pack.positions[:, own],
        None,
        labels=pack.labels[:, own],
        loss_mask=mask,
        packed_seq_params=pack.layout.packed_seq_params(world.device()),
    )
    total = (losses.double() * mask).sum()
    total.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found["loss"] = total.detach()
    return {name: world.all_reduce(x, group=group) for name, x in found.items()}


def _has_next(layout: Layout) -> Tensor:
    """Whether each token has another one of its document behind it, bool [S]."""
    rows = []
    for length, slot in zip(layout.lengths, layout.slots or layout.lengths):
        rows += [place + 1 < length for place in range(slot)]
    return torch.tensor(rows)
