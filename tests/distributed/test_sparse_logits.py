"""Logits of transformers' DeepSeek-V3.2 and GLM-5 through a GPTModel with our spec, in fp32.

Weights are copied by name; the converter has tests of its own.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor

from absorbed_mla import AbsorbedMLAOptions
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.support import needs, world
from tests.support.cases import config_for
from tests.support.dsa import dsa_fields
from tests.support.models import VOCAB, gpt_model
from tests.support.numerics import relative_error
from tests.support.transformers_dsa import DEEPSEEK, GLM, MLA, model_of

TOKENS, BATCH, LAYERS = 16, 2, 4
BOUND = 1e-5
# transformers' attention in Megatron's names, and the dim that tensor parallelism cuts.
ATTENTION = {
    "q_a_proj": ("linear_q_down_proj", None),
    "q_a_layernorm": ("q_layernorm", None),
    "q_b_proj": ("linear_q_up_proj", 0),
    "kv_a_proj_with_mqa": ("linear_kv_down_proj", None),
    "kv_a_layernorm": ("kv_layernorm", None),
    "o_proj": ("linear_proj", 1),
    "indexer.wq_b": ("core_attention.indexer.linear_wq_b", None),
    "indexer.wk": ("core_attention.indexer.linear_wk", None),
    "indexer.k_norm": ("core_attention.indexer.k_norm", None),
    "indexer.weights_proj": ("core_attention.indexer.linear_weights_proj", None),
}
MODEL = {
    "model.embed_tokens.weight": ("embedding.word_embeddings.weight", 0),
    "model.norm.weight": ("decoder.final_layernorm.weight", None),
    "lm_head.weight": ("output_layer.weight", 0),
}
LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight", None),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight", 1),
}


def part(weight: Tensor, dim: int | None) -> Tensor:
    return weight if dim is None else world.own_part(weight, dim)


def weights_of(theirs) -> dict[str, Tensor]:
    """This rank's weights by Megatron's names; every weight of the model is read."""
    left = {name: weight.detach().float() for name, weight in theirs.named_parameters()}
    found = {ours: part(left.pop(name), dim) for name, (ours, dim) in MODEL.items()}
    for i in range(LAYERS):
        start, to = f"model.layers.{i}.", f"decoder.layers.{i}."
        for name, (ours, dim) in LAYER.items():
            found[to + ours] = part(left.pop(start + name), dim)
        gate, up = (left.pop(f"{start}mlp.{name}_proj.weight") for name in ("gate", "up"))
        found[f"{to}mlp.linear_fc1.weight"] = torch.cat((part(gate, 0), part(up, 0)))
        start, to = f"{start}self_attn.", f"{to}self_attention."
        rows = left.pop(f"{start}kv_b_proj.weight").unflatten(0, (MLA.heads, -1))
        for name, weight in zip("kv", rows.split([MLA.nope, MLA.v], dim=1), strict=True):
            found[f"{to}linear_{name}_up_proj.weight"] = part(weight.flatten(0, 1), 0)
        for name, (ours, dim) in ATTENTION.items():
            for kind in ("weight", "bias"):
                if f"{start}{name}.{kind}" in left:
                    found[f"{to}{ours}.{kind}"] = part(left.pop(f"{start}{name}.{kind}"), dim)
    assert not left
    return found


@needs.processes(1, 2)
@pytest.mark.parametrize(
    ("dsa", "sharing"),
    [(DEEPSEEK, {}), (GLM, {}), (GLM, {"dsa_indexer_topk_freq": 2})],
    ids=["v3.2", "glm-5", "glm-5.2"],
)
@torch.no_grad()
def test_logits(dsa, sharing):
    """Prompts longer than top-k; GLM-5.2 shares selections."""
    torch.manual_seed(1)
    types = {"indexer_types": ["full", "shared"] * 2} if sharing else {}
    theirs = model_of(dsa, dsa is GLM, num_hidden_layers=LAYERS, **types)
    for parameter in theirs.parameters():
        noise = torch.randn_like(parameter)
        # Activations of unit size; gains near one.
        wide = parameter.ndim == 2
        parameter.copy_(noise / parameter.shape[1] ** 0.5 if wide else 1 + noise / 5)
    theirs = theirs.float()
    tokens = torch.randint(VOCAB, (BATCH, TOKENS))
    expected = theirs(tokens).logits
    changes = {
        **dsa_fields(dsa),
        **sharing,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "num_layers": LAYERS,
        "activation_func": F.silu,
        "ffn_hidden_size": theirs.config.intermediate_size,
        "layernorm_epsilon": theirs.config.rms_norm_eps,
    }
    with world.parallel(tp=world.size()):
        changes |= {"tensor_model_parallel_size": world.size()}
        config = config_for(MLA if dsa is GLM else dsa.mla, torch.float32, **changes)
        options = AbsorbedMLAOptions(latent_norm_eps=1e-6)
        spec = get_absorbed_mla_decoder_block_spec(config, backend="local", options=options)
        model = gpt_model(mla=dsa.mla, spec=spec, **changes).eval()
        ours = dict(model.named_parameters())
        weights = weights_of(theirs)
        assert weights.keys() == ours.keys()
        for name, parameter in ours.items():
            parameter.copy_(weights[name])
        positions = torch.arange(TOKENS).expand_as(tokens).to(world.device())
        own = model(tokens.to(world.device()), positions, None)
        found = tensor_parallel.gather_from_tensor_model_parallel_region(own)
    assert relative_error(found, expected) < BOUND
