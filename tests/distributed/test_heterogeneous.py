"""A model with two kinds of MLA: the same weights and tokens as alone, in all that it does."""

from dataclasses import replace

import pytest
import torch

from absorbed_mla.checkpoint.distributed import load_model_weights, save_model_weights
from absorbed_mla.heterogeneous_config import HeterogeneousMLAConfig
from specs.absorbed_mla_hybrid_specs import get_absorbed_mla_hybrid_stack_spec
from specs.absorbed_mla_layer_specs import get_absorbed_mla_layer_spec
from tests import oracle
from tests.support import world
from tests.support.cases import TINY, config_for, random_weights
from tests.support.combinations import few_ranks
from tests.support.generation import by_dynamic_context, by_forwards, by_static_context, prompts_of
from tests.support.harness import Setup, load_weights, module_table, named_tensors, run
from tests.support.layouts import grid_layout
from tests.support.models import gpt_model, logits
from tests.support.numerics import compare, relative_error
from tests.support.refusal import refusal

pytestmark = few_ranks

FIRST = replace(TINY, norm_eps=1e-5)
OTHER = replace(FIRST, heads=8, q_lora_rank=12, kv_lora_rank=20, nope=8, rope=12, v=4)
OTHER = replace(OTHER, rope_type="rope", rotary_base=50.0, mscale_all_dim=0.0)
FIELDS = {
    "num_attention_heads": OTHER.heads,
    "q_lora_rank": OTHER.q_lora_rank,
    "kv_lora_rank": OTHER.kv_lora_rank,
    "qk_head_dim": OTHER.nope,
    "qk_pos_emb_head_dim": OTHER.rope,
    "v_head_dim": OTHER.v,
    "rope_type": OTHER.rope_type,
    "rotary_base": OTHER.rotary_base,
    "mscale_all_dim": OTHER.mscale_all_dim,
}
# The last layer is the other one.
LAYERS = {"num_layers": 3, "per_layer_config": {3: FIELDS}, "init_method_std": 0.3}


def model(**changes):
    return gpt_model(mla=FIRST, **(LAYERS | changes), tensor_model_parallel_size=world.tp_size())


@pytest.mark.parametrize("one_spec", [False, True], ids=["block spec", "layer spec"])
def test_every_layer_has_its_own_function(one_spec):
    """Output and gradients of the attentions, in float64."""
    changes = {}
    if one_spec:
        changes["spec"] = get_absorbed_mla_layer_spec(config_for(FIRST, **LAYERS), backend="local")
    made, setup, layout = model(dtype=torch.float64, **changes), Setup(), grid_layout("thd", False)
    for layer, mla in zip(made.decoder.layers, (FIRST, FIRST, OTHER), strict=True):
        attention, weights = layer.self_attention, random_weights(mla)
        load_weights(attention, mla, setup, weights)
        x, grad = (layout.random_rows(mla.hidden, seed) for seed in (1, 2))
        found = run(attention, mla, setup, layout, x, grad)
        table = module_table(attention, mla, layout)
        rows = x.flatten(0, 1), grad.flatten(0, 1)
        expected = oracle.evaluate(mla, weights, *rows, layout.sequences, table)
        compare(named_tensors(mla, found), named_tensors(mla, expected), 1e-9).check()


def test_checkpoint_of_every_size(folder):
    source = model()
    expected = logits(source).cpu()
    save_model_weights(source, folder)
    with world.parallel(tp=1):
        target = model(seed=1)
        assert relative_error(logits(target).cpu(), expected) > 0.1
        load_model_weights(target, folder)
        assert relative_error(logits(target).cpu(), expected) < 1e-5


@pytest.mark.parametrize("kv_lora_rank", [OTHER.kv_lora_rank, 26])
def test_generation(kv_lora_rank):
    """A static context has each layer's latents apart; a dynamic one has rows of one width."""
    layers = {"per_layer_config": {3: FIELDS | {"kv_lora_rank": kv_lora_rank}}}
    made, prompts = model(cache_mla_latents=True, **layers).eval(), prompts_of((5, 9))
    expected = [one.tokens for one in by_forwards(made, prompts, 6)]
    found = by_static_context(made, prompts, 6, prefill_size=3)
    assert [one.tokens for one in found] == expected
    if kv_lora_rank + OTHER.rope == FIRST.kv_lora_rank + FIRST.rope:
        assert [one.tokens for one in by_dynamic_context(made, prompts, 6)] == expected
        return
    with refusal("hold 152 bytes of a token, got 128", "need a StaticInferenceContext"):
        by_dynamic_context(made, prompts, 6)


class TestRefused:
    @pytest.mark.parametrize(
        "fields, parts",
        [
            ({"per_layer_config": {0: FIELDS}}, ("1 to 3", "got 0")),
            ({"per_layer_config": {2: {"hidden_size": 8}}}, ("[2]", "v_head_dim", "got hidden")),
            ({"cuda_graph_impl": "local"}, ("cuda_graph_impl='none'", "got 'local'")),
        ],
        ids=["layer", "field", "graphs"],
    )
    def test_by_the_config(self, fields, parts):
        with refusal("per_layer_config", *parts):
            config_for(FIRST, **{**LAYERS, **fields})

    def test_by_a_hybrid_model(self):
        """Megatron's stack asks no config for those of its layers."""
        config = config_for(FIRST, **LAYERS)
        assert isinstance(config, HeterogeneousMLAConfig)
        with refusal("HybridModel", "per_layer_config", "GPTModel"):
            get_absorbed_mla_hybrid_stack_spec(config, backend="local")
