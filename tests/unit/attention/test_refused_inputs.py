"""Inputs of a call that are refused: arguments, packed-sequence boundaries, masks.

Boundaries that are off by one move tokens from one sequence to the next without any other sign.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from absorbed_mla import AbsorbedMLASelfAttention
from tests.support import world
from tests.support.cases import TINY
from tests.support.harness import Setup, build_attention
from tests.support.refusal import refusal

TOKENS, BATCH = 6, 2


@pytest.fixture(scope="module")
def attention() -> AbsorbedMLASelfAttention:
    return build_attention(TINY, Setup())


def hidden_states(tokens: int = TOKENS, batch: int = BATCH, **kwargs) -> torch.Tensor:
    kwargs = {"dtype": torch.float64, "device": world.device(), **kwargs}
    return torch.zeros(tokens, batch, TINY.hidden, **kwargs)


class TestForwardArguments:
    @pytest.mark.parametrize(
        "name",
        [
            "key_value_states",
            "rotary_pos_emb",
            "rotary_pos_cos",
            "rotary_pos_sin",
            "rotary_pos_cos_sin",
            "attention_bias",
            "position_ids",
            "sequence_len_offset",
        ],
    )
    def test_unsupported(self, attention, name):
        given = torch.zeros(1)
        with refusal(f"does not support {name}", "pass None", "got Tensor"):
            attention(hidden_states(), None, **{name: given})

    def test_inference_context_of_another_kind(self, attention):
        with refusal("inference_context must be", "got SimpleNamespace"), torch.no_grad():
            attention(hidden_states(), None, inference_context=SimpleNamespace())

    def test_graphs_in_training(self, attention, monkeypatch):
        """Megatron's own graphs are for inference; evaluation without a context goes on."""
        monkeypatch.setattr(attention.config, "cuda_graph_impl", "local")
        with refusal("cuda_graph_impl='local' captures inference only", "toggle_cuda_graphs"):
            attention(hidden_states(), None)
        with torch.no_grad():
            attention(hidden_states(), None)

    @torch.no_grad()
    def test_graphs_of_a_static_context(self, attention, monkeypatch):
        """A replay would write every token to the place of the captured one."""
        monkeypatch.setattr(attention.config, "cuda_graph_impl", "local")
        context = StaticInferenceContext(BATCH, TOKENS)
        with refusal("cuda_graph_impl='local'", "StaticInferenceContext", "'none'"):
            attention(hidden_states(), None, inference_context=context)

    @pytest.mark.parametrize(
        ("given", "parts"),
        [
            ({"attention_mask": torch.zeros(1, 1, 6, 6, dtype=torch.bool)}, ["the causal mask"]),
            (
                {"packed_seq_params": PackedSeqParams(qkv_format="thd")},
                ["packed_seq_params must be None"],
            ),
        ],
    )
    def test_inference_with(self, attention, given, parts):
        context = StaticInferenceContext(BATCH, TOKENS)
        with torch.no_grad(), refusal(*parts):
            attention(
                hidden_states(), **{"attention_mask": None, **given}, inference_context=context
            )

    @torch.no_grad()
    @pytest.mark.parametrize("shape", [(1, 1, 5, 6), (1, 1, 6, 7), (6, 6), (3, 1, 6, 6)])
    def test_mask_of_another_shape_in_inference(self, attention, shape):
        """It hides later tokens, of a call that has other ones."""
        mask = torch.ones(shape, dtype=torch.bool, device=world.device())
        mask = mask.triu(shape[-1] - shape[-2] + 1)
        context = StaticInferenceContext(BATCH, TOKENS)
        with refusal("attention_mask", "[2 or 1, 1, 6 new tokens, 6 cached", f"got shape {shape}"):
            attention(hidden_states(), mask, inference_context=context)

    @pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
    @pytest.mark.parametrize("tokens, batch", [(0, 2), (5, 0), (0, 0)])
    def test_nothing(self, form, tokens, batch):
        """No token, or no sequence: nothing comes of it, in training and over a cache."""
        for recompute in ((), ("mla_up_proj",), ("core_attn",)):
            attention = build_attention(TINY, Setup(form=form, recompute=recompute))
            x = hidden_states(tokens, batch).requires_grad_()
            output, _ = attention(x, None)
            output.sum().backward()
            assert output.shape == x.shape == x.grad.shape
            weight = attention.linear_k_up_proj.weight
            assert weight.grad is None or not weight.grad.any()
            with torch.no_grad():
                context = StaticInferenceContext(2, 8)
                assert attention(x, None, inference_context=context)[0].shape == x.shape

    def test_inference_with_gradients(self, attention):
        with refusal("inference_context needs torch.no_grad()"):
            attention(hidden_states(), None, inference_params=StaticInferenceContext(BATCH, TOKENS))

    def test_inference_without_order(self):
        attention = build_attention(TINY, Setup(mask_type=AttnMaskType.no_mask))
        context = StaticInferenceContext(BATCH, TOKENS)
        with torch.no_grad(), refusal("causal attn_mask_type"):
            attention(hidden_states(), None, inference_context=context)

    @torch.no_grad()
    def test_causal_mask_in_inference(self, attention):
        """The one mask that says what is the case anyway; Megatron's engines may pass it."""
        x, outputs = torch.randn(TOKENS, BATCH, TINY.hidden).double().to(world.device()), []
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).triu(1)
        for given in (None, mask[None, None]):
            context = StaticInferenceContext(BATCH, TOKENS)
            first, _ = attention(x[:4], None, inference_context=context)
            context.sequence_len_offset = 4
            rows = given if given is None else given[..., 4:, :]
            second, _ = attention(x[4:], rows, inference_context=context)
            outputs.append(torch.cat((first, second)))
        assert torch.equal(*outputs)

    def test_local_context_parallelism(self, attention):
        params = PackedSeqParams(qkv_format="thd", local_cp_size=2)
        with refusal("packed_seq_params.local_cp_size is 2", "pass cp_group"):
            attention(hidden_states(), None, packed_seq_params=params)

    def test_contradicting_context_parallelism(self, attention):
        params = PackedSeqParams(
            qkv_format="thd", local_cp_size=4, cp_group=torch.distributed.group.WORLD
        )
        with refusal("local_cp_size is 4", "cp_group has 1 ranks"):
            attention(hidden_states(), None, packed_seq_params=params)

    @pytest.mark.parametrize(
        "shape", [(TOKENS, TINY.hidden), (1, TOKENS, BATCH, TINY.hidden), (TOKENS, BATCH, 31)]
    )
    def test_shape(self, attention, shape):
        x = torch.zeros(shape, dtype=torch.float64)
        with refusal("hidden_states", "hidden_size=32", f"got {shape}"):
            attention(x, None)

    def test_dtype(self, attention):
        x = hidden_states(dtype=torch.bfloat16)
        with refusal("hidden_states", "torch.float64", "got torch.bfloat16"):
            attention(x, None)

    def test_autocast(self):
        """It would round scores to bf16 in forward and not in backward."""
        attention = build_attention(TINY, Setup(dtype=torch.float32))
        autocast = torch.autocast(world.device().type, dtype=torch.bfloat16)
        with autocast, refusal("autocast", "bf16=True"):
            attention(hidden_states(dtype=torch.float32), None)

    def test_batch_with_packed_sequences(self, attention):
        params = packed(cu_seqlens_q=[0, TOKENS])
        with refusal("packed sequences", "hidden_states of batch 1", "got 2"):
            attention(hidden_states(), None, packed_seq_params=params)

    def test_query_key_value_tensors(self, attention):
        """The host's method has no counterpart: a caller must not get something else."""
        with pytest.raises(NotImplementedError, match="no query, key and value"):
            attention.get_query_key_value_tensors(hidden_states())


