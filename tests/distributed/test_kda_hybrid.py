"""HybridModels of absorbed MLA and Kimi Delta Attention (KDA), where Megatron has it (branch dev).

With one process, or over two: tensor- or context-parallel.
"""

import pytest
import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.checkpoint.distributed import load_model_weights, save_model_weights
from absorbed_mla.checkpoint.hybrid_names import KDA_SYMBOL, MLA_SYMBOL
from absorbed_mla.serving.llm import LLM
from absorbed_mla.standard_mla import get_standard_mla_layer_spec
from specs.absorbed_mla_hybrid_specs import get_absorbed_mla_hybrid_stack_spec
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.combinations import few_ranks
from tests.support.fake_packages import kda
from tests.support.hybrid import hybrid_model
from tests.support.models import call, token_batch, with_own_norms
from tests.support.packed_mtp import documents, gradients, pack
from tests.support.refusal import refusal
from tests.support.standard import KV_UP, separate_heads

needs_kda = pytest.mark.skipif(
    KDA_SYMBOL is None, reason="needs Megatron-LM's branch dev with KDA (pull request 6556)"
)
pytestmark = few_ranks
PATTERN = "K-+-K-"
FIELDS = {
    "experimental_attention_variant": "kda",
    "is_hybrid_model": True,
    "activation_func": nn.functional.silu,
    "linear_cp_mode": "headwise",
    "linear_conv_kernel_dim": 3,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch):
    if KDA_SYMBOL is not None:
        kda.install(monkeypatch)


def hybrid(pattern: str = PATTERN, seed: int = 0, **changes) -> nn.Module:
    return with_own_norms(hybrid_model(pattern, seed=seed, **{**FIELDS, **changes}), seed)


def with_megatrons_mla() -> nn.Module:
    """The same model, whose ``+`` is Megatron's MLASelfAttention."""
    config = config_for(TINY, torch.float32, **FIELDS)
    parts = get_standard_mla_layer_spec(config, backend="local").submodules
    names = ("input_layernorm", "self_attention", "self_attn_bda")
    layer = TransformerLayerSubmodules(**{name: getattr(parts, name) for name in names})
    spec = get_absorbed_mla_hybrid_stack_spec(config, backend="local")
    spec.submodules.mla_layer = ModuleSpec(module=TransformerLayer, submodules=layer)
    return hybrid(spec=spec)


def trained(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses, and the gradients by name."""
    losses = call(model, labels=token_batch(6))
    losses.mean().backward()
    return losses.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("safe", [True, False])
def test_stand_in_is_transformers_layer(safe):
    """The recurrence that the tests below run, where flash-linear-attention has a kernel."""
    modeling = pytest.importorskip("transformers.models.bailing_hybrid.modeling_bailing_hybrid")
    fields = {"num_attention_heads": 4, "head_dim": 8, "hidden_size": 32}
    config = modeling.BailingHybridConfig(**fields, kda_safe_gate=safe)
    gate = modeling.BailingHybridForgetGate(config)
    with torch.no_grad():
        for weight in gate.parameters():
            weight.normal_()
    x, beta = torch.randn(2, 16, 32), torch.rand(2, 16, 4)
    qkv = [torch.randn(2, 16, 4, 8) for _ in range(3)]
    whole = {"output_final_state": False, "initial_state": None, "use_qk_l2norm_in_kernel": True}
    expected, _ = modeling.chunk_kimi_delta_attention(*qkv, gate(x), beta, **whole)
    q, k = map(kda.l2norm, qkv[:2])
    raw, bound = gate.f_proj(x).unflatten(-1, (4, 8)), {"safe_gate": safe, "lower_bound": -5.0}
    found, _ = kda.chunk_kda(q, k, qkv[2], raw, beta, gate.A_log, gate.dt_bias, **bound)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@needs_kda
def test_losses_and_gradients_of_megatrons_mla():
    with world.parallel():
        expected = with_megatrons_mla()
        found = hybrid(seed=1)
        found.load_state_dict(expected.state_dict())
        assert sum(isinstance(m, AbsorbedMLASelfAttention) for m in found.modules()) == 1
        losses, ours = trained(found)
        reference, theirs = trained(expected)
    torch.testing.assert_close(losses, reference, atol=1e-5, rtol=1e-5)
    prefix = "decoder.layers.2.self_attention."
    k_up, v_up = separate_heads(TINY, theirs.pop(prefix + KV_UP))
    theirs |= {f"{prefix}linear_{x}_up_proj.weight": g for x, g in (("k", k_up), ("v", v_up))}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.any(), name
        torch.testing.assert_close(ours[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@needs_kda
@pytest.mark.parametrize("parallel", ["tp", "cp"])
def test_packs_over_ranks(parallel, folder):
    """A rank with part of the heads or tokens has the gradients of each document alone."""
    texts = documents((8, 4, 12))
    gate = {"kda_safe_gate": True, "kda_lower_bound": -5.0}
    with world.parallel():
        whole = hybrid(**gate)
        save_model_weights(whole, folder)
        alone = [gradients(whole, pack([text], [len(text) - 1])) for text in texts]
    expected = {name: sum(one[name] for one in alone) for name in alone[0]}
    with world.parallel(**{parallel: world.size()}):
        sizes = {**world.tp_fields(), "context_parallel_size": world.cp_size()}
        model = hybrid(seed=1, **gate, **sizes)
        load_model_weights(model, folder)
        found = gradients(model, pack(texts, [8, 4, 12]))
        for name, parameter in model.named_parameters():
            if getattr(parameter, "sequence_parallel", False):
                found[name] = world.all_reduce(found[name], group=world.tp_group())
    same = [name for name, x in expected.items() if x.shape == found[name].shape]
    assert len(same) == len(expected) or (parallel == "tp" and len(same) > 6)
    for name in same:
        torch.testing.assert_close(found[name], expected[name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("symbol", ["K", "M"])
def test_generation_is_refused(symbol):
    size = {"tensor_model_parallel_size": world.tp_size()}
    model = hybrid_model("+-", cache_mla_latents=True, **size).eval()
    model.hybrid_layer_pattern = pattern = f"{MLA_SYMBOL}-{symbol}-"
    with refusal("hybrid_layer_pattern", f"got {pattern!r}", f"no state of {symbol} "):
        LLM.from_model(model, max_model_len=16)


@needs_kda
def test_a_gpt_model_is_refused():
    with refusal("experimental_attention_variant='kda'", "is_hybrid_model=True, got False"):
        hybrid(is_hybrid_model=False, linear_attention_freq=2)


@pytest.mark.skipif(KDA_SYMBOL is not None, reason="needs a Megatron-Core without KDA")
def test_missing_in_megatron():
    """The refusal says what of it is missing."""
    with refusal("experimental_attention_variant='kda'", "Symbols.KDA", "branch dev", "6556"):
        config = config_for(TINY, experimental_attention_variant="kda")
        get_absorbed_mla_hybrid_stack_spec(config)
    with refusal("'K' is not a valid layer symbol"):
        hybrid_model(PATTERN)
