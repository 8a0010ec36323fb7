"""Attention over the latent: the module, its forms, and the backends that compute it."""

from absorbed_mla.core_attention.backend import AttentionBackend, select_backend
from absorbed_mla.core_attention.latent_attention import LatentCoreAttention
from absorbed_mla.core_attention.reference import reference_attention
from absorbed_mla.core_attention.scores import ScoreRules

__all__ = [
    "AttentionBackend",
    "LatentCoreAttention",
    "ScoreRules",
    "reference_attention",
    "select_backend",
]
