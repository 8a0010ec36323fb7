"""Boundaries of packed sequences: positions and segments, read again when they change."""

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from absorbed_mla.sequences import SequenceLayout
from tests.support import needs, world
from tests.support.layouts import packed

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("write", ["in place", "data", "numpy", "inference mode"])
def test_boundaries_are_read_again(write):
    """One pack after the other, written into the same tensor, which need not count its changes."""
    with torch.inference_mode(write == "inference mode"):
        entries = np.array([0, 2, 5])
        cu_seqlens = torch.from_numpy(entries) if write == "numpy" else torch.tensor([0, 2, 5])
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens
        )
        assert SequenceLayout.from_host(params, 5).segments() == [(0, 2), (2, 5)]
        written = {"numpy": entries, "data": cu_seqlens.data}.get(write, cu_seqlens)
        written[1] = 3
        assert SequenceLayout.from_host(params, 5).segments() == [(0, 3), (3, 5)]


@needs.gpu
def test_on_a_gpu_they_are_read_once(monkeypatch):
    """Reading waits for everything that the GPU has to do."""
    params, reads = packed((4, 5)).packed_seq_params(world.device()), []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x) or plain(x))
    for _ in range(3):
        SequenceLayout.from_host(params, 9)
    assert len(reads) == 1
