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
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from absorbed_mla.dims import MLADims
from absorbed_mla.fp8 import dequantized


def clip_qk(
    model: nn.Module | Iterable[nn.Module],
    *,
    log_max_only: bool = False,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Clip every attention of a model after an optimizer step, by the largest scores of the step.

    Like ``megatron.core.optimizer.qk_clip.clip_qk``, with one collective for all layers, and for
    every kind of model: wrapped or not, with MTP or hybrid layers. All ranks of ``group`` call it.
    The host waits once for the device; once more where a head is clipped and the distributed
    optimizer's shards are new.

    Args:
        model: A model or its chunks, whose config has ``qk_clip`` (or ``log_max_attention_logit``).
        log_max_only: Forget the largest scores, and change no weight.
        group: Ranks that train the same weights on other tokens; None takes Megatron's data- and
            context-parallel group, or no group where none is initialised.

    Returns:
        The largest score of this rank's heads and layers; 0 if there was none. With
        ``log_max_attention_logit`` off it may be an upper bound where it is below the threshold.

    Raises:
        ValueError: If ``qk_clip`` is off and ``log_max_only`` is too, the weights' fp32 copies
            cannot be reached, or an adapter adds to the output of a layer that would be scaled.
    """
    chunks = [model] if isinstance(model, nn.Module) else model
    layers = [m for chunk in chunks for m in chunk.modules() if _has_max_logits(m)]
    if not layers:
        return 0.0
    if not log_max_only:
        for layer in layers:
            check_config(layer.config)
    weights = [] if log_max_only else [w for layer in layers for w in _weights_of(layer)]
    maxima = [layer.core_attention.current_max_attn_logits for layer in layers]
    # Beside them, whether this rank must ask for its shards: all ranks do or none does.
    asks = maxima[0].new_full((1,), float(not SHARDS.know(weights)))
    found = torch.cat([*maxima, asks])
    if group is None and parallel_state.is_initialized():
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    on_host = found.cpu()  # the only time that the host waits, unless ranks ask for shards
    counts = [*map(len, maxima), 1]
    clipped = []
    for layer, own, values in zip(layers, found.split(counts), on_host.split(counts)):
        layer.core_attention.current_max_attn_logits = None
        if not log_max_only and bool(_clipped(values, layer.config.qk_clip_threshold).any()):
            clipped.append((layer, own))
    if clipped and on_host[-1]:
        SHARDS.ask(weights)
    for layer, own in clipped:
        _clip(layer, own)
    largest = float(on_host[:-1].max())
    return largest if largest > -torch.inf else 0.0


def _has_max_logits(module: nn.Module) -> bool:
    core = getattr(module, "core_attention", None)
    return hasattr(module, "clip_qk") and getattr(core, "current_max_attn_logits", None) is not None


def _weights_of(layer: nn.Module) -> tuple[nn.Parameter, ...]:
    """What is scaled of our attention; Megatron's scales its own."""
    return layer.qk_clip_weights() if hasattr(layer, "qk_clip_weights") else ()


def _clip(layer: nn.Module, max_logits: Tensor) -> None:
    if hasattr(layer, "scale_qk"):
        layer.scale_qk(clip_factors(max_logits, layer.config.qk_clip_threshold))
    else:
        layer.core_attention.current_max_attn_logits = max_logits
        layer.clip_qk()


def check_config(config: TransformerConfig) -> None:
    """Check what ``clip_qk`` reads.

    Raises:
        ValueError: If ``qk_clip`` is off or the threshold is not positive.
    """
    if not config.qk_clip:
        raise ValueError("clip_qk() needs qk_clip=True in the config, got False")
    if not config.qk_clip_threshold > 0:
        raise ValueError(f"qk_clip_threshold must be positive, got {config.qk_clip_threshold}")


def clip_factors(max_logits: Tensor, threshold: float) -> Tensor:
    """Factor gamma of every head, 1 for those that are not clipped.

    Heads whose largest score is NaN or infinite are left alone: no factor mends them.

    Args:
        max_logits: [N], see ``LatentCoreAttention.current_max_attn_logits``.
        threshold: tau, positive.
    """
    return torch.where(_clipped(max_logits, threshold), threshold / max_logits, 1.0)


def _clipped(max_logits: Tensor, threshold: float) -> Tensor:
    return (max_logits > threshold) & torch.isfinite(max_logits)


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

    Rows whose factor is 1 keep their bits, but for FP8 parameters, which are quantized again.

    Args:
        weight: [rows, columns]; a DTensor if FSDP shards it. ``SHARDS`` was asked for it.
        factors: [rows].

    Raises:
        ValueError: If FSDP shards it by columns.
    """
    # All of them are found before one is changed: some cannot be.
    pieces = [*_pieces(weight)]
    if is_float8tensor(weight):
        weight.copy_((dequantized(weight) * factors[:, None]).to(weight.dtype))
    for values, first in pieces:
        _multiply(values, first, factors, weight.shape[1])


def _multiply(values: Tensor, first: int, factors: Tensor, columns: int) -> None:
    """Multiply a piece [n] of a weight in place, which may begin and end within a row.

    It begins at ``first`` of the flattened weight; ``factors`` are of all rows.
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
    """What of a weight lies on this rank: values [n], and where in the whole they begin.

    Values in FP8, which cannot be multiplied where they are, are left out.
    """
    data = weight.data
    if is_float8tensor(weight):
        pass
    elif isinstance(data, DTensor):
        placed = (data.shape, data.device_mesh, data.placements)
        _, offsets = compute_local_shape_and_global_offset(*placed)
        if offsets[1]:
            raise ValueError("QK-clip needs weights that FSDP shards by rows, got columns")
        yield data.to_local().view(-1), offsets[0] * data.shape[1]
    else:
        yield data.view(-1), 0
    if SHARDS.concern(weight):
        if weight.main_param is not None:
            yield weight.main_param.data.view(-1), SHARDS.first(weight)
    elif getattr(weight, "main_param", None) is not None:
        yield weight.main_param.data.view(-1), 0


class _Shards:
    """Where in a weight the distributed optimizer's fp32 values of this rank begin.

    It does not say so, but ranks have consecutive pieces: they tell each other the sizes, once for
    as long as the optimizer keeps the same tensors.
    """

    def __init__(self) -> None:
        # The shard, and where it begins.
        self._known = WeakTensorKeyDictionary()

    @staticmethod
    def concern(weight: nn.Parameter) -> bool:
        """Whether the optimizer shards the fp32 values of a weight."""
        return getattr(weight, "main_param_sharded", False)

    def know(self, weights: Iterable[nn.Parameter]) -> bool:
        """Whether the shards of all weights are those that ranks were last asked for."""
        return all(self._is_known(weight) for weight in weights if self.concern(weight))

    def _is_known(self, weight: nn.Parameter) -> bool:
        if weight not in self._known:
            return False
        shard, _ = self._known[weight]
        return (shard and shard()) is weight.main_param

    def first(self, weight: nn.Parameter) -> int:
        """Of the flattened weight, the first element that the shard of this rank holds."""
        return self._known[weight][1]

    def ask(self, weights: Iterable[nn.Parameter]) -> None:
        """Exchange sizes in one collective; all ranks that shard the weights call it.

        Raises:
            ValueError: If the shards of all ranks are less than a weight.
        """
        sharded = [weight for weight in weights if self.concern(weight)]
        if not sharded:
            return
        group = parallel_state.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        )
        own = [0 if w.main_param is None else w.main_param.numel() for w in sharded]
        sizes = torch.tensor(own, device=sharded[0].device)
        of_ranks = [torch.empty_like(sizes) for _ in range(group.size())]
        dist.all_gather(of_ranks, sizes, group)
        for weight, counts in zip(sharded, torch.stack(of_ranks, dim=1).tolist()):
            if sum(counts) != weight.numel():
                raise ValueError(
                    f"QK-clip needs the optimizer's fp32 values of all {weight.numel()} elements "
                    f"of a weight, and found {sum(counts)}; use_precision_aware_optimizer hides "
                    "them"
                )
            shard = None if weight.main_param is None else TensorWeakRef(weight.main_param)
            self._known[weight] = shard, sum(counts[: group.rank()])


SHARDS = _Shards()
