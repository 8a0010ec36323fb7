"""Megatron's batch-invariant mode and its sums over ranks, with operators of this package.

Megatron (``megatron.core.transformer.custom_layers.batch_invariant_kernels``) knows which functions
of PyTorch and TransformerEngine to replace, and has a flag that others read. Both stay its own:
only the stand-ins that it installs are exchanged, by their names in its module. Its ``log_softmax``
and ``mean`` remain.

No other file of the mode touches a private name of Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.custom_layers import batch_invariant_kernels as megatron

from absorbed_mla.megatron_names import EVERY, REFUSED, SINCE_0_19, MegatronName, Need

_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"


def _operator(name: str, replaced_by: str, versions: tuple[str, ...] = EVERY) -> MegatronName:
    return MegatronName(_KERNELS, name, replaced_by, versions)


MM = _operator("mm_batch_invariant", "products.mm")
ADDMM = _operator("addmm_batch_invariant", "products.addmm")
TE_GEMM = _operator("_te_general_gemm_patched", "te_gemm.general_gemm")
TE_RMS_NORM = _operator("BatchInvariantRMSNormFn", "norms.TERMSNorm")
TE_NORMALIZATION = _operator(
    "_te_apply_normalization_patched", "norms.apply_normalization", SINCE_0_19
)
REDUCE = MegatronName(_MAPPINGS, "_reduce", "collectives.reduce_in_rank_order")
REDUCE_SCATTER = MegatronName(
    _MAPPINGS, "_reduce_scatter_along_first_dim", "collectives.reduce_scatter_in_rank_order"
)

SUMS = Need("batch-invariant mode", REFUSED, (REDUCE, REDUCE_SCATTER))
GPU_OPERATORS = Need(
    "batch-invariant mode on a GPU",
    "Megatron's stand-in stays, of one that it installs under another name",
    (MM, ADDMM, TE_GEMM, TE_RMS_NORM, TE_NORMALIZATION),
)
BATCH_INVARIANT_NEEDS = (SUMS, GPU_OPERATORS)

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
