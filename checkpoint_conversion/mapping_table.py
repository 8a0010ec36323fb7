"""The table: which tensor of a Hugging Face model is which of a Megatron model.

Hugging Face's names are DeepSeek-V3's; what another model type calls them is declared in
``models/``. Megatron's names are those of a whole model without parallelism: layers and experts numbered
through, norms in modules of their own, K and V up-projections combined. What a checkpoint may have
instead is declared in ``absorbed_mla/checkpoint/layouts``.

No row permutes anything but rotary channels that a model type has in halves (``mapping.py``).
Both sides keep the others in DeepSeek's interleaved order, and both keep the rows of each head of
``kv_b_proj`` together, first K, then V. Both rotate the first channels of an indexer's head, in
halves or as pairs as the model has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.lazy_tensor import LazyTensor, concat, same_values
from checkpoint_conversion.model import ModelConfig


@dataclass(frozen=True)
class Rule:
    """How the tensor-parallel ranks share a tensor: copies, or equal parts along a dim.

    Attributes:
        dim: The dim that is split; None if every rank holds a copy.
        stacked: Relative sizes of the weights that are stacked along ``dim``. Each of them is split
            over the ranks on its own: a rank has its part of the first, then of the next.
    """

    dim: int | None = None
    stacked: tuple[int, ...] = (1,)

    def merge(self, tensors: Sequence[LazyTensor]) -> LazyTensor:
        """The whole tensor of all ranks' shares of one shape, in rank order.

        Copies are compared bit by bit when the result is loaded.

        Raises:
            CheckpointError: If the shares cannot be divided into the stacked weights.
        """
        if self.dim is None:
            return same_values(
                tensors, "differs between tensor-parallel ranks, which must hold copies"
            )
        width, whole = tensors[0].shape[self.dim], sum(self.stacked)
        if any(width * part % whole for part in self.stacked):
            raise CheckpointError(f"has {width} rows, which cannot be divided as {self.stacked}")
        sizes = [width * part // whole for part in self.stacked]
        shares = zip(*(tensor.split(sizes, self.dim) for tensor in tensors))
        return concat([concat(parts, self.dim) for parts in shares], self.dim)


REPLICATED = Rule()
ROWS = Rule(0)
COLUMNS = Rule(1)
# Rows are [gate; up].
GATED_ROWS = Rule(0, (1, 1))


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        hugging_face: Names after the prefix; ``{expert}`` stands for every routed expert, ``[a|b]``
            for two tensors, of which Megatron has one, the rows of the first above the second's.
        megatron: Name after the prefix.
        split: How tensor-parallel ranks share Megatron's tensor.
        shape: Shape of each Hugging Face tensor, in the words of :func:`widths`.
        only: Only layers that have this have the tensor, in the words of :func:`parts_of`.
        fp8: Whether DeepSeek's FP8 checkpoints have it in FP8: linear layers of attention and MLPs,
            but neither a router nor the weights of an indexer's heads.
        float32: Whether transformers keeps it in float32, because a rounded one selects others:
            the routing's correction bias (experts), the weights of the indexer's heads (keys).
    """

    hugging_face: str
    megatron: str
    split: Rule
    shape: str
    only: str = "all"
    fp8: bool = False
    float32: bool = False


