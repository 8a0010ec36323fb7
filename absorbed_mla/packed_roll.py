"""Megatron's shift by one token for multi-token prediction (MTP), corrected for padded packs.

Megatron's ``roll_tensor`` cuts a pack by ``cu_seqlens_q``, in which the padding between documents
does not count, so everything behind the first padding is shifted across the wrong boundaries.
:func:`correct_packed_roll` puts a right one in its place, for the layers of MTP (tokens, positions,
padding mask) and for their loss (labels, loss mask); packs without padding stay Megatron's. In a
pack with shared prefixes (``prefix_tree.py``) the token after a prompt's last is that of its first
answer, and weights are the sum of all answers'.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction as host
from torch import Tensor

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.context_parallel.strategy import group_of_call
from absorbed_mla.inference.prefill_context_parallel import gather
from absorbed_mla.megatron_names import PACKED_MTP, PREDICTION, ROLL_TENSOR
from absorbed_mla.sequences import SequenceLayout

_megatrons_roll = getattr(host, ROLL_TENSOR.name, None)
# Megatron's branch dev cuts packs by their padded boundaries, in a function of other arguments.
_IS_RIGHT = (
    _megatrons_roll is not None and "fill_values" in inspect.signature(_megatrons_roll).parameters
)


def correct_packed_roll() -> None:
    """Have Megatron's MTP in this process shift padded packs by :func:`roll_tensor`.

    All pipeline stages need it: the loss is the last one's, also where that has no layer of MTP.
    """
    if _megatrons_roll is None or _IS_RIGHT:
        return
    if getattr(host, ROLL_TENSOR.name, None) is _megatrons_roll:
        ROLL_TENSOR.replace(host, roll_tensor)


def require_packed_roll() -> None:
    """Refuse MTP with a Megatron whose shift cannot be replaced.

    Raises:
        ValueError: If it has no ``roll_tensor``.
    """
    PACKED_MTP.require({PREDICTION: host})


def require_tree_roll() -> None:
    """Refuse MTP over shared prefixes where Megatron shifts packs by itself.

    Raises:
        ValueError: If it is its branch ``dev``, or no model with MTP was built.
    """
    if getattr(host, ROLL_TENSOR.name, None) is not roll_tensor:
        raise ValueError(
            "shared prefixes need mtp_num_layers=None with this Megatron, which shifts packs by "
            "itself, and across the ends of prefixes"
        )


def roll_tensor(
    tensor: Tensor | None,
    shifts: int = -1,
    dims: int = -1,
    cp_group: dist.ProcessGroup | None = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Megatron's function of this name; packs with padding or a tree by :func:`next_tokens`.

    Returns:
        What was shifted, and its sum; both None for None.

    Raises:
        ValueError: If the boundaries are malformed or do not cover the tokens. It says that this
            package shifts them, since the model may be another's in the same process.
    """
    tree = getattr(packed_seq_params, "prefix_tree", None)
    padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
    if tensor is None or (tree is None and padded is None):
        assert _megatrons_roll is not None
        return _megatrons_roll(tensor, shifts, dims, cp_group, packed_seq_params)
    assert shifts == -1 and dims in (-1, tensor.ndim - 1), "MTP shifts tokens by one"
    group = group_of_call(packed_seq_params, cp_group)
    try:
        rolled = next_tokens(tensor, packed_seq_params, group)
    except ValueError as error:
        raise ValueError(
            f"{error} (absorbed_mla.packed_roll, which replaces Megatron's roll_tensor for all "
            "models of this process, needs boundaries of all tokens, padding included)"
        ) from error
    if tree is None or group is None or not rolled.is_floating_point():
        return rolled, rolled.sum()
    weights = rolled if isinstance(tensor, _LossWeights) else rolled * group.size()
    return _LossWeights.of(weights, group)


