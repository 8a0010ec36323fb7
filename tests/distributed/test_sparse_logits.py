"""transformers' DeepSeek-V3.2 and GLM-5 in a GPTModel with our spec, in fp32: logits and tokens.

Weights are copied by name; the converter has tests of its own. If these fail, a model computes, or
caches and chooses, something else than transformers' does.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from absorbed_mla import AbsorbedMLAOptions
from tests.distributed.llm import expected_tokens
from tests.distributed.whole import on_one_rank
from tests.support import needs, world
from tests.support.dsa import dsa_fields
from tests.support.engine import Request, engine_of, generate, generating_model, prompt
from tests.support.models import VOCAB, logits, token_batch
from tests.support.numerics import relative_error
from tests.support.transformers_dsa import DEEPSEEK, GLM, MLA, model_of

pytestmark = needs.processes(1, 2)

LAYERS, NEW_TOKENS = 4, 64 if world.size() == 1 else 12
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


@pytest.fixture(
    params=[(DEEPSEEK, {}), (GLM, {}), (GLM, {"dsa_indexer_topk_freq": 2})],
    ids=["v3.2", "glm-5", "glm-5.2"],
)
def models(request):
    """A model of transformers and ours with its weights; GLM-5.2 shares selections."""
    dsa, sharing = request.param
    torch.manual_seed(1)
    types = {"indexer_types": ["full", "shared"] * 2} if sharing else {}
    theirs = model_of(dsa, dsa is GLM, num_hidden_layers=LAYERS, **types)
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn_like(parameter)
            # Activations of unit size, so that all of a text matters; gains near one.
            wide = parameter.ndim == 2
            parameter.copy_(noise / parameter.shape[1] ** 0.5 if wide else 1 + noise / 5)
    theirs = theirs.float()
    fields = {
        **dsa_fields(dsa),
        **sharing,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "num_layers": LAYERS,
        "activation_func": F.silu,
        "ffn_hidden_size": theirs.config.intermediate_size,
        "layernorm_epsilon": theirs.config.rms_norm_eps,
    }
    with world.parallel(tp=world.size()):
        ours = generating_model(AbsorbedMLAOptions(latent_norm_eps=1e-6), mla=dsa.mla, **fields)
        own, weights = dict(ours.named_parameters()), weights_of(theirs)
        assert weights.keys() == own.keys()
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
        yield theirs, ours


@torch.no_grad()
def test_logits(models):
    """Prompts longer than top-k."""
    theirs, ours = models
    assert theirs.config.vocab_size == VOCAB
    expected = theirs(token_batch().cpu()).logits
    assert relative_error(logits(ours.eval()), expected) < BOUND


def test_tokens(models):
    """Greedy tokens after prompts longer than top-k, together in one engine."""
    theirs, ours = models
    prompts = [prompt(length, seed) for seed, length in enumerate((17, 70))]
    expected = on_one_rank(lambda: expected_tokens(theirs, prompts, NEW_TOKENS))
    requests = [Request(text, NEW_TOKENS) for text in prompts]
    run = generate(engine_of(ours, step_tokens=64, chunked_prefill=True), requests)
    assert run.tokens == expected
    assert all(len(set(tokens)) > NEW_TOKENS // 4 for tokens in expected), "it repeats itself"
