"""The two forms as one module, and the choice between them."""

from __future__ import annotations

import logging

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.flop_counter import FlopCounterMode

from absorbed_mla import AbsorbedMLAOptions, MLADims
from absorbed_mla.absorb import absorb_query, absorbed_is_cheaper, expand_latent, up_project_value
from absorbed_mla.core_attention import LatentCoreAttention, forms
from absorbed_mla.sequences import SequenceLayout
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.harness import Setup, build_attention

DIMS = MLADims.from_config(config_for(TINY), 1)
TOKENS, BATCH = 7, 2


def core(form: str) -> LatentCoreAttention:
    options = AbsorbedMLAOptions(form=form, query_chunk_size=3)
    return LatentCoreAttention(config_for(TINY), DIMS, AttnMaskType.causal, 0.2, options)


def operands() -> list[torch.Tensor]:
    n, nope, rope, v, c = TINY.heads, TINY.nope, TINY.rope, TINY.v, TINY.kv_lora_rank
    tokens = (TOKENS, BATCH)
    shapes = [(*tokens, n, nope), (*tokens, n, rope), (*tokens, c), (*tokens, rope)]
    shapes += [(n, nope, c), (n, v, c)]
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [x.to(world.device()).requires_grad_() for x in leaves]


def attend(form: str, leaves) -> list[torch.Tensor]:
    """Output, LSE and all gradients."""
    module = core(form)
    rules = module.rules(SequenceLayout.dense(TOKENS), BATCH, None, world.device())
    out, lse = module(*leaves, rules)
    assert out.shape == (TOKENS, BATCH, TINY.heads, TINY.v)
    loss = (out * torch.arange(out.numel(), device=out.device).view_as(out)).sum() + lse.sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


def test_forms_agree():
    """Also in the LSE, which merging over context-parallel ranks will rely on."""
    leaves = operands()
    for absorbed, expanded in zip(attend("absorbed", leaves), attend("expanded", leaves)):
        torch.testing.assert_close(absorbed, expanded, rtol=1e-11, atol=1e-11)


def test_forms_are_really_two(monkeypatch):
    """Each does its own arithmetic: an option that is ignored would agree even better."""
    leaves = operands()
    monkeypatch.setattr(forms, "expand_latent", None)
    attend("absorbed", leaves)
    monkeypatch.undo()
    monkeypatch.setattr(forms, "absorb_query", None)
    attend("expanded", leaves)


class TestAuto:
    def test_is_expanded_when_training(self, caplog, monkeypatch):
        """A layer attends to its own tokens; the choice is logged once, not per call."""
        monkeypatch.setattr(forms, "_logged", set())
        x = torch.randn(9, 2, TINY.hidden, dtype=torch.float64, device=world.device())
        outputs = []
        with caplog.at_level(logging.INFO, logger=forms.logger.name):
            for form in ("auto", "auto", "expanded"):
                torch.manual_seed(0)
                outputs.append(build_attention(TINY, Setup(form=form))(x, None)[0])
        assert torch.equal(outputs[0], outputs[2])
        assert [r.getMessage() for r in caplog.records] == [
            "form='auto' runs expanded: fewer operations for 9 query and 9 key tokens"
        ]

    @pytest.mark.parametrize("c, nope, rope, v", [(24, 12, 8, 20), (8, 16, 0, 16), (64, 16, 8, 16)])
    @pytest.mark.parametrize("keys", [1, 8, 40])
    @pytest.mark.parametrize("queries", [1, 3, 8, 40])
    def test_is_the_one_with_fewer_operations(self, queries, keys, c, nope, rope, v):
        """Counted by PyTorch while the two forms run, for one head."""
        absorbed = count(
            lambda q, latent, q_rope, k_rope, w_uk, w_uv: up_project_value(
                mix(absorb_query(q, w_uk), q_rope, latent[:, :, None], k_rope, latent[:, :, None]),
                w_uv,
            ),
            *(queries, keys, c, nope, rope, v),
        )
        expanded = count(
            lambda q, latent, q_rope, k_rope, w_uk, w_uv: mix(
                q, q_rope, expand_latent(latent, w_uk), k_rope, expand_latent(latent, w_uv)
            ),
            *(queries, keys, c, nope, rope, v),
        )
        cheaper = absorbed_is_cheaper(queries, keys, kv_lora_rank=c, nope=nope, rope=rope, v=v)
        assert cheaper == (absorbed < expanded)
        dims = MLADims(
            hidden_size=8,
            num_heads=1,
            num_heads_per_rank=1,
            q_lora_rank=None,
            kv_lora_rank=c,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            v_head_dim=v,
        )
        expected = "absorbed" if cheaper else "expanded"
        assert forms.resolve_auto(dims, queries, keys) == expected

    def test_decoding_is_absorbed(self):
        """DeepSeek-V3: one query against a long context."""
        v3 = {"kv_lora_rank": 512, "nope": 128, "rope": 64, "v": 128}
        assert absorbed_is_cheaper(1, 4096, **v3)
        assert not absorbed_is_cheaper(4096, 4096, **v3)


def mix(q, q_rope, k, k_rope, value):
    """The products of attention, without what lies between them."""
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) + torch.einsum("sbnd,tbnd->bnst", q_rope, k_rope)
    return torch.einsum("bnst,tbnd->sbnd", scores, value)


def count(form, queries: int, keys: int, c: int, nope: int, rope: int, v: int) -> int:
    """Floating-point operations of one head."""
    shapes = [(queries, 1, 1, nope), (keys, 1, c), (queries, 1, 1, rope), (keys, 1, 1, rope)]
    shapes += [(1, nope, c), (1, v, c)]
    with FlopCounterMode(display=False) as counter:
        form(*(torch.empty(shape, device="meta") for shape in shapes))
    return counter.get_total_flops()
