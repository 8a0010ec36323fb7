"""Tiny models of transformers' own, saved by it: the outside reference for what a model computes.

Their weights are wide enough that attention is far from uniform and experts differ: a permuted
RoPE, a wrong softmax scale or a swapped gate changes the logits by percents.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.model import ModelConfig

ORIGINAL_CONTEXT = 32
# Three times as long as the context that YaRN extends.
BEYOND = 96
VOCABULARY = 128
_BATCH = 2


# fmt: off
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 20, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "max_position_embeddings": 4 * ORIGINAL_CONTEXT,
}
_VISION = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
    "patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4, "image_size": 8, "head_dim": 16,
}
# fmt: on
# Transformers' names of the classes.
FAMILIES = {
    "v2": "DeepseekV2",
    "v3": "DeepseekV3",
    "glm": "Glm4MoeLite",
    "mistral4": "Mistral4",
    "v32": "DeepseekV32",
    "glm5": "GlmMoeDsa",
    "sarvam_mla": "SarvamMLA",
    "youtu": "Youtu",
    "minicpm3": "MiniCPM3",
    "axk1": "AXK1",
}
# Models whose class has another name.
_CLASSES = {"SarvamMLA": "DeepseekV3"}
_OF_EXPERTS = ("moe_intermediate_size", "n_routed_experts", "n_shared_experts")
_OF_EXPERTS += ("num_experts_per_tok", "first_k_dense_replace")
# Far fewer keys than the tests' tokens. With many heads, hardly a key is cut off by the ReLU of all
# of them; keys that are, have equal scores, of which anything may choose any.
_INDEXER = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 24}


@dataclass(frozen=True)
class Architecture:
    """One kind of model.

    Attributes:
        family: One of ``FAMILIES``, or ``"kimi_k25"``.
        q_lora: Whether the query is compressed.
        moe: Whether all layers but the first are mixtures of experts.
        rope: ``"rope"``, ``"yarn"`` or ``"longrope"``.
    """

    family: str
    q_lora: bool
    moe: bool
    rope: str

    @property
    def name(self) -> str:
        """For test ids and tables."""
        query = "q_lora" if self.q_lora else "no q_lora"
        return f"{self.family} {query} {'moe' if self.moe else 'dense'} {self.rope}"


ARCHITECTURES = [
    Architecture(*choices)
    for choices in itertools.product(("v2", "v3"), (True, False), (False, True), ("rope", "yarn"))
]


SPARSE = {
    "v32": Architecture("v32", q_lora=True, moe=True, rope="yarn"),
    "v32-dense": Architecture("v32", q_lora=True, moe=False, rope="rope"),
    "glm5": Architecture("glm5", q_lora=True, moe=True, rope="rope"),
    "glm5-dense": Architecture("glm5", q_lora=True, moe=False, rope="yarn"),
}
KIMI_K25 = Architecture("kimi_k25", q_lora=True, moe=True, rope="yarn")
MISTRAL3 = Architecture("mistral3", q_lora=True, moe=True, rope="yarn")
# Models of other names whose attention is plain MLA.
OTHERS = {
    "glm4_moe_lite": Architecture("glm", q_lora=True, moe=True, rope="rope"),
    "glm4_moe_lite-dense-yarn": Architecture("glm", q_lora=False, moe=False, rope="yarn"),
    "mistral4": Architecture("mistral4", q_lora=True, moe=True, rope="yarn"),
    "mistral4-dense": Architecture("mistral4", q_lora=False, moe=False, rope="yarn"),
    "kimi_k25": KIMI_K25,
    "mistral3": MISTRAL3,
    "sarvam_mla": Architecture("sarvam_mla", q_lora=False, moe=True, rope="yarn"),
    "youtu": Architecture("youtu", q_lora=True, moe=False, rope="rope"),
    "minicpm3": Architecture("minicpm3", q_lora=True, moe=False, rope="longrope"),
    "axk1": Architecture("axk1", q_lora=True, moe=True, rope="yarn"),
}
# Whose logits and round trip test_logits.py compares.
EVALUATED = {
    **{one.name.replace(" ", "-"): one for one in ARCHITECTURES},
    **OTHERS,
    **{name: SPARSE[name] for name in ("v32", "glm5", "glm5-dense")},
}
# By model type, what test_whole_models.py trains and generates with.
WHOLE = {
    "axk1": OTHERS["axk1"],
    "deepseek_v2": Architecture("v2", q_lora=True, moe=True, rope="yarn"),
    "deepseek_v3": Architecture("v3", q_lora=True, moe=True, rope="yarn"),
    "deepseek_v32": SPARSE["v32"],
    "glm4_moe_lite": OTHERS["glm4_moe_lite"],
    "glm_moe_dsa": SPARSE["glm5"],
    # Transformers has it by the name of DeepSeek-V3.
    "kimi_k2": Architecture("v3", q_lora=True, moe=True, rope="yarn"),
    "kimi_k25": KIMI_K25,
    "minicpm3": OTHERS["minicpm3"],
    "mistral3": MISTRAL3,
    "mistral4": OTHERS["mistral4"],
    "sarvam_mla": OTHERS["sarvam_mla"],
    "youtu": OTHERS["youtu"],
}


def make_model(architecture: Architecture, seed: int = 0, **changes) -> Any:
    """The model in float32, for inference; ``changes`` are fields of its config."""
    if architecture in (KIMI_K25, MISTRAL3):
        return _make_model_of_images(architecture, seed)
    family = FAMILIES[architecture.family]
    fields = {**_fields(architecture), **changes}
    config = getattr(transformers, f"{family}Config")(**fields)
    config._attn_implementation = "eager"
    family = _CLASSES.get(family, family)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    _randomise(model, seed)
    return model


def _make_model_of_images(architecture: Architecture, seed: int) -> Any:
    """A model of text and images whose text model is a DeepSeek-V3 or a Mistral 4."""
    text, name = (
        ("deepseek_v3", "Kimi_K25") if architecture == KIMI_K25 else ("mistral4", "Mistral3")
    )
    config = getattr(transformers, f"{name}Config")(
        text_config={"model_type": text, **_fields(architecture)},
        vision_config=_VISION,
        projection_hidden_size=32,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    _randomise(model, seed)
    return model


def save(model: torch.nn.Module, folder: Path) -> Path:
    """Write it as transformers does, in several shards."""
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def token_batch(length: int = BEYOND, seed: int = 7) -> Tensor:
    """Token ids [B, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (_BATCH, length), generator=generator)


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """What transformers computes [B, S, vocabulary]."""
    return model(tokens, use_cache=False).logits


