"""Megatron's own MLASelfAttention on a CPU: the comparison partner must itself be right."""

from dataclasses import replace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import build_module

from absorbed_mla.norm import RMSNorm
from absorbed_mla.standard_mla import (
    PlainCoreAttention,
    get_standard_mla_decoder_block_spec,
    get_standard_mla_layer_spec,
)
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.refusal import refusal

# No YaRN, so that whole layers may be compared with plain attention.
SMALL = replace(TINY, rope_type="rope", scaling_factor=1.0, mscale_all_dim=1.0)


def make_config(**changes) -> MLATransformerConfig:
    return config_for(SMALL, torch.float32, **{"num_layers": 2, **changes})


def make_core(**changes) -> PlainCoreAttention:
    config = make_config(**changes)
    return PlainCoreAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.3)


def random_qkv(*shape: int, v: int = 8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    widths = (12, 12, v)
    return [torch.randn(*shape, w, generator=generator, dtype=dtype) for w in widths]


def pack_of(*ends: int) -> PackedSeqParams:
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, *ends]))


MASKED = {"attention_mask": torch.zeros(1, 1, 1, 12, dtype=torch.bool)}


class TestPlainCoreAttention:
    @pytest.mark.parametrize("causal, scale", [(True, 0.3), (False, None)])
    def test_equals_torch(self, causal, scale):
        q, k, v = random_qkv(7, 2, 3)
        core = make_core()
        core.softmax_scale = scale
        mask_type = AttnMaskType.causal if causal else AttnMaskType.no_mask
        got = core(q, k, v, None, attn_mask_type=mask_type)
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=causal, scale=scale
        )
        torch.testing.assert_close(got, want.permute(2, 0, 1, 3).flatten(2))

    def test_padding_mask_hides_keys(self):
        """What a hidden key holds must not reach any output."""
        q, k, v = random_qkv(6, 2, 3)
        mask = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
        mask[1, ..., 4:] = True
        core = make_core()
        first = core(q, k, v, mask, attn_mask_type=AttnMaskType.padding)
        k[4:, 1], v[4:, 1] = 1e3, -1e3
        torch.testing.assert_close(core(q, k, v, mask, attn_mask_type=AttnMaskType.padding), first)

    def test_row_without_visible_key_is_finite(self):
        q, k, v = random_qkv(3, 1, 2)
        mask = torch.ones(1, 1, 1, 3, dtype=torch.bool)
        got = make_core()(q, k, v, mask, attn_mask_type=AttnMaskType.padding)
        torch.testing.assert_close(got[0], v.mean(0).flatten(1))

    def test_fewer_queries_than_keys(self):
        """Prefill and decode: the last query sees every key."""
        q, k, v = random_qkv(6, 1, 2)
        core = make_core()
        torch.testing.assert_close(core(q[4:], k, v, None), core(q, k, v, None)[4:])

    @pytest.mark.parametrize("padded", [None, [0, 5, 5, 8, 12]])
    def test_packed_equals_one_by_one(self, padded):
        cu = [0, 4, 4, 5, 9] if padded else [0, 4, 4, 5, 12]
        q, k, v = random_qkv(12, 3)
        core = make_core()
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=torch.tensor(cu, dtype=torch.int32),
            cu_seqlens_q_padded=torch.tensor(padded, dtype=torch.int32) if padded else None,
        )
        got = core(q, k, v, None, packed_seq_params=params)
        want = torch.zeros(12, 3 * 8, dtype=torch.float64)
        for i, start in enumerate((padded or cu)[:-1]):
            part = slice(start, start + cu[i + 1] - cu[i])
            one = core(*(x[part].unsqueeze(1) for x in (q, k, v)), None)
            want[part] = one.squeeze(1)
        torch.testing.assert_close(got, want)

    def test_bf16_softmax_is_fp32(self):
        q, k, v = random_qkv(9, 1, 2, dtype=torch.bfloat16)
        core = make_core()
        want = core(q.double(), k.double(), v.double(), None)
        error = (core(q, k, v, None).double() - want).norm() / want.norm()
        assert error < 2**-9  # only the output is rounded to bf16's 8 bits

    def test_dropout_in_training_only(self):
        q, k, v = random_qkv(9, 1, 4)
        core = make_core(attention_dropout=0.5)
        assert not torch.equal(core(q, k, v, None), core(q, k, v, None))
        core.eval()
        torch.testing.assert_close(core(q, k, v, None), core(q, k, v, None))

    def test_dropout_under_sequence_parallel_uses_the_global_state(self):
        q, k, v = random_qkv(9, 1, 4)
        core = make_core()
        core.config.sequence_parallel = True
        core.dropout = 0.5
        torch.manual_seed(1)
        first = core(q, k, v, None)
        torch.manual_seed(1)
        assert torch.equal(core(q, k, v, None), first)

    @pytest.mark.parametrize(
        "message, arguments",
        [
            ("qkv_format='thd'", {"packed_seq_params": PackedSeqParams(qkv_format="sbhd")}),
            ("12 tokens", {"packed_seq_params": pack_of(5)}),
            ("attention_mask must be None", {"packed_seq_params": pack_of(12)} | MASKED),
            ("attention_bias", {"attention_bias": torch.zeros(12, 12)}),
        ],
    )
    def test_refused(self, message, arguments):
        with refusal(message):
            make_core()(*random_qkv(12, 3), **{"attention_mask": None, **arguments})

    def test_unsupported_option(self):
        with refusal("softmax_type='vanilla' only, got 'off-by-one'"):
            make_core(softmax_type="off-by-one")


