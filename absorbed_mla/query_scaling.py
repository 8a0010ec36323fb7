"""Queries scaled by their position, beyond the context that a model was first trained on."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from absorbed_mla.caching import DerivedTables
from absorbed_mla.inference.step import InferenceStep
from absorbed_mla.once_differentiable import once_differentiable
from absorbed_mla.options import AbsorbedMLAOptions


@dataclass(frozen=True)
class QueryScaling:
    """Multiplies the query at position p by ``1 + beta * log(1 + floor(p / context))``.

    Llama 4's scaling of queries, which Mistral Small 4 and Mistral Large 3 have in MLA.

    Attributes:
        beta: ``llama_4_scaling_beta``.
        context: ``original_max_position_embeddings``, below which a query stays as it is.
    """

    beta: float
    context: int

    @classmethod
    def of(cls, options: AbsorbedMLAOptions, config: MLATransformerConfig) -> QueryScaling | None:
        """As options and config say; None if queries are not scaled.

        Raises:
            ValueError: If ``original_max_position_embeddings`` is no context.
        """
        if options.llama_4_scaling_beta is None:
            return None
        context = config.original_max_position_embeddings
        if not context >= 1:
            raise ValueError(
                "original_max_position_embeddings must be at least 1 with llama_4_scaling_beta, "
                f"got {context!r}"
            )
        return cls(float(options.llama_4_scaling_beta), int(context))

    def factors(
        self,
        max_position: int,
        positions: Tensor | slice | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """The factor of every token.

        Args:
            max_position: One more than the largest position.
            positions: Of the tokens, int64 [S] or a slice; None where token i has position i.
            device: Where they are needed.
            dtype: Of the queries.

        Returns:
            [S, 1, 1] in fp32 (fp64 for fp64 queries); None where all factors are 1.
        """
        if max_position <= self.context:
            return None
        dtype = torch.promote_types(dtype, torch.float32)
        # Rounded up to a power of two, so that few tables are made for many sequence lengths.
        size = 1 << (max_position - 1).bit_length()
        table = _tables_of(self).get(
            (size, device, dtype), lambda: self._table(size, device, dtype)
        )
        return table[:max_position] if positions is None else table[positions]

    def in_step(self, step: InferenceStep, query: Tensor) -> Tensor:
        """``query`` [T, 1, width] of a step over a cache, scaled in place without gradient.

        It has this rank's tokens where ranks divide them.
        """
        where = query.device, query.dtype

        def make() -> Tensor | None:
            found = self.factors(step.max_position, step.positions(), *where)
            if found is None or step.shares is None:
                return found
            return torch.cat([found[own] for own in step.shares.own])

        factors = step.tables.get((self, *where), make)
        return query if factors is None else query.mul_(factors)

    def _table(self, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        # Not an inference tensor: a table made during generation is used in training as well.
        with torch.inference_mode(False):
            times = torch.arange(size, dtype=torch.float64).div_(self.context).floor_()
            return (1 + self.beta * times.log1p()).view(-1, 1, 1).to(device, dtype)


@functools.lru_cache(maxsize=8)
def _tables_of(scaling: QueryScaling) -> DerivedTables:
    """The tables that all layers with this scaling share."""
    # A table of every size, so that none is dropped: a CUDA graph reads its own in every replay.
    return DerivedTables(maxsize=128)


# torch.compile cannot trace an in-place write that autograd learns of by ctx.mark_dirty.
@torch.compiler.disable
def scale_queries(query: Tensor, factors: Tensor) -> Tensor:
    """Multiply the queries of all heads by the factor of their token, in place.

    Args:
        query: [S, B, width]. It is overwritten, and backward overwrites the gradient of the result.
        factors: From :meth:`QueryScaling.factors`.

    Returns:
        ``query``; with gradients on, a scaled copy if ``query`` is a view.
    """
    if not torch.is_grad_enabled():
        return query.mul_(factors)
    return _Scaled.apply(query.clone() if query._is_view() else query, factors)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, factors: Tensor) -> Tensor:
        ctx.mark_dirty(query)
        ctx.save_for_backward(factors)
        return query.mul_(factors)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        # With create_graph=True the incoming gradient is part of a graph and must not change.
        grad = grad.clone() if grad.requires_grad else grad.contiguous()
        return grad.mul_(ctx.saved_tensors[0]), None
