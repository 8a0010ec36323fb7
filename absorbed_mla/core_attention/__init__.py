"""Attention over the latent: the module, its forms, and the backends that compute it."""

from absorbed_mla.core_attention.backend import (
    AttentionBackend,
    AttentionRequest,
    ReferenceBackend,
    examine,
)
from absorbed_mla.core_attention.keys import KeyBlock, KeySource, LocalKeys
from absorbed_mla.core_attention.latent_attention import (
    CAUSAL_MASKS,
    AttentionPlan,
    LatentCoreAttention,
)
from absorbed_mla.core_attention.operands import Attended, AttendedGradient, Operands
from absorbed_mla.core_attention.scores import ScoreRules
from absorbed_mla.core_attention.spans import Span

__all__ = [
    "CAUSAL_MASKS",
    "Attended",
    "AttendedGradient",
    "AttentionBackend",
    "AttentionPlan",
    "AttentionRequest",
    "KeyBlock",
    "KeySource",
    "LatentCoreAttention",
    "LocalKeys",
    "Operands",
    "ReferenceBackend",
    "ScoreRules",
    "Span",
    "examine",
]
