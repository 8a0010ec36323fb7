"""The settings of sparse attention, read from Megatron's config and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.transformer.transformer_config import MLATransformerConfig

_COUNTS = {"n_heads": 1, "head_dim": 1, "topk": 1, "topk_freq": 1, "skip_topk_offset": 0}
_FLAGS = ("use_sparse_loss", "rope_interleaved", "rotate_activation", "scoring_relu")


@dataclass(frozen=True, kw_only=True)
class DSAConfig:
    """What an indexer computes, and how it learns.

    Attributes:
        num_heads: Heads of the indexer, Hi.
        head_dim: Width of each, Di; its first ``qk_pos_emb_head_dim`` channels are rotated.
        topk: Keys that a query attends to, at most.
        rope_interleaved: Whether the rotated channels are pairs (0, 1), (2, 3), ... (GLM-5), or
            channel i goes with channel i + R / 2 (DeepSeek-V3.2).
        rotate_activation: Whether index queries and keys are multiplied by the orthogonal Hadamard
            matrix, which leaves their products as they are and spreads outliers before FP8.
        scoring_relu: Whether the products of index queries and keys pass a ReLU.
        k_norm_eps: Epsilon of the index keys' LayerNorm.
        loss_coefficient: Multiplies the indexer's loss; 0 for none.
        sparse_loss: Whether the loss compares distributions over the chosen keys alone (the sparse
            stage), or over all visible keys (the warm-up).
        per_token_loss: Whether the loss is the sum over queries, or their mean.
        topk_freq: Every ``topk_freq``-th layer has an indexer, those between share its selection.
        skip_topk_offset: The last layer before the counting begins; all up to it have one.
    """

    num_heads: int
    head_dim: int
    topk: int
    rope_interleaved: bool
    rotate_activation: bool
    scoring_relu: bool
    k_norm_eps: float
    loss_coefficient: float
    sparse_loss: bool
    per_token_loss: bool
    topk_freq: int
    skip_topk_offset: int

    @classmethod
    def from_config(cls, config: MLATransformerConfig) -> DSAConfig:
        """Read the ``dsa_indexer_*`` fields of Megatron's config.

        Raises:
            ValueError: Naming the field, what it is and what is accepted.
        """
        counts = {name: _count(config, name, least) for name, least in _COUNTS.items()}
        flags = {name: _flag(config, name) for name in _FLAGS}
        head_dim, rope = counts["head_dim"], config.qk_pos_emb_head_dim
        if head_dim < rope:
            raise ValueError(
                f"dsa_indexer_head_dim must be at least qk_pos_emb_head_dim={rope}, whose channels "
                f"are rotated; got {head_dim}"
            )
        if flags["rotate_activation"] and head_dim & (head_dim - 1):
            raise ValueError(
                "dsa_indexer_rotate_activation=True needs a dsa_indexer_head_dim that is a power "
                f"of two, got {head_dim}"
            )
        return cls(
            num_heads=counts["n_heads"],
            head_dim=head_dim,
            topk=counts["topk"],
            rope_interleaved=flags["rope_interleaved"],
            rotate_activation=flags["rotate_activation"],
            scoring_relu=flags["scoring_relu"],
            k_norm_eps=_k_norm_eps(config),
            loss_coefficient=_loss_coefficient(config),
            sparse_loss=flags["use_sparse_loss"],
            per_token_loss=bool(config.calculate_per_token_loss),
            topk_freq=counts["topk_freq"],
            skip_topk_offset=counts["skip_topk_offset"],
        )

    def source_layer(self, layer_number: int) -> int:
        """The layer, counted from 1, whose indexer selects for ``layer_number``; often itself."""
        first = max(self.skip_topk_offset, 1)
        return layer_number - max(layer_number - first, 0) % self.topk_freq

    def shares_selection(self, layer_number: int) -> bool:
        """Whether a layer has no indexer and takes the selection of an earlier one."""
        return self.source_layer(layer_number) != layer_number

    def indexed_layers(self, num_layers: int) -> tuple[int, ...]:
        """Numbers of the layers, of ``num_layers`` counted from 1, that have an indexer."""
        return tuple(n for n in range(1, num_layers + 1) if not self.shares_selection(n))


def _count(config: MLATransformerConfig, name: str, least: int) -> int:
    value = getattr(config, f"dsa_indexer_{name}")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"dsa_indexer_{name} must be an integer of at least {least} for "
            f"experimental_attention_variant='dsa', got {value!r}"
        )
    return value


def _flag(config: MLATransformerConfig, name: str) -> bool:
    value = getattr(config, f"dsa_indexer_{name}")
    if not isinstance(value, bool):
        raise ValueError(f"dsa_indexer_{name} must be True or False, got {value!r}")
    return value


def _k_norm_eps(config: MLATransformerConfig) -> float:
    value = config.dsa_indexer_k_norm_epsilon
    if value is None:
        return config.layernorm_epsilon
    if not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(
            "dsa_indexer_k_norm_epsilon must be None (layernorm_epsilon) or between 0 and 1, "
            f"got {value!r}"
        )
    return float(value)


def _loss_coefficient(config: MLATransformerConfig) -> float:
    value = config.dsa_indexer_loss_coeff
    if value is None:
        return 0.0
    if not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"dsa_indexer_loss_coeff must be None or a number of at least 0, got {value!r}"
        )
    return float(value)
