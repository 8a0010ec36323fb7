"""Which models there are: their config.json, and the name and shape of every tensor.

Written down from the released checkpoints, apart from ``checkpoint_conversion``'s own table, so
that each can be checked against the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FP8_BLOCK = 128

# fmt: off
COMMON: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1, "first_k_dense_replace": 1,
    "hidden_act": "silu", "initializer_range": 0.02, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_layer_freq": 1, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "tie_word_embeddings": False, "use_cache": True, "v_head_dim": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "transformers_version": "4.33.1", **COMMON,
        "bos_token_id": 0, "eos_token_id": 1, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
        "topk_method": "noaux_tc", "vocab_size": 129280,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "transformers_version": "4.33.1", **COMMON,
        "bos_token_id": 100000, "eos_token_id": 100001, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "q_lora_rank": None,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
        "topk_method": "greedy", "vocab_size": 102400,
    },
}
SCALED = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
    "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank",
)
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the user chose."""

    model: str  # a key of :data:`MODELS`
    layers: int  # decoder layers, MTP layers not among them
    experts: int  # routed experts of each MoE layer
    dense_layers: int = 1  # how many of the first layers are dense
    mtp: bool = False  # whether there is a multi-token-prediction layer
    fp8: bool = False  # whether linear weights are block-scaled FP8
    vocab_size: int | None = None  # none: the model's own
    scale_down: int = 1  # every width (not those of a head) is divided by this


@dataclass(frozen=True)
class Stored:
    """One tensor of the files."""

    name: str
    shape: tuple[int, ...]
    role: str  # what values are like: "weight", "norm", "bias", "fp8" or "scale"
    copy_of: str | None = None  # the tensor whose values it repeats


