"""Checkpoints of transformers' models in bfloat16, with widths that the GPU kernels have."""

from pathlib import Path

import torch

from tests.conversion.models import Architecture, make_model, save

WIDTHS = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 1024,
    "vocab_size": 131,
}
# What is smaller in tests on a CPU.
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
# Of the weights of tests.conversion.models: rounding to bf16 then moves log-probabilities by a
# fifth of what other experts do.
_SCALE = 0.5


def wide_folder(path: Path, architecture: Architecture, seed: int = 0, **changes) -> Path:
    """Write one; ``changes`` are fields of its config."""
    fields = {**WIDTHS, **changes}
    if not architecture.q_lora:
        fields["q_lora_rank"] = None
    model = make_model(architecture, seed, **fields)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith("norm.weight"):
                weight.mul_(_SCALE)
    return save(model.to(torch.bfloat16), path)
