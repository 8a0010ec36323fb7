"""Sequences cut over ranks, which exchange latents instead of every head's keys and values."""

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.context_parallel.strategy import CP_COMM_TYPES, ContextParallel

__all__ = ["CP_COMM_TYPES", "ContextParallel", "ContextParallelLayout"]