def packed(qkv_format: str = "thd", **cu_seqlens) -> PackedSeqParams:
    tensors = {
        name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
        for name, value in cu_seqlens.items()
    }
    return PackedSeqParams(qkv_format=qkv_format, **tensors)


# Parameters -> what the message holds; there are six tokens.
BAD_BOUNDARIES = {
    "format": (packed("bshd", cu_seqlens_q=[0, 6]), ("qkv_format", "'thd'", "got 'bshd'")),
    "sbhd_with_boundaries": (packed("sbhd", cu_seqlens_q=[0, 6]), ("'thd'", "got 'sbhd'")),
    "absent": (packed(), ("cu_seqlens_q", "1-d tensor", "got None")),
    "a_list": (packed(cu_seqlens_q=(0, 6)), ("cu_seqlens_q", "1-d tensor", "got (0, 6)")),
    "two_dims": (
        packed(cu_seqlens_q=[[0, 6]]),
        ("cu_seqlens_q", "1-d tensor", "got a tensor of shape (1, 2)"),
    ),
    "one_entry": (packed(cu_seqlens_q=[0]), ("at least 2 entries", "shape (1,)")),
    "floats": (
        packed(cu_seqlens_q=torch.tensor([0.0, 6.0])),
        ("cu_seqlens_q", "int32 or int64", "got torch.float32"),
    ),
    "not_from_zero": (packed(cu_seqlens_q=[1, 6]), ("cu_seqlens_q", "start at 0", "got [1, 6]")),
    "decreasing": (packed(cu_seqlens_q=[0, 4, 3, 6]), ("not decrease", "got [0, 4, 3, 6]")),
    "too_short": (packed(cu_seqlens_q=[0, 5]), ("cu_seqlens_q ends at 5", "6 tokens")),
    "too_long": (packed(cu_seqlens_q=[0, 7]), ("cu_seqlens_q ends at 7", "6 tokens")),
    "padded_too_short": (
        packed(cu_seqlens_q=[0, 4], cu_seqlens_q_padded=[0, 5]),
        ("cu_seqlens_q_padded ends at 5", "6 tokens"),
    ),
    "padded_decreasing": (
        packed(cu_seqlens_q=[0, 2, 4], cu_seqlens_q_padded=[0, 7, 6]),
        ("cu_seqlens_q_padded", "not decrease", "got [0, 7, 6]"),
    ),
    "padded_of_other_length": (
        packed(cu_seqlens_q=[0, 2, 4], cu_seqlens_q_padded=[0, 6]),
        ("cu_seqlens_q_padded has 2 entries", "cu_seqlens_q has 3"),
    ),
    "longer_than_slot": (
        packed(cu_seqlens_q=[0, 3, 4], cu_seqlens_q_padded=[0, 2, 6]),
        ("sequence 0 has 3 tokens", "only 2 by cu_seqlens_q_padded"),
    ),
    "other_keys": (
        packed(cu_seqlens_q=[0, 6], cu_seqlens_kv=[0, 3, 6]),
        ("cu_seqlens_kv must equal cu_seqlens_q", "got [0, 3, 6] and [0, 6]"),
    ),
    "other_padded_keys": (
        packed(
            cu_seqlens_q=[0, 2, 4], cu_seqlens_q_padded=[0, 3, 6], cu_seqlens_kv_padded=[0, 2, 6]
        ),
        ("cu_seqlens_kv_padded must equal cu_seqlens_q_padded", "got [0, 2, 6] and [0, 3, 6]"),
    ),
}


