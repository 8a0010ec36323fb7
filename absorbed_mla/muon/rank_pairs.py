"""P2P exchange of K and V up-projections between the data-parallel ranks that own one each.

Megatron's layer-wise optimizer gives every matrix to one data-parallel rank, which alone has its
gradient and momentum. Two ranks that have one half each send it to each other, and both compute
the update of the whole.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from absorbed_mla.muon.momentum_view import MomentumView, is_scalar
from absorbed_mla.muon.orthogonalization_groups import Combined, not_together


def data_parallel_group(optimizer: Optimizer) -> dist.ProcessGroup | None:
    """The ranks among which Megatron may have shared out the optimizer's parameters."""
    group = getattr(getattr(optimizer, "pg_collection", None), "dp_cp", None)
    return group if group is not None and group.size() > 1 else None


class RankPairs:
    """Which rank has the half that this one lacks, by number of the entry.

    All ranks of the group must make it at the same time.

    Args:
        group: The data-parallel ranks.
        present: Whether this rank has K and V of the entries to combine, by number of the entry.
        device: Where tensors are that the group communicates.

    Raises:
        ValueError: If no other rank, or more than one, has a half that is missing here.
    """

    def __init__(
        self, group: dist.ProcessGroup, present: dict[int, list[bool]], device: torch.device
    ) -> None:
        self._group = group
        own = torch.tensor([*present.values()], dtype=torch.int32, device=device)
        everyones = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(everyones, own, group=group)
        by_rank = torch.stack(everyones).tolist()
        self._ranks: dict[int, int] = {}
        for row, (number, mine) in enumerate(present.items()):
            if sum(mine) == 1:
                others = [int(not has) for has in mine]
                ranks = [rank for rank, table in enumerate(by_rank) if table[row] == others]
                if len(ranks) != 1:
                    raise not_together()
                self._ranks[number] = dist.get_global_rank(group, ranks[0])

    def exchange(
        self, number: int, entry: Combined, part: int, own: MomentumView
    ) -> list[MomentumView]:
        """Both halves of an entry of which this rank has one.

        Args:
            number: Of the entry.
            entry: The two weights.
            part: Which half this rank has.
            own: The half itself.
        """
        peer = self._ranks[number]
        heads = own.value.shape[0] // entry.head_dims[part]
        height = heads * entry.head_dims[1 - part]
        names = sorted(name for name, value in own.state.items() if not is_scalar(value))
        sent = [own.value, own.grad, *(own.state[name] for name in names)]
        got = [x.new_empty((height, *x.shape[1:])) for x in sent]
        self._send_and_receive(peer, sent, got)
        scalars = {name: value for name, value in own.state.items() if is_scalar(value)}
        other = MomentumView(got[0], got[1], scalars | dict(zip(names, got[2:])), is_own=False)
        return [own, other] if part == 0 else [other, own]

    def _send_and_receive(self, peer: int, sent: list[Tensor], got: list[Tensor]) -> None:
        group = self._group
        sends = [dist.P2POp(dist.isend, x.contiguous(), peer, group) for x in sent]
        receipts = [dist.P2POp(dist.irecv, x, peer, group) for x in got]
        for work in dist.batch_isend_irecv(sends + receipts):
            work.wait()
