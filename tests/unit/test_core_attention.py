"""The two forms as one module, and the choice between them."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.flop_counter import FlopCounterMode

from absorbed_mla import AbsorbedMLAOptions, MLADims
from absorbed_mla.core_attention import (
    LatentCoreAttention,
    LocalKeys,
    forms,
    latent_attention,
)
from absorbed_mla.core_attention.cost import choose_form, operations
from absorbed_mla.rope import RotaryTable
from absorbed_mla.sequences import SequenceLayout
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.harness import Setup, build_attention
from tests.support.numerics import relative_error

DIMS = MLADims.from_config(config_for(TINY), 1)
TOKENS, BATCH = 7, 2


def core(form: str) -> LatentCoreAttention:
    options = AbsorbedMLAOptions(form=form, query_chunk_size=3)
    return LatentCoreAttention(config_for(TINY), DIMS, AttnMaskType.causal, 0.2, options)


def operands() -> list[torch.Tensor]:
    n, nope, rope, v, c = TINY.heads, TINY.nope, TINY.rope, TINY.v, TINY.kv_lora_rank
    tokens = (TOKENS, BATCH)
    shapes = [(*tokens, n * (nope + rope)), (*tokens, c + rope)]
    shapes += [(n, nope, c), (n, v, c)]
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [x.to(world.device()).requires_grad_() for x in leaves]


def table() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the tokens."""
    return RotaryTable(config_for(TINY)).cos_sin(TOKENS, world.device())


def attend(form: str, leaves) -> list[torch.Tensor]:
    """Output, LSE and all gradients."""
    module, layout = core(form), SequenceLayout.dense(TOKENS)
    keys = LocalKeys(layout, causal=True)
    plan = module.plan(keys, layout, 1, leaves[0], None)
    q, kv, w_uk, w_uv = leaves
    query = plan.form.query(q.clone(), w_uk, *table())
    out, lse = module(plan, query, keys.start(kv), w_uk, w_uv)
    assert out.shape == (TOKENS, BATCH, TINY.heads, TINY.v)
    loss = (out * torch.arange(out.numel(), device=out.device).view_as(out)).sum() + lse.sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


def test_forms_agree():
    """Also in the LSE, which merging over context-parallel ranks will rely on."""
    leaves = operands()
    for absorbed, expanded in zip(attend("absorbed", leaves), attend("expanded", leaves)):
        assert relative_error(absorbed, expanded) < 1e-13


def test_forms_are_really_two(monkeypatch):
    """Each does its own arithmetic: an option that is ignored would agree even better."""
    leaves = operands()
    monkeypatch.setattr(forms, "expand", None)
    attend("absorbed", leaves)
    monkeypatch.undo()
    monkeypatch.setattr(forms, "absorb_query", None)
    attend("expanded", leaves)


V3 = replace(DIMS, num_heads_per_rank=128, kv_lora_rank=512)
V3 = replace(V3, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


class TestAuto:
    def test_is_logged_once(self, caplog, monkeypatch):
        """And taken: the bits are those of the form that it names."""
        monkeypatch.setattr(latent_attention, "_logged", set())
        x = torch.randn(90, 2, TINY.hidden, dtype=torch.float64, device=world.device())
        outputs = []
        with caplog.at_level(logging.INFO, logger=latent_attention.logger.name):
            for form in ("auto", "auto", "expanded"):
                torch.manual_seed(0)
                outputs.append(build_attention(TINY, Setup(form=form))(x, None)[0])
        assert torch.equal(outputs[0], outputs[2])
        assert [r.getMessage() for r in caplog.records] == [
            "form='auto' runs expanded: fewer operations for sequences of 90 tokens, "
            "context_parallel_size=1, training"
        ]

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("form", ["absorbed", "expanded"])
    def test_operations_are_those_that_run(self, form, training):
        """Counted by PyTorch while the module runs, every query seeing every key."""
        options = AbsorbedMLAOptions(form=form, expansion_chunk_size=3 * TOKENS * BATCH)
        module = LatentCoreAttention(config_for(TINY), DIMS, AttnMaskType.no_mask, 0.2, options)
        module.train(training)
        layout, leaves = SequenceLayout.dense(TOKENS), operands()
        keys = LocalKeys(layout, causal=False)
        plan = module.plan(keys, layout, 1, leaves[0], None)
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            query = plan.form.query(leaves[0].clone(), leaves[2], *table())
            out, _ = module(plan, query, *leaves[1:])
            if training:
                out.sum().backward()
        expected = operations(
            form,
            DIMS,
            query_tokens=TOKENS * BATCH,
            key_tokens=TOKENS * BATCH,
            pairs=TOKENS * TOKENS * BATCH,
            training=training,
        )
        assert counter.get_total_flops() == 2 * expected

    @pytest.mark.parametrize("seq_len", [1, 7, 256, 4096, 131072, 1 << 20])
    @pytest.mark.parametrize("cp_size", [1, 2, 8, 64])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("training", [True, False])
    def test_is_the_one_with_fewer_operations(self, seq_len, cp_size, causal, training):
        """Pairs counted one by one, on the rank that holds the first and the last chunk."""
        if seq_len % (2 * cp_size):
            seq_len *= 2 * cp_size
        queries, chunk = seq_len // cp_size, seq_len // (2 * cp_size)
        late = seq_len - chunk
        pairs = queries * seq_len
        if causal:
            pairs = chunk * (chunk + 1) // 2 + chunk * late + chunk * (chunk + 1) // 2
        cost = {
            form: operations(
                form,
                V3,
                query_tokens=queries,
                key_tokens=seq_len,
                pairs=pairs,
                training=training,
            )
            for form in ("absorbed", "expanded")
        }
        chosen = choose_form(V3, seq_len=seq_len, cp_size=cp_size, causal=causal, training=training)
        assert cost[chosen] == min(cost.values())

    def test_crossover(self):
        """DeepSeek-V3, long sequences: expanding pays from 524 tokens per rank on."""
        for heads in (1, 16, 128):
            dims = replace(V3, num_heads_per_rank=heads)
            for tokens, expected in ((384, "absorbed"), (520, "absorbed"), (530, "expanded")):
                chosen = choose_form(
                    dims, seq_len=tokens * 1024, cp_size=1024, causal=True, training=True
                )
                assert chosen == expected
        assert choose_form(V3, seq_len=8192, cp_size=1, causal=True, training=True) == "expanded"
