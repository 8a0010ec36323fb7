"""Inputs of a call that are refused: arguments, packed-sequence boundaries, masks.

Boundaries that are off by one move tokens from one sequence to the next without any other sign.
"""

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


def mask(*shape: int, **kwargs) -> torch.Tensor:
    return torch.zeros(shape, **{"dtype": torch.bool, **kwargs})


def packed(qkv_format: str = "thd", **cu_seqlens) -> PackedSeqParams:
    tensors = {
        name: torch.tensor(value, dtype=torch.int32) if isinstance(value, list) else value
        for name, value in cu_seqlens.items()
    }
    return PackedSeqParams(qkv_format=qkv_format, **tensors)


NOT_TAKEN = ("key_value_states", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin")
NOT_TAKEN += ("rotary_pos_cos_sin", "attention_bias", "position_ids", "sequence_len_offset")
WHOLE_PACK = packed(cu_seqlens_q=[0, TOKENS])
WRONG_MASKS = (
    mask(BATCH, 1, TOKENS, TOKENS, dtype=torch.float32),
    mask(TOKENS, TOKENS),
    mask(3, 1, TOKENS, TOKENS),
    mask(BATCH, TINY.heads, TOKENS, TOKENS),
    mask(BATCH, 1, TOKENS - 1, TOKENS),
    mask(BATCH, 1, TOKENS, TOKENS + 1),
)
# Arguments of a call -> what the message holds.
REFUSED = {
    **{
        name: ({name: torch.zeros(1)}, (f"does not support {name}", "pass None", "got Tensor"))
        for name in NOT_TAKEN
    },
    **{
        f"hidden_states {shape}": (
            {"hidden_states": torch.zeros(shape, dtype=torch.float64)},
            ("hidden_states", "hidden_size=32", f"got {shape}"),
        )
        for shape in [(TOKENS, TINY.hidden), (1, TOKENS, BATCH, TINY.hidden), (TOKENS, BATCH, 31)]
    },
    "hidden_states in bf16": (
        {"hidden_states": hidden_states(dtype=torch.bfloat16)},
        ("hidden_states", "torch.float64", "got torch.bfloat16"),
    ),
    "pack of a batch": (
        {"packed_seq_params": WHOLE_PACK},
        ("packed sequences", "hidden_states of batch 1", "got 2"),
    ),
    "local_cp_size alone": (
        {"packed_seq_params": PackedSeqParams(qkv_format="thd", local_cp_size=2)},
        ("packed_seq_params.local_cp_size is 2", "pass cp_group"),
    ),
    **{
        f"mask {number}": (
            {"attention_mask": given},
            (
                "attention_mask",
                "bool",
                f"[{BATCH} or 1, 1, {TOKENS} or 1, {TOKENS}]",
                f"got {given.dtype} {tuple(given.shape)}",
            ),
        )
        for number, given in enumerate(WRONG_MASKS)
    },
    "mask with a pack": (
        {
            "hidden_states": hidden_states(batch=1),
            "attention_mask": ~mask(1, 1, TOKENS, TOKENS, device=world.device()),
            "packed_seq_params": WHOLE_PACK,
        },
        ("attention_mask must be None", "packed_seq_params", "(1, 1, 6, 6)"),
    ),
    "mask of other tokens with a pack": (
        {
            "hidden_states": hidden_states(batch=1),
            "attention_mask": mask(1, 1, TOKENS, TOKENS - 1),
            "packed_seq_params": WHOLE_PACK,
        },
        ("attention_mask must be bool", "6 or 1, 6]", "(1, 1, 6, 5)"),
    ),
    "mask elsewhere": (
        {"attention_mask": mask(1, 1, TOKENS, TOKENS, device="meta")},
        ("attention_mask must be on", str(world.device()), "got meta"),
    ),
}


class TestTraining:
    @pytest.mark.parametrize("case", REFUSED)
    def test_refused(self, attention, case):
        arguments, parts = REFUSED[case]
        with refusal(*parts):
            attention(**{"hidden_states": hidden_states(), "attention_mask": None, **arguments})

    def test_mask(self):
        attention = build_attention(TINY, Setup(mask_type=AttnMaskType.no_mask))
        with refusal("attention_mask must be None", "attn_mask_type=no_mask", "(1, 1, 6, 6)"):
            attention(hidden_states(), mask(1, 1, TOKENS, TOKENS))
        attention = build_attention(TINY, Setup(mask_type=AttnMaskType.arbitrary))
        with refusal("attn_mask_type=arbitrary", "needs an attention_mask", "got None"):
            attention(hidden_states(), None)

    def test_contradicting_context_parallelism(self, attention):
        world_group = torch.distributed.group.WORLD
        params = PackedSeqParams(qkv_format="thd", local_cp_size=4, cp_group=world_group)
        with refusal("local_cp_size is 4", "cp_group has 1 ranks"):
            attention(hidden_states(), None, packed_seq_params=params)

    def test_autocast(self):
        """It would round scores to bf16 in forward and not in backward."""
        attention = build_attention(TINY, Setup(dtype=torch.float32))
        autocast = torch.autocast(world.device().type, dtype=torch.bfloat16)
        with autocast, refusal("autocast", "bf16=True"):
            attention(hidden_states(dtype=torch.float32), None)

    def test_query_key_value_tensors(self, attention):
        """The host's method has no counterpart: a caller must not get something else."""
        with pytest.raises(NotImplementedError, match="no query, key and value"):
            attention.get_query_key_value_tensors(hidden_states())


CAUSAL = ~torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


class TestInference:
    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (
                {"inference_context": SimpleNamespace()},
                ("inference_context must be", "got SimpleNamespace"),
            ),
            ({"attention_mask": mask(1, 1, 6, 6)}, ("the causal mask",)),
            (
                {"packed_seq_params": PackedSeqParams(qkv_format="thd")},
                ("packed_seq_params must be None",),
            ),
            # It hides later tokens, of a call that has other ones.
            *(
                (
                    {"attention_mask": torch.ones(shape).triu(shape[-1] - shape[-2] + 1).bool()},
                    ("attention_mask", "[2 or 1, 1, 6 new tokens, 6 cached", f"got shape {shape}"),
                )
                for shape in [(1, 1, 5, 6), (1, 1, 6, 7), (6, 6), (3, 1, 6, 6)]
            ),
        ],
        ids=str,
    )
    @torch.no_grad()
    def test_refused(self, attention, arguments, parts):
        given = {"attention_mask": None, "inference_context": StaticInferenceContext(BATCH, TOKENS)}
        given |= arguments
        if given["attention_mask"] is not None:
            given["attention_mask"] = given["attention_mask"].to(world.device())
        with refusal(*parts):
            attention(hidden_states(), **given)

    @torch.no_grad()
    def test_graphs_of_a_static_context(self, attention, monkeypatch):
        """A replay would write every token to the place of the captured one."""
        monkeypatch.setattr(attention.config, "cuda_graph_impl", "local")
        context = StaticInferenceContext(BATCH, TOKENS)
        with refusal("cuda_graph_impl='local'", "StaticInferenceContext", "'none'"):
            attention(hidden_states(), None, inference_context=context)

    def test_with_gradients(self, attention):
        with refusal("inference_context needs torch.no_grad()"):
            attention(hidden_states(), None, inference_params=StaticInferenceContext(BATCH, TOKENS))

    @torch.no_grad()
    def test_without_order(self):
        attention = build_attention(TINY, Setup(mask_type=AttnMaskType.no_mask))
        context = StaticInferenceContext(BATCH, TOKENS)
        with refusal("causal attn_mask_type"):
            attention(hidden_states(), None, inference_context=context)

    @torch.no_grad()
    def test_causal_mask(self, attention):
        """The one mask that says what is the case anyway; Megatron's engines may pass it."""
        x, outputs = torch.randn(TOKENS, BATCH, TINY.hidden).double().to(world.device()), []
        for given in (None, CAUSAL.to(x.device)[None, None]):
            context = StaticInferenceContext(BATCH, TOKENS)
            first, _ = attention(x[:4], None, inference_context=context)
            context.sequence_len_offset = 4
            rows = given if given is None else given[..., 4:, :]
            second, _ = attention(x[4:], rows, inference_context=context)
            outputs.append(torch.cat((first, second)))
        assert torch.equal(*outputs)


@pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
@pytest.mark.parametrize("tokens, batch", [(0, 2), (5, 0), (0, 0)])
def test_nothing(form, tokens, batch):
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
        output, _ = attention(x, None, packed_seq_params=PackedSeqParams(qkv_format="sbhd"))
        assert torch.equal(output, attention(x, None)[0])