class TestSpecs:
    @pytest.mark.parametrize("q_lora_rank, qk_layernorm", [(16, True), (16, False), (None, False)])
    def test_layer_builds_and_trains(self, q_lora_rank, qk_layernorm):
        config = make_config(q_lora_rank=q_lora_rank, qk_layernorm=qk_layernorm)
        spec = get_standard_mla_layer_spec(config)
        layer = build_module(spec, config=config, layer_number=1).to(world.device())
        assert type(layer.self_attention) is MLASelfAttention
        norm = RMSNorm if qk_layernorm else IdentityOp
        assert isinstance(layer.self_attention.kv_layernorm, norm)
        assert isinstance(layer.input_layernorm, RMSNorm)
        assert isinstance(layer.pre_mlp_layernorm, RMSNorm)
        out, _ = layer(torch.randn(6, 2, SMALL.hidden, device=world.device()), attention_mask=None)
        out.square().sum().backward()
        without = [name for name, p in layer.named_parameters() if p.grad is None]
        assert without == []

    @pytest.mark.parametrize(
        "changes, backend, message",
        [
            ({"q_lora_rank": None}, None, "qk_layernorm=True and q_lora_rank=None"),
            ({}, "te", "one of local, transformer_engine or None; got 'te'"),
            ({}, "transformer_engine", "needs transformer-engine"),
            (
                {"transformer_impl": "transformer_engine"},
                "local",
                "config.transformer_impl='local'",
            ),
        ],
        ids=["local norm without q_lora", "unknown", "missing", "against the config"],
    )
    def test_refused(self, changes, backend, message, monkeypatch):
        monkeypatch.setattr("absorbed_mla.standard_mla.HAVE_TE", False)
        with refusal(message):
            get_standard_mla_layer_spec(make_config(**changes), backend=backend)

    def test_experts_missing(self):
        config = make_config()
        assert get_standard_mla_decoder_block_spec(config).layer_norm is RMSNorm
        config.moe_layer_freq = [0, 1]
        with refusal("moe_layer_freq=[0, 1] needs num_moe_experts"):
            get_standard_mla_decoder_block_spec(config)

    def test_transformer_engine_specs_are_megatrons(self, monkeypatch):
        """Megatron's own specs, with the options that depend on the config."""
        module = "absorbed_mla.standard_mla."
        monkeypatch.setattr(module + "HAVE_TE", True)
        for name in ("layer_with_transformer_engine", "decoder_block"):
            monkeypatch.setattr(f"{module}get_gpt_{name}_spec", lambda *args, **options: options)
        config = make_config(transformer_impl="transformer_engine")
        layer = get_standard_mla_layer_spec(config)
        assert layer == {"qk_layernorm": True, "multi_latent_attention": True}
        assert get_standard_mla_decoder_block_spec(config)["use_transformer_engine"]
