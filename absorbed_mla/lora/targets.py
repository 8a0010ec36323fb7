"""The layers of the attention that LoRA can train, under the names of both sides."""

from __future__ import annotations

# Megatron's name -> Hugging Face's. Two of ours are the rows of one kv_b_proj, head by head.
TARGETS = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_k_up_proj": "kv_b_proj",
    "linear_v_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
KV_B = "kv_b_proj"
# PEFT's word for every layer that it knows.
ALL_LINEAR = "all-linear"
FUSED_DOWN = "linear_qkv_down_proj"


def layers_named(target: str) -> tuple[str, ...]:
    """Our layers of one word of ``target_modules``; none if it names no layer of an attention."""
    if target == ALL_LINEAR:
        return tuple(TARGETS)
    return tuple(name for name, theirs in TARGETS.items() if target in (name, theirs))
