"""QK-clip: keeps attention scores bounded by scaling weights after an optimizer step.

Kimi K2 (arXiv:2507.20534), section 2.1. A head whose largest score S_max of the step is above tau
gets gamma = tau / S_max: its rows of W_UQ that make q_rope are multiplied by gamma, those that make
q_nope by gamma^alpha, its rows of W_UK by gamma^(1 - alpha). k_rope, which all heads share, stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from absorbed_mla.dims import MLADims


def clip_qk(
    model: nn.Module | Iterable[nn.Module],
    *,
    log_max_only: bool = False,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Clip every attention of a model after an optimizer step, by the largest scores of the step.

    Like ``megatron.core.optimizer.qk_clip.clip_qk``, with one collective for all layers, and for
    every kind of model: wrapped or not, with MTP or hybrid layers. All ranks of ``group`` call it.

    Args:
        model: A model or its chunks, whose config has ``qk_clip`` (or ``log_max_attention_logit``).
        log_max_only: Forget the largest scores, and change no weight.
        group: Ranks that train the same weights on other tokens; None takes Megatron's data- and
            context-parallel group, or no group where none is initialised.

    Returns:
        The largest score of this rank's heads and layers; 0 if there was none.

    Raises:
        ValueError: If ``qk_clip`` is off and ``log_max_only`` is too, or the weights' fp32 copies
            cannot be reached.
    """
    chunks = [model] if isinstance(model, nn.Module) else model
    layers = [m for chunk in chunks for m in chunk.modules() if _has_max_logits(m)]
    if not layers:
        return 0.0
    maxima = torch.cat([layer.core_attention.current_max_attn_logits for layer in layers])
    if group is None and parallel_state.is_initialized():
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group is not None:
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
    counts = [len(layer.core_attention.current_max_attn_logits) for layer in layers]
    for layer, found in zip(layers, maxima.split(counts)):
        layer.core_attention.current_max_attn_logits = None if log_max_only else found
        if not log_max_only:
            layer.clip_qk()
    largest = float(maxima.max())
    return largest if largest > -torch.inf else 0.0


def _has_max_logits(module: nn.Module) -> bool:
    core = getattr(module, "core_attention", None)
    return hasattr(module, "clip_qk") and getattr(core, "current_max_attn_logits", None) is not None


def clip_factors(max_logits: Tensor, threshold: float) -> Tensor | None:
    """Factor gamma of every head, or None if no head is to be clipped.

    Heads whose largest score is NaN or infinite are left alone: no factor mends them.

    Args:
        max_logits: [N], see ``LatentCoreAttention.current_max_attn_logits``.
        threshold: tau, positive.

    Raises:
        ValueError: If the threshold is not positive.
    """
    if not threshold > 0:
        raise ValueError(f"qk_clip_threshold must be positive, got {threshold}")
    clipped = (max_logits > threshold) & torch.isfinite(max_logits)
    if not bool(clipped.any()):
        return None
    return torch.where(clipped, threshold / max_logits, 1.0)


def scale_query_and_key(
    w_q: nn.Parameter, w_uk: nn.Parameter, dims: MLADims, gamma: Tensor, alpha: float
) -> None:
    """Scale the rows of each head, as the paper divides the factor between query and key.

    Args:
        w_q: W_UQ or W_Q, [N * (nope + R), ...].
        w_uk: [N * nope, C].
        dims: Of the layer.
        gamma: [N].
        alpha: The query's share of the factor of q_nope.

    Raises:
        ValueError: See :func:`scale_rows`.
    """
    of_nope = gamma.pow(alpha)[:, None].expand(-1, dims.qk_nope_head_dim)
    of_rope = gamma[:, None].expand(-1, dims.qk_rope_head_dim)
    scale_rows(w_q, torch.cat((of_nope, of_rope), dim=1).flatten())
    scale_rows(w_uk, gamma.pow(1 - alpha).repeat_interleave(dims.qk_nope_head_dim))


@torch.no_grad()
def scale_rows(weight: nn.Parameter, factors: Tensor) -> None:
    """Multiply the rows of a weight, and of the copy that Megatron's optimizer updates.

    Rows whose factor is 1 keep their bits.

    Args:
        weight: [rows, columns]; a DTensor if FSDP shards it.
        factors: [rows].

    Raises:
        ValueError: If the optimizer keeps the fp32 copy where it cannot be reached.
    """
    # All of them are found before one is changed: some cannot be.
    for values, first in [*_pieces(weight)]:
        _multiply(values, first, factors, weight.shape[1])


def _multiply(values: Tensor, first: int, factors: Tensor, columns: int) -> None:
    """Multiply a piece of a weight, which may begin and end within a row.

    Args:
        values: [n], in place.
        first: Where in the flattened weight it begins.
        factors: Of all rows.
        columns: Width of a row.
    """
    row, begun = divmod(first, columns)
    if begun:
        rest = values[: columns - begun]
        rest.mul_(factors[row])
        values, row = values[len(rest) :], row + 1
    whole = len(values) // columns
    values[: whole * columns].view(whole, columns).mul_(factors[row : row + whole, None])
    if len(values) > whole * columns:
        values[whole * columns :].mul_(factors[row + whole])


def _pieces(weight: nn.Parameter) -> Iterator[tuple[Tensor, int]]:
    """What of a weight lies on this rank: values [n], and where in the whole they begin."""
    data = weight.data
    if isinstance(data, DTensor):
        placed = (data.shape, data.device_mesh, data.placements)
        _, offsets = compute_local_shape_and_global_offset(*placed)
        if offsets[1]:
            raise ValueError("QK-clip needs weights that FSDP shards by rows, got columns")
        yield data.to_local().view(-1), offsets[0] * data.shape[1]
    else:
        yield data.view(-1), 0
    if getattr(weight, "main_param_sharded", False):
        yield from _shard_of_master(weight)
    elif getattr(weight, "main_param", None) is not None:
        yield weight.main_param.data.view(-1), 0


def _shard_of_master(weight: nn.Parameter) -> Iterator[tuple[Tensor, int]]:
    """The distributed optimizer's fp32 values of this rank.

    It does not say where in the weight they begin, but ranks have consecutive pieces.
    """
    group = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=True
    )
    shard = weight.main_param
    count = torch.tensor([0 if shard is None else shard.numel()], device=weight.device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group)
    sizes = [int(one) for one in counts]
    if sum(sizes) != weight.numel():
        raise ValueError(
            f"QK-clip needs the optimizer's fp32 values of all {weight.numel()} elements of a "
            f"weight, and found {sum(sizes)}; use_precision_aware_optimizer hides them"
        )
    if shard is not None:
        yield shard.data.view(-1), sum(sizes[: group.rank()])
