"""The dimensions of one MLA layer, and the letters for tensor shapes in this package.

Shape letters in docstrings and comments; one letter has one meaning everywhere:

    S  tokens along the sequence axis (one sequence, or all tokens of a pack)
    B  batch (1 for packed sequences)
    N  attention heads on this tensor-parallel rank
    D  width of one head: ``nope`` (qk_nope_head_dim), ``v`` (v_head_dim), or nope + R
    C  kv_lora_rank, the width of the latent
    R  qk_rope_head_dim, the width of the rotary part
    V  width of what attention returns for a head: C (absorbed form) or v (expanded form)
    T  new tokens of all requests on one axis (inference)
    Q, K  query and key tokens of a chunk or tile

``S_q`` and ``S_k`` are the S of queries and of keys where they differ.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from megatron.core.transformer.transformer_config import MLATransformerConfig


@dataclass(frozen=True, kw_only=True)
class MLADims:
    """Dimensions of a multi-head latent attention layer (arXiv:2405.04434, section 2.1).

    Attributes:
        hidden_size: Width of the hidden states.
        num_heads: Attention heads of the whole layer.
        num_heads_per_rank: Attention heads on one tensor-parallel rank.
        q_lora_rank: Width of the compressed query, or None if the query is projected directly.
        kv_lora_rank: Width of the latent that keys and values are expanded from.
        qk_nope_head_dim: Per-head width of the part of query and key without position.
        qk_rope_head_dim: Width of the rotary part; 0 for models without RoPE.
        v_head_dim: Per-head width of the value.
    """

    hidden_size: int
    num_heads: int
    num_heads_per_rank: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def from_config(cls, config: MLATransformerConfig, tp_size: int) -> MLADims:
        """Read the dimensions from Megatron's config.

        Raises:
            ValueError: If a dimension is not positive, the rotary width is odd, or the heads do
                not divide by ``tp_size``.
        """
        for name in (
            "hidden_size",
            "num_attention_heads",
            "kv_lora_rank",
            "qk_head_dim",
            "v_head_dim",
        ):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
        if config.q_lora_rank is not None and config.q_lora_rank < 1:
            raise ValueError(f"q_lora_rank must be None or at least 1, got {config.q_lora_rank}")
        if config.qk_pos_emb_head_dim < 0 or config.qk_pos_emb_head_dim % 2:
            raise ValueError(
                "qk_pos_emb_head_dim must be even (RoPE rotates pairs) and not negative, "
                f"got {config.qk_pos_emb_head_dim}"
            )
        if config.num_attention_heads % tp_size:
            raise ValueError(
                f"num_attention_heads={config.num_attention_heads} must be divisible by "
                f"tensor_model_parallel_size={tp_size}"
            )
        return cls(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_heads_per_rank=config.num_attention_heads // tp_size,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_head_dim,
            qk_rope_head_dim=config.qk_pos_emb_head_dim,
            v_head_dim=config.v_head_dim,
        )

    @functools.cached_property
    def qk_head_dim(self) -> int:
        """Per-head width of the unabsorbed query and key, nope and rope together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @functools.cached_property
    def kv_down_dim(self) -> int:
        """Output width of the KV down-projection: latent and rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def yarn_mscale(scaling_factor: float, mscale: float) -> float:
    """YaRN's attention temperature (arXiv:2309.00071, eq. 22) with DeepSeek's ``mscale``."""
    if scaling_factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(scaling_factor) + 1.0


def softmax_scale(config: MLATransformerConfig, dims: MLADims) -> float:
    """Scale of the scores: ``mscale_all_dim``'s temperature squared over sqrt(nope + rope).

    The head dim is the unabsorbed one in both forms: absorbing changes how a score is computed, not
    the score. As in Megatron's MLA, the temperature applies for every ``rope_type``.
    """
    mscale = yarn_mscale(config.rotary_scaling_factor, config.mscale_all_dim)
    return mscale * mscale / math.sqrt(dims.qk_head_dim)