def with_half_split_rope(
    tensors: Mapping[str, LazyTensor], config: ModelConfig
) -> dict[str, LazyTensor]:
    """What a conversion would make that took the rotary channels to be stored in halves.

    Those of the query and of the key, which Hugging Face stores as pairs of neighbours, are put in
    the order 0, 2, 4, ..., 1, 3, 5, ...
    """
    rope = config.qk_rope_head_dim
    order = torch.cat((torch.arange(0, rope, 2), torch.arange(1, rope, 2)))

    def permute(weight: Tensor, block: int) -> Tensor:
        blocks = weight.reshape(-1, block, weight.shape[-1])
        kept, rotary = blocks.split([block - rope, rope], dim=1)
        return torch.cat((kept, rotary[:, order]), dim=1).reshape(weight.shape)

    widths = {
        "q_proj.weight": config.qk_nope_head_dim + rope,
        "q_b_proj.weight": config.qk_nope_head_dim + rope,
        "kv_a_proj_with_mqa.weight": config.kv_lora_rank + rope,
    }
    result = dict(tensors)
    for name, tensor in tensors.items():
        block = widths.get(name.removeprefix(name.rpartition("self_attn.")[0] + "self_attn."))
        if block is not None:
            result[name] = tensor.map(lambda weight, block=block: permute(weight, block))
    return result


def with_rope(config: ModelConfig, **changes) -> ModelConfig:
    """The same weights with another rotary embedding; ``changes`` are of its parameters."""
    fields = config.hugging_face
    return dataclasses.replace(
        config, hugging_face={**fields, "rope_parameters": {**fields["rope_parameters"], **changes}}
    )


def _fields(architecture: Architecture) -> dict:
    fields = {
        **_SIZES,
        "first_k_dense_replace": 1 if architecture.moe else 3,
        "q_lora_rank": 48 if architecture.q_lora else None,
        "rope_parameters": _rope_parameters(architecture),
    }
    if architecture.family == "v2":
        return fields | {"topk_method": "greedy", "routed_scaling_factor": 1.5}
    if architecture.family in ("youtu", "minicpm3"):
        return {name: value for name, value in fields.items() if name not in _OF_EXPERTS}
    if architecture.family == "glm":
        kinds = ["dense", *["sparse" if architecture.moe else "dense"] * 2]
        return fields | {"mlp_layer_types": kinds, "routed_scaling_factor": 1.8}
    if architecture.family in ("mistral4", "mistral3"):
        rope = {**fields["rope_parameters"], "llama_4_scaling_beta": 0.1}
        return fields | {"rope_parameters": rope, "routed_scaling_factor": 1.5}
    if architecture.family == "glm5":
        # The third layer shares the second one's selection, which is not the first one's. What
        # Megatron's own attention computes depends on the epsilon.
        return fields | {
            **_INDEXER,
            "indexer_types": ["full", "full", "shared"],
            "rms_norm_eps": 1e-6,
            "routed_scaling_factor": 2.5,
        }
    if architecture.family == "v32":
        fields |= _INDEXER
    return fields | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}


def _rope_parameters(architecture: Architecture) -> dict:
    if architecture.rope == "rope":
        return {"rope_type": "default", "rope_theta": 10000.0}
    if architecture.rope == "longrope":
        factors = {"short_factor": [*range(1, 9)], "long_factor": [9.0] * 8}
        most = {"original_max_position_embeddings": _SIZES["max_position_embeddings"]}
        return {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **most}
    # V2-Lite's, V3's, and one that scales the rotary table as well (mscale != mscale_all_dim).
    unequal = architecture.family == "v2" and architecture.q_lora
    mscale, mscale_all_dim = (0.707, 1.0) if unequal else (1.0, 1.0)
    if architecture.family == "v2" and not architecture.q_lora:
        mscale = mscale_all_dim = 0.707
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            values = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.3 * values)
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * values)
            else:
                # Twice as wide as what keeps the size of activations.
                tensor.copy_(2 * values / tensor.shape[-1] ** 0.5)
