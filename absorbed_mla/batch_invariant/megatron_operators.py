"""Megatron's batch-invariant mode and its sums over ranks, with operators of this package.

Megatron (``megatron.core.transformer.custom_layers.batch_invariant_kernels``) knows which functions
of PyTorch and TransformerEngine to replace, and has a flag that others read. Both stay its own:
only the stand-ins that it installs are exchanged, by their names in its module. Its ``log_softmax``
and ``mean`` remain.

No other file of the mode touches a private name of Megatron's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.tensor_parallel import cross_entropy, layers, mappings
from megatron.core.transformer import mlp
from megatron.core.transformer.custom_layers import batch_invariant_kernels as megatron
from megatron.core.transformer.moe import router

from absorbed_mla.megatron_names import REFUSED, MegatronName, Need

_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_LAYERS = "megatron.core.tensor_parallel.layers"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_OPTIMIZER = "megatron.core.optimizer.optimizer"


def _operator(name: str, replaced_by: str) -> MegatronName:
    return MegatronName(_KERNELS, name, replaced_by)


MM = _operator("mm_batch_invariant", "products.mm")
ADDMM = _operator("addmm_batch_invariant", "products.addmm")
TE_GEMM = _operator("_te_general_gemm_patched", "te_gemm.general_gemm")
TE_RMS_NORM = _operator("BatchInvariantRMSNormFn", "norms.TERMSNorm")
TE_NORMALIZATION = _operator("_te_apply_normalization_patched", "norms.apply_normalization")
REDUCE = MegatronName(_MAPPINGS, "_reduce", "collectives.reduce_by_tree")
REDUCE_SCATTER = MegatronName(
    _MAPPINGS, "_reduce_scatter_along_first_dim", "collectives.reduce_scatter_by_tree"
)

SUMS = Need("batch-invariant mode", REFUSED, (REDUCE, REDUCE_SCATTER))
GPU_OPERATORS = Need(
    "batch-invariant mode on a GPU",
    "Megatron's stand-in stays, of one that it installs under another name",
    (MM, ADDMM, TE_GEMM, TE_RMS_NORM, TE_NORMALIZATION),
)
COLUMN = MegatronName(
    f"{_LAYERS}.ColumnParallelLinear", "_forward_impl", "parallel_linear.column_linear"
)
ROW = MegatronName(f"{_LAYERS}.RowParallelLinear", "forward", "parallel_linear.row_linear")
ROUTER = MegatronName(
    "megatron.core.transformer.moe.router",
    "router_gating_linear",
    "parallel_linear.router_linear",
)
EXPERT = MegatronName(
    "megatron.core.transformer.mlp.MLP", "forward", "the same with parallel_linear.TokenScale"
)
CROSS_ENTROPY = MegatronName(
    "megatron.core.tensor_parallel.cross_entropy",
    "_VocabParallelCrossEntropy",
    "cross_entropy.VocabParallelCrossEntropy",
)
GRADIENTS = MegatronName(
    _FINALIZE, "_allreduce_non_tensor_model_parallel_grads", "no sum, as backward made it"
)
GRAD_NORM = MegatronName(_OPTIMIZER, "get_grad_norm_fp32", "gradients.exact_grad_norm")
TENSOR_PARALLEL_PARTS = Need(
    "tensor_parallel_parts",
    REFUSED,
    (COLUMN, ROW, ROUTER, EXPERT, CROSS_ENTROPY, GRADIENTS, GRAD_NORM),
)
# By dotted path, where the parts' names are.
_OWNERS = {
    COLUMN.owner: layers.ColumnParallelLinear,
    ROW.owner: layers.RowParallelLinear,
    ROUTER.owner: router,
    EXPERT.owner: mlp.MLP,
    CROSS_ENTROPY.owner: cross_entropy,
    **{path: importlib.import_module(path) for path in (_FINALIZE, _OPTIMIZER)},
}

megatron_reduce: Callable | None = getattr(mappings, REDUCE.name, None)
megatron_reduce_scatter: Callable | None = getattr(mappings, REDUCE_SCATTER.name, None)
# Passes on to TransformerEngine what it does not compute.
megatron_te_normalization: Callable | None = getattr(megatron, TE_NORMALIZATION.name, None)


def megatrons(function: Callable | None) -> Callable:
    """One of these, by the time that it has been replaced, so that it is there."""
    assert function is not None, "it has been replaced"
    return function


# Megatron's own, while ours have their names.
_theirs: dict[MegatronName, Any] = {}
_of_parts: dict[MegatronName, Any] = {}


def enable(ours: Mapping[MegatronName, Any]) -> None:
    """Switch Megatron's mode on, with our operators also where it was on already.

    Args:
        ours: By Megatron's names, what it is to install; names that this release lacks are passed
            over.
    """
    if not _theirs:
        # What it has installed is replaced by switching it off and on again.
        megatron.disable_batch_invariant_mode()
        for name, operator in ours.items():
            if not name.missing_in(megatron):
                _theirs[name] = name.of(megatron)
                name.replace(megatron, operator)
    try:
        megatron.enable_batch_invariant_mode()
    except ModuleNotFoundError as error:
        # Megatron (0.19.2) replaces PyTorch's operators first, then those of TransformerEngine,
        # which need not be installed.
        if (error.name or "").split(".")[0] != "transformer_engine":
            disable()
            raise


def disable() -> None:
    """Switch Megatron's mode off, and give it its own operators back."""
    megatron.disable_batch_invariant_mode()
    for name, theirs in _theirs.items():
        name.replace(megatron, theirs)
    _theirs.clear()


def require_sums() -> None:
    """Refuse a Megatron whose sums over tensor-parallel ranks cannot be replaced.

    Raises:
        ValueError: If it has not the functions that make them.
    """
    SUMS.require({_MAPPINGS: mappings})


def replace_sums(reduce: Callable, reduce_scatter: Callable) -> None:
    """Replace the sums over tensor-parallel ranks in Megatron's own layers.

    TransformerEngine's layers have their own.

    Raises:
        ValueError: If this release of Megatron has not the functions that make them.
    """
    require_sums()
    REDUCE.replace(mappings, reduce)
    REDUCE_SCATTER.replace(mappings, reduce_scatter)


def restore_sums() -> None:
    """Undo :func:`replace_sums`."""
    if not SUMS.missing({_MAPPINGS: mappings}):
        REDUCE.replace(mappings, megatron_reduce)
        REDUCE_SCATTER.replace(mappings, megatron_reduce_scatter)


def require_parts() -> None:
    """Check that :func:`replace_for_parts` finds all that it replaces.

    Raises:
        ValueError: If this release of Megatron has not all of the names.
    """
    TENSOR_PARALLEL_PARTS.require(_OWNERS)


def replace_for_parts(ours: Mapping[MegatronName, Callable[[Any], Any]]) -> None:
    """Replace what makes sums over tensor-parallel ranks, and products of what they sum.

    Args:
        ours: By name, what makes the replacement of Megatron's own.
    """
    for name, make in ours.items():
        if name not in _of_parts:
            _of_parts[name] = name.of(_OWNERS[name.owner])
            name.replace(_OWNERS[name.owner], make(_of_parts[name]))


def restore_for_parts() -> None:
    """Undo :func:`replace_for_parts`."""
    for name, theirs in _of_parts.items():
        name.replace(_OWNERS[name.owner], theirs)
    _of_parts.clear()
