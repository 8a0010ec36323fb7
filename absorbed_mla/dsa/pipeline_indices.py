"""Pipeline P2P of the indices that layers share: selections go from one stage to the next.

Megatron sends hidden states between stages, of one shape, so selections travel beside them: in
process groups of two ranks, one for each direction, in the order of the forwards. That order is the
same on both stages in each of Megatron's schedules.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store, default_pg_timeout
from torch.utils.weak import WeakIdKeyDictionary

from absorbed_mla.dsa.config import DSAConfig

# Selections that a stage may be ahead of the next one: more than Megatron's schedules are.
_MOST_IN_FLIGHT = 16
_SENDER, _RECEIVER = 0, 1
# Groups made so far of two ranks; a name in the store is used once.
_made: Counter[str] = Counter()


class IndexP2P:
    """Point-to-point communication of selections in one direction between two stages.

    Args:
        pp_group: The pipeline's stages.
        sender: A rank of it.
        receiver: Another one. Both ranks must construct it at the same time.
    """

    def __init__(self, pp_group: dist.ProcessGroup, sender: int, receiver: int) -> None:
        self._sends = pp_group.rank() == sender
        self._pair = _pair(pp_group, sender, receiver)
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()
        # NCCL connects two ranks when both ask for it, and in a forward only one of them does.
        device = "cuda" if _is_nccl(pp_group) else "cpu"
        nothing = torch.zeros(1, dtype=torch.int32, device=device)
        exchange = self._pair.send if self._sends else self._pair.recv
        exchange([nothing], _RECEIVER if self._sends else _SENDER, 0).wait()

    def send(self, chosen: Tensor) -> None:
        """Send without waiting for the receiver."""
        assert self._sends
        while self._in_flight:
            work, _ = self._in_flight[0]
            if not work.is_completed() and len(self._in_flight) < _MOST_IN_FLIGHT:
                break
            work.wait()
            self._in_flight.popleft()
        chosen = chosen.contiguous()
        self._in_flight.append((self._pair.send([chosen], _RECEIVER, 0), chosen))

    def receive(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """The next selection, int32 of that shape."""
        assert not self._sends
        chosen = torch.empty(*shape, dtype=torch.int32, device=device)
        self._pair.recv([chosen], _SENDER, 0).wait()
        return chosen


def _pair(pp_group: dist.ProcessGroup, sender: int, receiver: int) -> Any:
    """A group of two ranks, made by these two alone.

    ``dist.new_group`` needs all ranks of the job, or (``use_local_synchronization``) ranks that
    have been in equally many groups before.
    """
    ranks = [dist.get_global_rank(pp_group, rank) for rank in (sender, receiver)]
    name = f"absorbed_mla_selections/{ranks[0]}_{ranks[1]}"
    _made[name] += 1
    store = dist.PrefixStore(f"{name}/{_made[name]}", _get_default_store())
    own = _SENDER if pp_group.rank() == sender else _RECEIVER
    if _is_nccl(pp_group):
        return dist.ProcessGroupNCCL(store, own, 2, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(store, own, 2, default_pg_timeout)


def _is_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in dist.get_backend(group)


# By the pipeline's group: all models in it use the same.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def stage_p2p(
    config: MLATransformerConfig,
    dsa: DSAConfig,
    pp_group: dist.ProcessGroup | None,
    layer_number: int,
) -> tuple[IndexP2P | None, IndexP2P | None]:
    """Where the selection that a layer shares comes from, and where the next layer gets it from.

    Every rank of the group must ask when it builds its first layer: ranks connect then.

    Args:
        config: Of the model.
        dsa: Read for the layers that share selections.
        pp_group: The pipeline's stages, or None.
        layer_number: Counted from 1, over all stages.

    Returns:
        Those with the stage of the layer before, and with the stage of the layer
        after; None where that is on the same stage, or its own selection is made there.
    """
    if pp_group is None or pp_group.size() == 1 or getattr(config, "is_hybrid_model", False):
        return None, None
    owners = stages_of_layers(config)
    borders = {
        layer: (owners[layer - 2], owners[layer - 1])
        for layer in range(2, len(owners) + 1)
        if dsa.shares_selection(layer) and owners[layer - 2] != owners[layer - 1]
    }
    own = pp_group.rank()
    known: dict[tuple[int, int], IndexP2P] = _known.setdefault(pp_group, {})
    # One after the other in the order that all ranks have: no two can wait for each other.
    for ranks in sorted(set(borders.values())):
        if own in ranks and ranks not in known:
            known[ranks] = IndexP2P(pp_group, *ranks)
    before, after = borders.get(layer_number), borders.get(layer_number + 1)
    return (
        known[before] if before is not None and before[1] == own else None,
        known[after] if after is not None and after[0] == own else None,
    )


def stages_of_layers(config: MLATransformerConfig) -> list[int]:
    """The pipeline rank of every decoder layer, in order."""
    layout = config.pipeline_model_parallel_layout
    virtual = config.virtual_pipeline_model_parallel_size
    owners: list[int] = []
    for chunk in range(virtual or 1):
        for rank in range(config.pipeline_model_parallel_size):
            if layout is not None:
                count = layout.layout[rank][chunk].count(LayerType.decoder)
            else:
                vp_stage = None if virtual is None else chunk
                count = get_num_layers_to_build(config, vp_stage, rank)
            owners += [rank] * count
    return owners
