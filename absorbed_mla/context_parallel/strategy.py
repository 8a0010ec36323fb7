"""Over which ranks the sequences of a call are distributed, and where their keys come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from absorbed_mla.context_parallel.choice import AUTO, choose
from absorbed_mla.context_parallel.consistency import require_equal_shapes
from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.core_attention.key_source import KeyBlock, TrainableKeySource
from absorbed_mla.core_attention.masks.spans import Spans, self_attention_spans
from absorbed_mla.dims import MLADims
from absorbed_mla.registry import CP_STRATEGIES
from absorbed_mla.sequences import SequenceLayout

# The spelling of Megatron's sparse attention.
_ALIASES = {"allgather": "all_gather"}


class ContextParallel:
    """The context parallelism of one attention layer.

    Args:
        group: The context-parallel ranks of calls that do not bring their own.
        cp_comm_type: ``"all_gather"`` or ``"p2p"``, the exchange of latents; ``"auto"`` (None)
            chooses it for every call (``choice.py``).
        dims: Of the layer.
        whole: Whether attention needs the keys of all ranks at once, which ``"auto"`` gathers then.
        window: Keys that a token sees at most, itself included; None for all.

    Attributes:
        size: Number of ranks in ``group``.

    Raises:
        ValueError: If ``cp_comm_type`` is none of them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        cp_comm_type: str | None,
        dims: MLADims,
        whole: bool = False,
        window: int | None = None,
    ) -> None:
        self.group = group
        self.size = 1 if group is None else group.size()
        self.cp_comm_type = _require_supported(cp_comm_type)
        if whole and self.cp_comm_type == AUTO:
            self.cp_comm_type = "all_gather"
        self.dims = dims
        self.window = window

    def group_of(self, params: PackedSeqParams | None) -> dist.ProcessGroup | None:
        """The ranks of one call, None if it is not cut.

        Raises:
            ValueError: As :func:`group_of_call`.
        """
        return group_of_call(params, self.group)

    def keys(
        self,
        group: dist.ProcessGroup | None,
        layout: SequenceLayout,
        batch: int,
        dtype: torch.dtype,
        *,
        causal: bool,
        recomputed: bool,
    ) -> TrainableKeySource:
        """The keys of one call.

        Args:
            group: From :meth:`group_of`.
            layout: The whole sequences, of all ranks.
            batch: Sequences side by side.
            dtype: Of the latents.
            causal: Whether a token sees only itself and earlier tokens of its sequence.
            recomputed: Whether recomputation will start the exchange again before backward.

        Raises:
            ValueError: If a sequence does not divide, or ranks were given different input.
        """
        if group is None:
            return LocalKeys(layout, causal)
        require_equal_shapes(group, layout, batch, dtype)
        part = ContextParallelLayout.of(layout, group.size(), group.rank())
        name, keep = self.cp_comm_type, not recomputed
        if name == AUTO:
            name, keep = choose(self.dims, part.num_local_tokens * batch, group.size(), dtype, keep)
        return CP_STRATEGIES[name](part, causal, group, keep, self.window)


class LocalKeys:
    """The keys of this rank, which holds whole sequences. A ``TrainableKeySource``.

    Args:
        layout: Its sequences.
        causal: Whether a token sees only itself and earlier tokens of its sequence.
    """

    num_blocks = 1
    group = None

    def __init__(self, layout: SequenceLayout, causal: bool) -> None:
        self.layout = layout
        self.causal = causal

    @property
    def max_position(self) -> int:
        """See ``TrainableKeySource``."""
        return self.layout.max_position

    def positions(self, device: torch.device) -> Tensor | None:
        """See ``TrainableKeySource``; made once for all layers, since its copies wait for a GPU."""
        if not self.layout.packed:
            return None

        def make() -> Tensor:
            # A table made under inference mode must serve training as well.
            with torch.inference_mode(False):
                return self.layout.positions(device)

        return self.layout.tables.get(("positions", device), make)

    def query_tokens(self, device: torch.device) -> Tensor:
        """See ``TrainableKeySource``."""
        return torch.arange(self.layout.num_tokens, device=device)

    def start(self, kv: Tensor) -> Tensor:
        """See ``TrainableKeySource``."""
        return kv

    def blocks(self, kv: Tensor, keep: bool) -> Iterator[KeyBlock]:
        """See ``KeySource``."""
        yield KeyBlock(kv, self.spans(), lambda: self.query_tokens(kv.device))

    def gradient(self, kv: Tensor, block_gradient: Callable[[KeyBlock], Tensor]) -> Tensor:
        """See ``TrainableKeySource``."""
        [block] = self.blocks(kv, keep=False)
        return block_gradient(block).to(kv.dtype)

    def spans(self) -> Spans:
        """See ``WholeKeySource``."""
        return self_attention_spans(self.layout, self.causal)

    def gather(self, x: Tensor) -> Tensor:
        """See ``WholeKeySource``."""
        return x


def _require_supported(cp_comm_type: str | None) -> str:
    if isinstance(cp_comm_type, str) or cp_comm_type is None:
        name = cp_comm_type or AUTO
        name = _ALIASES.get(name, name)
        if name in (AUTO, *CP_STRATEGIES.names()):
            return name
    accepted = ", ".join((AUTO, *CP_STRATEGIES.names()))
    raise ValueError(
        f"cp_comm_type must be one of {accepted} for this layer (a list in the "
        f"config names one for each layer), got {cp_comm_type!r}: a2a and a2a+p2p cut keys by "
        "heads, and the latent is one head for all"
    )


def group_of_call(
    params: PackedSeqParams | None, own: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """The context-parallel ranks of one call, None if it is not cut.

    ``local_cp_size`` and ``cp_group`` of the call (Megatron's dynamic context parallelism) stand in
    for the model's group.

    Args:
        params: The call's pack, or None.
        own: The model's group, or None.

    Raises:
        ValueError: If they contradict each other, or there is no such group.
    """
    size, group = getattr(params, "local_cp_size", None), getattr(params, "cp_group", None)
    size = None if size is None else int(size)
    if group is None:
        group = own if size is None else _group_of_size(size, own)
    elif size is not None and group.size() != size:
        raise ValueError(
            f"packed_seq_params.local_cp_size is {size}, but packed_seq_params.cp_group has "
            f"{group.size()} ranks"
        )
    return group if group is not None and group.size() > 1 else None


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
