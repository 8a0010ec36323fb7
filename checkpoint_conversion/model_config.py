"""The dimensions of a whole DeepSeek-style model, as Hugging Face's config.json gives them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What decides which tensors a model has, and their shapes.

    Attributes:
        model_type: ``"deepseek_v2"``, ``"deepseek_v3"`` or ``"kimi_k2"``.
        vocab_size: Rows of the embedding, without padding.
        ffn_hidden_size: Width of dense layers.
        q_lora_rank: None if the query is projected directly.
        moe_layers: Per decoder layer, whether it is a mixture of experts.
        num_experts: Routed experts of a MoE layer; 0 without MoE layers.
        moe_ffn_hidden_size: Width of one routed expert.
        num_shared_experts: Shared experts, ``moe_ffn_hidden_size`` wide each.
        router_bias: Whether MoE layers have an ``e_score_correction_bias``.
        mtp_layers: Multi-token-prediction layers that the checkpoint holds.
        tied_embeddings: Whether the output layer is the embedding.
        hugging_face: The whole config.json, as read or as it would be written.
    """

    model_type: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    moe_layers: tuple[bool, ...]
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    num_shared_experts: int = 0
    router_bias: bool = False
    mtp_layers: int = 0
    tied_embeddings: bool = False
    hugging_face: dict = field(default_factory=dict, compare=False)