class TestPackedSequences:
    @pytest.mark.parametrize("case", BAD_BOUNDARIES)
    def test_bad_boundaries(self, attention, case):
        params, parts = BAD_BOUNDARIES[case]
        with refusal(*parts):
            attention(hidden_states(batch=1), None, packed_seq_params=params)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_both_integer_types(self, attention, dtype):
        params = packed(cu_seqlens_q=torch.tensor([0, 2, 6], dtype=dtype))
        output, _ = attention(hidden_states(batch=1), None, packed_seq_params=params)
        assert output.shape == (TOKENS, 1, TINY.hidden)

    def test_format_sbhd_without_boundaries(self, attention):
        """Megatron's data loaders pass it along; it means an ordinary batch."""
        x = torch.randn_like(hidden_states())
        params = PackedSeqParams(qkv_format="sbhd")
        output, _ = attention(x, None, packed_seq_params=params)
        assert torch.equal(output, attention(x, None)[0])


class TestMasks:
    @pytest.mark.parametrize(
        "mask",
        [
            torch.zeros(BATCH, 1, TOKENS, TOKENS),
            torch.zeros(TOKENS, TOKENS, dtype=torch.bool),
            torch.zeros(3, 1, TOKENS, TOKENS, dtype=torch.bool),
            torch.zeros(BATCH, TINY.heads, TOKENS, TOKENS, dtype=torch.bool),
            torch.zeros(BATCH, 1, TOKENS - 1, TOKENS, dtype=torch.bool),
            torch.zeros(BATCH, 1, TOKENS, TOKENS + 1, dtype=torch.bool),
        ],
        ids=lambda mask: f"{str(mask.dtype).removeprefix('torch.')}{tuple(mask.shape)}",
    )
    def test_shape_and_dtype(self, attention, mask):
        accepts = f"[{BATCH} or 1, 1, {TOKENS} or 1, {TOKENS}]"
        got = f"got {mask.dtype} {tuple(mask.shape)}"
        with refusal("attention_mask", "bool", accepts, got):
            attention(hidden_states(), mask)

    def test_with_packed_sequences(self, attention):
        mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool)
        params = packed(cu_seqlens_q=[0, TOKENS])
        with refusal("attention_mask must be None", "packed sequences", "(1, 1, 6, 6)"):
            attention(hidden_states(batch=1), mask, packed_seq_params=params)

    def test_on_another_device(self, attention):
        mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
        with refusal("attention_mask must be on", str(world.device()), "got meta"):
            attention(hidden_states(), mask)

    def test_mask_where_none_belongs(self):
        attention = build_attention(TINY, Setup(mask_type=AttnMaskType.no_mask))
        mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool)
        with refusal("attention_mask must be None", "attn_mask_type=no_mask", "(1, 1, 6, 6)"):
            attention(hidden_states(), mask)

    def test_mask_missing(self):
        attention = build_attention(TINY, Setup(mask_type=AttnMaskType.arbitrary))
        with refusal("attn_mask_type=arbitrary", "needs an attention_mask", "got None"):
            attention(hidden_states(), None)