class _LossWeights(Tensor):
    """Weights of MTP's losses of a context-parallel rank's tokens in a pack with shared prefixes.

    Megatron divides a rank's losses by the sum of its weights, and takes the mean of the ranks. How
    many tokens a rank has depends on the tree, so it is the sum over all ranks here, and weights
    are multiplied by the number of ranks. With ``calculate_per_token_loss`` Megatron adds the ranks
    up, and multiplies by :meth:`sum` before MTP's shifts, which takes that number back.
    """

    # Products are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _sum: Tensor

    @classmethod
    def of(cls, weights: Tensor, group: dist.ProcessGroup) -> tuple[_LossWeights, Tensor]:
        total = weights.sum() / group.size()
        dist.all_reduce(total, group=group)
        found = weights.as_subclass(cls)
        found._sum = total / group.size()
        return found, total

    def sum(self) -> Tensor:  # type: ignore[override]
        return self._sum


def next_tokens(values: Tensor, params: PackedSeqParams, group: dist.ProcessGroup | None) -> Tensor:
    """For every token the value of the next token of its document.

    The last token of a document gets 0, as it does where the document is alone. So does padding,
    but for a padding mask, whose padding stays padding. Where a prefix ends, the next token is that
    of the first node below; floating-point values, weights of losses, are summed over all of them.

    Args:
        values: [..., S / cp] of this context-parallel rank's tokens. Bool ones are a padding mask,
            True for padding.
        params: Boundaries of the whole pack.
        group: Context-parallel ranks, which exchange their values; None for one.

    Returns:
        In the shape and dtype of ``values``.
    """
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    layout = SequenceLayout.from_host(params, values.shape[-1] * size)
    step = layout.tables.get(
        ("next tokens", size, rank, values.device), lambda: _step(layout, size, rank, values.device)
    )
    pack = values if group is None else _of_all_ranks(values, group)
    found = pack[..., step.source].masked_fill(step.ends, 0)
    if values.is_floating_point():
        return found.index_add(-1, step.branches, pack[..., step.siblings])
    if len(step.branches) and not torch.equal(
        found[..., step.branches], pack[..., step.siblings].to(values.dtype)
    ):
        raise ValueError(
            "MTP needs one next token of every token: let a tree's nodes begin with the last "
            "tokens of the prefix before them, as shared_prefix_log_probs does"
        )
    return found | (values & step.padding) if values.dtype is torch.bool else found


class _Step(NamedTuple):
    """Where the next token of every token of a rank is.

    Attributes:
        source: int64 [S / cp], among the tokens of rank 0, of rank 1, ...
        ends: Bool, whether there is none in the document.
        padding: Bool, whether the token is padding itself.
        branches: int64 [E], tokens of the rank with more than one next token, once for each other.
        siblings: int64 [E], where that one is, as of ``source``.
    """

    source: Tensor
    ends: Tensor
    padding: Tensor
    branches: Tensor
    siblings: Tensor


def _step(layout: SequenceLayout, size: int, rank: int, device: torch.device) -> _Step:
    # A table made under inference mode must serve training as well.
    with torch.inference_mode(False):
        own = places = torch.arange(layout.num_tokens)
        if size > 1:
            part = ContextParallelLayout.of(layout, size, rank)
            own, places = part.tokens(), part.sequence_order()
        after = torch.tensor(list(map(sum, layout.runs())))
        left = after.repeat_interleave(torch.tensor(layout.slots))[own] - own
        following, ends = (own + 1).clamp(max=layout.num_tokens - 1), left <= 1
        here = torch.full_like(places, -1)
        here[own] = torch.arange(len(own))
        branches, siblings = [], []
        for node, parent in enumerate(layout.tree.parents if layout.tree else ()):
            if parent is None or not layout.lengths[parent]:
                continue
            last = int(here[layout.starts[parent] + layout.lengths[parent] - 1])
            if last >= 0 and node == parent + 1:
                ends[last], following[last] = False, layout.starts[node]
            elif last >= 0:
                branches.append(last)
                siblings.append(layout.starts[node])
        found = places[following], ends, left <= 0
        others = torch.tensor(branches, dtype=torch.int64), places[siblings]
        return _Step(*(one.to(device) for one in (*found, *others)))


def _of_all_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[..., S], the tokens of rank 0, of rank 1, ..."""
    # As bytes, since not all process groups exchange all dtypes.
    found = gather(values.reshape(-1).view(torch.uint8), group).view(values.dtype)
    return found.view(group.size(), *values.shape).movedim(0, -2).flatten(-2)