def model_config(choice: Choice) -> dict:
    """The config.json.

    Raises:
        ValueError: If the choice makes no model, naming the option.
    """
    config = {**MODELS[choice.model], "torch_dtype": "bfloat16"}
    _check(choice, config)
    for key in SCALED:
        if config[key] is not None:
            config[key] //= choice.scale_down
    config["vocab_size"] = choice.vocab_size or config["vocab_size"]
    config["num_hidden_layers"] = choice.layers
    config["first_k_dense_replace"] = choice.dense_layers
    config["n_routed_experts"] = choice.experts
    config["num_nextn_predict_layers"] = int(choice.mtp)
    # The router scores a group by its two best experts.
    divisors = [d for d in (8, 4, 2, 1) if choice.experts % d == 0 and choice.experts // d >= 2]
    config["n_group"] = min(config["n_group"], divisors[0])
    config["topk_group"] = min(config["topk_group"], config["n_group"])
    reachable = config["topk_group"] * choice.experts // config["n_group"]
    config["num_experts_per_tok"] = min(config["num_experts_per_tok"], reachable)
    if choice.fp8:
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    return config


def _check(choice: Choice, config: dict) -> None:
    for option, value, least in (
        ("--layers", choice.layers, 1),
        ("--experts", choice.experts, 2),
        ("--dense-layers", choice.dense_layers, 0),
        ("--vocab-size", 1 if choice.vocab_size is None else choice.vocab_size, 1),
        ("--scale-down", choice.scale_down, 1),
    ):
        if value < least:
            raise ValueError(f"{option} must be at least {least}, got {value}")
    if choice.dense_layers > choice.layers:
        raise ValueError(
            f"--dense-layers must be at most --layers {choice.layers}, got {choice.dense_layers}"
        )
    if choice.mtp and choice.dense_layers == choice.layers:
        raise ValueError("--mtp needs a MoE layer: --dense-layers must be less than --layers")
    odd = [k for k in SCALED if config[k] is not None and config[k] % choice.scale_down]
    if odd:
        sizes = ", ".join(f"{key} {config[key]}" for key in odd)
        raise ValueError(f"--scale-down {choice.scale_down} does not divide {sizes}")


def stored_tensors(config: dict) -> Iterator[Stored]:
    """Every tensor of the files, in the order of the model."""
    for tensor in _tensors(config):
        if tensor.role == "linear" and "quantization_config" in config:
            blocks = tuple(-(-width // FP8_BLOCK) for width in tensor.shape)
            yield Stored(tensor.name, tensor.shape, "fp8")
            yield Stored(f"{tensor.name}_scale_inv", blocks, "scale")
        else:
            role = "weight" if tensor.role == "linear" else tensor.role
            yield Stored(tensor.name, tensor.shape, role, tensor.copy_of)


def _tensors(config: dict) -> Iterator[Stored]:
    """Without quantisation; the role of what can be quantised is ``"linear"``."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield Stored("model.embed_tokens.weight", (vocab, hidden), "weight")
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        yield from _layer(config, f"model.layers.{layer}.", layer)
    yield Stored("model.norm.weight", (hidden,), "norm")
    yield Stored("lm_head.weight", (vocab, hidden), "weight")
    for layer in range(layers, layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}."
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        yield Stored(f"{prefix}embed_tokens.weight", (vocab, hidden), "weight", embedding)
        yield Stored(f"{prefix}enorm.weight", (hidden,), "norm")
        yield Stored(f"{prefix}hnorm.weight", (hidden,), "norm")
        # Not quantised in the released checkpoints.
        yield Stored(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), "weight")
        yield from _layer(config, prefix, layer)
        yield Stored(f"{prefix}shared_head.norm.weight", (hidden,), "norm")
        yield Stored(f"{prefix}shared_head.head.weight", (vocab, hidden), "weight", head)


def _layer(config: dict, prefix: str, layer: int) -> Iterator[Stored]:
    hidden = config["hidden_size"]
    yield Stored(f"{prefix}input_layernorm.weight", (hidden,), "norm")
    yield from _attention(config, f"{prefix}self_attn.")
    yield Stored(f"{prefix}post_attention_layernorm.weight", (hidden,), "norm")
    mlp = f"{prefix}mlp."
    if layer < config["first_k_dense_replace"]:
        yield from _mlp(mlp, hidden, config["intermediate_size"])
        return
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    yield Stored(f"{mlp}gate.weight", (experts, hidden), "weight")
    if config["topk_method"] == "noaux_tc":
        yield Stored(f"{mlp}gate.e_score_correction_bias", (experts,), "bias")
    for expert in range(experts):
        yield from _mlp(f"{mlp}experts.{expert}.", hidden, width)
    yield from _mlp(f"{mlp}shared_experts.", hidden, width * config["n_shared_experts"])


def _attention(config: dict, prefix: str) -> Iterator[Stored]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    rope, v = config["qk_rope_head_dim"], config["v_head_dim"]
    queries = heads * (config["qk_nope_head_dim"] + rope)
    if q_rank is None:
        yield Stored(f"{prefix}q_proj.weight", (queries, hidden), "linear")
    else:
        yield Stored(f"{prefix}q_a_proj.weight", (q_rank, hidden), "linear")
        yield Stored(f"{prefix}q_a_layernorm.weight", (q_rank,), "norm")
        yield Stored(f"{prefix}q_b_proj.weight", (queries, q_rank), "linear")
    yield Stored(f"{prefix}kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), "linear")
    yield Stored(f"{prefix}kv_a_layernorm.weight", (kv_rank,), "norm")
    up = heads * (config["qk_nope_head_dim"] + v)
    yield Stored(f"{prefix}kv_b_proj.weight", (up, kv_rank), "linear")
    yield Stored(f"{prefix}o_proj.weight", (hidden, heads * v), "linear")


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[Stored]:
    yield Stored(f"{prefix}gate_proj.weight", (width, hidden), "linear")
    yield Stored(f"{prefix}up_proj.weight", (width, hidden), "linear")
    yield Stored(f"{prefix}down_proj.weight", (hidden, width), "linear")