# fmt: off
#   Hugging Face                          Megatron                                    TP          shape
MODEL = (
Row("model.embed_tokens.weight",          "embedding.word_embeddings.weight",         ROWS,       "vocab hidden"),
Row("model.norm.weight",                  "decoder.final_layernorm.weight",           REPLICATED, "hidden"),
Row("lm_head.weight",                     "output_layer.weight",                      ROWS,       "vocab hidden", "head"),
)
# After the beginning of a layer: model.layers.N., decoder.layers.N.
LAYER = (
Row("input_layernorm.weight",             "input_layernorm.weight",                   REPLICATED, "hidden"),
Row("self_attn.q_proj.weight",            "self_attention.linear_q_proj.weight",      ROWS,       "heads*qk hidden", "q", fp8=True),
Row("self_attn.q_a_proj.weight",          "self_attention.linear_q_down_proj.weight", REPLICATED, "q_rank hidden", "q_lora", fp8=True),
Row("self_attn.q_a_layernorm.weight",     "self_attention.q_layernorm.weight",        REPLICATED, "q_rank", "q_lora"),
Row("self_attn.q_b_proj.weight",          "self_attention.linear_q_up_proj.weight",   ROWS,       "heads*qk q_rank", "q_lora", fp8=True),
Row("self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight", REPLICATED, "kv_rank+rope hidden", fp8=True),
Row("self_attn.kv_a_layernorm.weight",    "self_attention.kv_layernorm.weight",       REPLICATED, "kv_rank"),
Row("self_attn.kv_b_proj.weight",         "self_attention.linear_kv_up_proj.weight",  ROWS,       "heads*kv kv_rank", fp8=True),
Row("self_attn.o_proj.weight",            "self_attention.linear_proj.weight",        COLUMNS,    "hidden heads*v", fp8=True),
Row("self_attn.indexer.wq_b.weight",      "self_attention.core_attention.indexer.linear_wq_b.weight", REPLICATED, "index_heads*width q_rank", "indexer", fp8=True),
Row("self_attn.indexer.wk.weight",        "self_attention.core_attention.indexer.linear_wk.weight", REPLICATED, "index_width hidden", "indexer", fp8=True),
Row("self_attn.indexer.k_norm.weight",    "self_attention.core_attention.indexer.k_norm.weight", REPLICATED, "index_width", "indexer"),
Row("self_attn.indexer.k_norm.bias",      "self_attention.core_attention.indexer.k_norm.bias", REPLICATED, "index_width", "indexer"),
Row("self_attn.indexer.weights_proj.weight", "self_attention.core_attention.indexer.linear_weights_proj.weight", REPLICATED, "index_heads hidden", "indexer", float32=True),
Row("post_attention_layernorm.weight",    "pre_mlp_layernorm.weight",                 REPLICATED, "hidden"),
Row("mlp.[gate|up]_proj.weight",          "mlp.linear_fc1.weight",                    GATED_ROWS, "ffn hidden", "dense", fp8=True),
Row("mlp.down_proj.weight",               "mlp.linear_fc2.weight",                    COLUMNS,    "hidden ffn", "dense", fp8=True),
Row("mlp.gate.weight",                    "mlp.router.weight",                        REPLICATED, "experts hidden", "moe"),
Row("mlp.gate.e_score_correction_bias",   "mlp.router.expert_bias",                   REPLICATED, "experts", "router_bias", float32=True),
Row("mlp.shared_experts.[gate|up]_proj.weight", "mlp.shared_experts.linear_fc1.weight", GATED_ROWS, "shared_ffn hidden", "shared_experts", fp8=True),
Row("mlp.shared_experts.down_proj.weight", "mlp.shared_experts.linear_fc2.weight",    COLUMNS,    "hidden shared_ffn", "shared_experts", fp8=True),
Row("mlp.experts.{expert}.[gate|up]_proj.weight", "mlp.experts.local_experts.{expert}.linear_fc1.weight", GATED_ROWS, "moe_ffn hidden", "moe", fp8=True),
Row("mlp.experts.{expert}.down_proj.weight", "mlp.experts.local_experts.{expert}.linear_fc2.weight", COLUMNS,    "hidden moe_ffn", "moe", fp8=True),
Row("post_mlp_layernorm.weight",          "mlp.post_mlp_layernorm.weight",            REPLICATED, "hidden", "post_norm"),
)
# Likewise model.layers.<layers+I>., mtp.layers.I., and the rows of LAYER under transformer_layer.
MTP = (
Row("enorm.weight",                       "enorm.weight",                             REPLICATED, "hidden"),
Row("hnorm.weight",                       "hnorm.weight",                             REPLICATED, "hidden"),
Row("eh_proj.weight",                     "eh_proj.weight",                           ROWS,       "hidden 2*hidden"),
Row("shared_head.norm.weight",            "final_layernorm.weight",                   REPLICATED, "hidden"),
)
# What Hugging Face stores once more with every MTP layer, and Megatron shares.
MTP_DUPLICATES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}
# fmt: on
# Ends Megatron's name of the weights of an indexer's heads.
HEAD_WEIGHTS = "indexer.linear_weights_proj.weight"


def parts_of(config: ModelConfig, *, moe: bool = False, indexer: bool = False) -> dict[str, bool]:
    """Whether a layer of a model has what the table calls so in ``only``.

    Args:
        config: The model.
        moe: Whether the layer's MLP is a mixture of experts.
        indexer: Whether its attention has an indexer of its own.
    """
    return {
        "all": True,
        "head": not config.tied_embeddings,
        "q": config.q_lora_rank is None,
        "q_lora": config.q_lora_rank is not None,
        "indexer": indexer,
        "dense": not moe,
        "moe": moe,
        "router_bias": moe and config.router_bias,
        "post_norm": moe and config.model.post_mlp_layernorm,
        "shared_experts": moe and config.num_shared_experts > 0,
    }


def widths(config: ModelConfig) -> dict[str, int]:
    """Value of each word that the table uses in shapes."""
    heads, rope = config.num_attention_heads, config.qk_rope_head_dim
    nope, v = config.qk_nope_head_dim, config.v_head_dim
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "2*hidden": 2 * config.hidden_size,
        "ffn": config.ffn_hidden_size,
        "moe_ffn": config.moe_ffn_hidden_size,
        "shared_ffn": config.moe_ffn_hidden_size * config.num_shared_experts,
        "experts": config.num_experts,
        "q_rank": config.q_lora_rank or 0,
        "kv_rank": config.kv_lora_rank,
        "kv_rank+rope": config.kv_lora_rank + rope,
        "heads*qk": heads * (nope + rope),
        "heads*kv": heads * (nope + v),
        "heads*v": heads * v,
        **_indexer_widths(config),
    }


def _indexer_widths(config: ModelConfig) -> dict[str, int]:
    indexer = config.indexer
    heads, width = (indexer.heads, indexer.width) if indexer else (0, 0)
    return {"index_heads": heads, "index_width": width, "index_heads*width": heads * width}
