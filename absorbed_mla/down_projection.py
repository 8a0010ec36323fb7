"""Hidden states to the compressed query and to [latent | k_rope], by two layers or by one.

One layer (``mla_down_proj_fusion``) has the query's rows first, then those of K and V. Split over
tensor-parallel ranks, each rank has its part of both, as in Megatron's ``FusedMLASelfAttention``.
The layers are children of the attention, under the names that Megatron gives them.
"""

from __future__ import annotations

from typing import Any, Protocol

from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from absorbed_mla.dims import MLADims
from absorbed_mla.projections import ProjectionBuilder
from absorbed_mla.tensor_parallel import leave_column_parallel

_Q, _KV, _QKV = "linear_q_down_proj", "linear_kv_down_proj", "linear_qkv_down_proj"


class DownProjection(Protocol):
    """How an attention's hidden states are projected down.

    Attributes:
        names: Of the layers.
        layout: Value of the checkpoint layouts' option ``down`` that the layers are in.
    """

    names: tuple[str, ...]
    layout: str

    def build(self, name: str, build: ProjectionBuilder) -> nn.Module:
        """A layer of ``names``."""

    def __call__(
        self, attention: Any, hidden_states: Tensor, tp_group: Any, sequence_parallel: bool
    ) -> tuple[Tensor, Tensor]:
        """Project.

        Args:
            attention: That has the layers.
            hidden_states: [S or S/tp, B, hidden_size].
            tp_group: Tensor-parallel group.
            sequence_parallel: Whether this rank has its own tokens only.

        Returns:
            The compressed query [S or S/tp, B, q_lora_rank], or the hidden states if the query is
            not compressed, and [latent | k_rope] [S or S/tp, B, C + R]. They may be views of one
            tensor.
        """


class SeparateDown:
    """A layer each; only that of K and V if ``q_lora_rank`` is None."""

    layout = "separate"

    def __init__(self, dims: MLADims) -> None:
        self._widths = {_KV: dims.kv_down_dim}
        if dims.q_lora_rank is not None:
            self._widths = {_Q: dims.q_lora_rank, **self._widths}
        self.names = tuple(self._widths)

    def build(self, name, build):
        """See ``DownProjection``."""
        return build.down_projection(name, (self._widths[name],))

    def __call__(self, attention, hidden_states, tp_group, sequence_parallel):
        """See ``DownProjection``."""
        found = {_Q: hidden_states}
        for name, width in self._widths.items():
            out, _ = getattr(attention, name)(hidden_states)
            found[name] = leave_column_parallel(out, width, tp_group, sequence_parallel)
        return found[_Q], found[_KV]


class FusedDown:
    """Both in one layer.

    Raises:
        ValueError: If ``q_lora_rank`` is None.
    """

    layout = "fused"
    names = (_QKV,)

    def __init__(self, dims: MLADims) -> None:
        if dims.q_lora_rank is None:
            raise ValueError(
                "mla_down_proj_fusion=True needs a q_lora_rank, got None: the query has no "
                "down-projection; set mla_down_proj_fusion=False"
            )
        self._widths = dims.q_lora_rank, dims.kv_down_dim

    def build(self, name, build):
        """See ``DownProjection``."""
        return build.down_projection(name, self._widths)

    def __call__(self, attention, hidden_states, tp_group, sequence_parallel):
        """See ``DownProjection``."""
        out, _ = attention.linear_qkv_down_proj(hidden_states)
        width = sum(self._widths)
        shards = width // out.shape[-1]
        out = leave_column_parallel(out, width, tp_group, sequence_parallel)
        if shards == 1:
            return out.split(self._widths, dim=-1)
        # Every rank's part of the query, then its part of K and V.
        parts = out.unflatten(-1, (shards, -1)).split([w // shards for w in self._widths], dim=-1)
        return tuple(part.flatten(-2) for part in parts)


def down_projection_of(config: MLATransformerConfig, dims: MLADims) -> DownProjection:
    """What ``mla_down_proj_fusion`` asks for.

    Raises:
        ValueError: If it is on for a query that has no down-projection.
    """
    # Absent from older releases of Megatron.
    return FusedDown(dims) if getattr(config, "mla_down_proj_fusion", False) else SeparateDown(dims)
