"""Names of the weights of an MLA transformer layer in every layout that Megatron writes.

Relative to the layer: in a model they follow ``decoder.layers.N.``. Pure data, shared with
``checkpoint_conversion``; which layout has which names is declared in ``layouts/``.
"""

ATTENTION = "self_attention."

# K and V up-projections: per head rows [K; V] of one weight, or two weights.
KV_UP = f"{ATTENTION}linear_kv_up_proj.weight"
K_UP = f"{ATTENTION}linear_k_up_proj.weight"
V_UP = f"{ATTENTION}linear_v_up_proj.weight"

# Down-projections of query and K/V: two weights, or rows [Q; KV] of one.
Q_DOWN = f"{ATTENTION}linear_q_down_proj.weight"
KV_DOWN = f"{ATTENTION}linear_kv_down_proj.weight"
QKV_DOWN = f"{ATTENTION}linear_qkv_down_proj.weight"

# Norms: modules of their own, or part of the linear layer that follows (TransformerEngine).
Q_NORM = f"{ATTENTION}q_layernorm.weight"
Q_NORM_FUSED = f"{ATTENTION}linear_q_up_proj.layer_norm_weight"
KV_NORM = f"{ATTENTION}kv_layernorm.weight"
KV_NORM_FUSED = f"{ATTENTION}linear_kv_up_proj.layer_norm_weight"
INPUT_NORM = "input_layernorm.weight"
INPUT_NORM_FUSED = f"{ATTENTION}linear_qkv_down_proj.layer_norm_weight"
MLP_NORM = "pre_mlp_layernorm.weight"
MLP_NORM_FUSED = "mlp.linear_fc1.layer_norm_weight"
DENSE_MLP_UP = "mlp.linear_fc1.weight"
# Norms of an attention, whose outputs an indexer reads; sparse attention keeps them as modules.
ATTENTION_NORMS = (INPUT_NORM, Q_NORM, KV_NORM)

# Ends the key of a linear layer's extra state, which is empty outside of FP8 training.
EXTRA_STATE = "._extra_state"
