"""Small parts that a whole layer hides: norm, rotary table, token positions, delayed gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from absorbed_mla.norm import RMSNorm
from absorbed_mla.rope import RotaryTable
from absorbed_mla.sequences import SequenceLayout
from tests.support.cases import TINY, config_for
from tests.support.harness import Setup, build_attention
from tests.support.numerics import relative_error

CPU = torch.device("cpu")


class TestNorm:
    @pytest.mark.parametrize("zero_centered", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_equals_its_definition(self, dtype, zero_centered):
        """In bf16 only the result is rounded; a gain stored as an offset from 1 counts as gain."""
        config = config_for(TINY, dtype, layernorm_zero_centered_gamma=zero_centered)
        norm = RMSNorm(config, 24, eps=1e-2)
        initial = 0.0 if zero_centered else 1.0
        assert torch.equal(norm.weight.cpu(), torch.full((24,), initial, dtype=dtype))
        with torch.no_grad():
            norm.weight.add_(torch.linspace(-0.5, 0.5, 24).to(norm.weight))
        x = torch.randn(5, 2, 24, device=norm.weight.device).to(dtype)
        gain = norm.weight.double() + (1 if zero_centered else 0)
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt() * gain
        found = norm(x)
        assert found.dtype == dtype
        assert relative_error(found, exact) < 2 * torch.finfo(dtype).eps

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_marks_its_weight(self, sequence_parallel):
        """Megatron sums marked gradients over the ranks, each of which saw its own tokens only."""
        config = config_for(TINY)
        config.sequence_parallel = sequence_parallel
        assert RMSNorm(config, 8).weight.sequence_parallel == sequence_parallel

    def test_is_printed_with_its_epsilon(self):
        assert repr(RMSNorm(config_for(TINY), 8, eps=1e-6)) == "RMSNorm(8, eps=1e-06)"


class TestRotaryTable:
    def test_growing_changes_no_row(self):
        config = config_for(TINY)
        table = RotaryTable(config)
        short = table.cos_sin(5, CPU)
        long = table.cos_sin(50, CPU)
        for fresh, a, b in zip(RotaryTable(config).cos_sin(50, CPU), short, long):
            assert torch.equal(b, fresh)
            assert torch.equal(a, fresh[:5])
        assert [len(x) for x in table.cos_sin(7, CPU)] == [7, 7]

    def test_is_built_rarely(self):
        """Sequences that get longer one token at a time must not each cost a table."""
        table = RotaryTable(config_for(TINY))
        tables = {table.cos_sin(length, CPU)[0].data_ptr() for length in range(1, 1000)}
        assert len(tables) <= 11


class TestPositions:
    def test_dense(self):
        layout = SequenceLayout.from_host(None, 5)
        assert layout.positions(CPU).tolist() == [0, 1, 2, 3, 4]
        assert layout.segments() == [(0, 5)]
        assert layout.max_position == 5

    @pytest.mark.parametrize(
        "lengths, slots, positions, segments",
        [
            ([0, 2, 2, 5], None, [0, 1, 0, 1, 2], [(0, 2), (2, 5)]),
            ([0, 1, 3], [0, 3, 5], [0, 1, 2, 0, 1], [(0, 1), (3, 5)]),
            ([0, 0], [0, 5], [0, 1, 2, 3, 4], []),
        ],
        ids=["empty_between", "padded", "all_padding"],
    )
    def test_packed(self, lengths, slots, positions, segments):
        """They start anew with each sequence, padding or not, and padding is in no sequence."""
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=torch.tensor(lengths),
            cu_seqlens_q_padded=None if slots is None else torch.tensor(slots),
        )
        layout = SequenceLayout.from_host(params, 5)
        assert layout.positions(CPU).tolist() == positions
        assert layout.segments() == segments
        assert layout.max_position == max(positions) + 1


class TestReadingBoundaries:
    """Every layer asks; reading from a GPU waits for all that it has to do."""

    def params(self, cu_seqlens: torch.Tensor) -> PackedSeqParams:
        return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)

    def test_again_after_a_change(self):
        params = self.params(torch.tensor([0, 2, 5]))
        assert SequenceLayout.from_host(params, 5).segments() == [(0, 2), (2, 5)]
        params.cu_seqlens_q[1] = 3
        assert SequenceLayout.from_host(params, 5).segments() == [(0, 3), (3, 5)]

    def test_in_inference_mode(self):
        """Such tensors do not count their changes."""
        with torch.inference_mode():
            params = self.params(torch.tensor([0, 2, 5]))
            SequenceLayout.from_host(params, 5)
            params.cu_seqlens_q[1] = 4
            assert SequenceLayout.from_host(params, 5).segments() == [(0, 4), (4, 5)]


@pytest.mark.parametrize("q_lora_rank", [TINY.q_lora_rank, None])
def test_delayed_weight_gradients(q_lora_rank):
    """Megatron asks for them after backward; every layer that is applied must be asked once."""
    attention = build_attention(replace(TINY, q_lora_rank=q_lora_rank), Setup())
    asked = []
    for name, child in attention.named_children():
        child.backward_dw = lambda name=name: asked.append(name)
    attention.backward_dw()
    applied = {"linear_kv_down_proj", "linear_proj"}
    applied |= {"linear_q_down_proj", "linear_q_up_proj"} if q_lora_rank else {"linear_q_proj"}
    assert sorted(asked) == sorted(applied)
