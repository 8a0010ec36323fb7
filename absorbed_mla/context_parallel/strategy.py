"""Which ranks a call is cut over, and how they exchange latents."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from absorbed_mla.context_parallel.consistency import require_agreement
from absorbed_mla.context_parallel.exchange import ExchangedKeys
from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.context_parallel.strategies.all_gather import AllGatheredKeys
from absorbed_mla.context_parallel.strategies.p2p import RingKeys
from absorbed_mla.core_attention.key_source import KeySource, LocalKeys
from absorbed_mla.options import CP_COMM_TYPES
from absorbed_mla.sequences import SequenceLayout

_STRATEGIES: dict[str, type[ExchangedKeys]] = dict(zip(CP_COMM_TYPES, (AllGatheredKeys, RingKeys)))
# Megatron's sparse attention spells it so.
_ALIASES = {"allgather": "all_gather"}


class ContextParallel:
    """The context parallelism of one attention layer.

    Args:
        group: The context-parallel ranks of calls that do not bring their own.
        cp_comm_type: ``"all_gather"`` (None) or ``"p2p"``, the exchange of latents.

    Raises:
        ValueError: If ``cp_comm_type`` is none of them.
    """

    def __init__(self, group: dist.ProcessGroup | None, cp_comm_type: str | None) -> None:
        self.group = group
        self.cp_comm_type = _require_supported(cp_comm_type)

    def group_of(self, params: PackedSeqParams | None) -> dist.ProcessGroup | None:
        """The ranks of one call, None if it is not cut.

        ``local_cp_size`` and ``cp_group`` of the call (Megatron's dynamic context parallelism)
        stand in for the layer's group.

        Raises:
            ValueError: If they contradict each other, or there is no such group.
        """
        size, group = getattr(params, "local_cp_size", None), getattr(params, "cp_group", None)
        size = None if size is None else int(size)
        if group is None:
            group = self.group if size is None else _group_of_size(size, self.group)
        elif size is not None and group.size() != size:
            raise ValueError(
                f"packed_seq_params.local_cp_size is {size}, but packed_seq_params.cp_group has "
                f"{group.size()} ranks"
            )
        return group if group is not None and group.size() > 1 else None

    def keys(
        self,
        group: dist.ProcessGroup | None,
        layout: SequenceLayout,
        batch: int,
        dtype: torch.dtype,
        *,
        causal: bool,
        begun_again: bool,
    ) -> KeySource:
        """The keys of one call.

        Args:
            group: From :meth:`group_of`.
            layout: The whole sequences, of all ranks.
            batch: Sequences side by side.
            dtype: Of the latents.
            causal: Whether a token sees only itself and earlier tokens of its sequence.
            begun_again: Whether recomputation will start the exchange again before backward.

        Raises:
            ValueError: If a sequence does not divide, or ranks were given different input.
        """
        if group is None:
            return LocalKeys(layout, causal)
        require_agreement(group, layout, batch, dtype)
        part = ContextParallelLayout(layout, group.size(), group.rank())
        return _STRATEGIES[self.cp_comm_type](part, causal, group, begun_again)


def _require_supported(cp_comm_type: str | None) -> str:
    if isinstance(cp_comm_type, str) or cp_comm_type is None:
        name = cp_comm_type or "all_gather"
        name = _ALIASES.get(name, name)
        if name in _STRATEGIES:
            return name
    raise ValueError(
        f"cp_comm_type must be one of {', '.join(CP_COMM_TYPES)} for this layer (a list in the "
        f"config names one for each layer), got {cp_comm_type!r}: a2a and a2a+p2p cut keys by "
        "heads, and the latent is one head for all"
    )


def _group_of_size(size: int, own: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group that Megatron made for dynamic context parallelism over ``size`` ranks."""
    if size == 1:
        return None
    if own is not None and own.size() == size:
        return own
    try:
        group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)
    except (AssertionError, KeyError, TypeError):
        group = None
    if group is None:
        raise ValueError(
            f"packed_seq_params.local_cp_size is {size}, but there is no cp_group and Megatron has "
            "made no group of that size; pass cp_group, or initialize_model_parallel with "
            "hybrid_context_parallel=True"
        )
    return group
