"""Megatron's batch-invariant mode with this package's products and norms.

Megatron (``megatron.core.transformer.custom_layers.batch_invariant_kernels``) knows which functions
of PyTorch and TransformerEngine to replace, and has a flag that others read. Both stay its own:
only the stand-ins that it installs are exchanged, by their names in its module. Its ``log_softmax``
and ``mean`` remain.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.custom_layers import batch_invariant_kernels as megatron

from absorbed_mla.batch_invariant import norms, products, te_gemm

_OURS = {
    "mm_batch_invariant": products.mm,
    "addmm_batch_invariant": products.addmm,
    "_te_general_gemm_patched": te_gemm.general_gemm,
    "BatchInvariantRMSNormFn": norms.HostRMSNorm,
    "_te_apply_normalization_patched": norms.apply_normalization,
}
# Megatron's own, while ours have their names; older versions lack some.
_theirs: dict[str, Any] = {}


def enable() -> None:
    """Switch Megatron's mode on, with our operators also where it was on already."""
    if not _theirs:
        # What it has installed is replaced by switching it off and on again.
        megatron.disable_batch_invariant_mode()
        for name, ours in _OURS.items():
            if hasattr(megatron, name):
                _theirs[name] = getattr(megatron, name)
                setattr(megatron, name, ours)
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
        setattr(megatron, name, theirs)
    _theirs.clear()
