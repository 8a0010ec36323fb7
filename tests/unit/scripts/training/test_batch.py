"""The tokens of each context-parallel rank of scripts/train.py, against a simple computation.

If these fail, a model learns something else under context parallelism.
"""

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from training.batch import ContextParallelPart, make_batch, stage_padding

CPU = torch.device("cpu")
EOD = 9
_FIELDS = ("tokens", "labels", "position_ids", "loss_mask")
# What one token is, in the order of these fields and the padding mask.
_ENTRY = ("token", "label", "position", "mask", "padding")


def _rows(seed: int, batch: int, seq_length: int) -> torch.Tensor:
    """Random windows int32 [b, s + 1] in which documents end often, and some are empty."""
    rows = np.random.default_rng(seed).integers(0, EOD, size=(batch, seq_length + 1))
    ends = np.random.default_rng(seed + 1).random(rows.shape) < 0.2
    return torch.from_numpy(np.where(ends, EOD, rows).astype(np.int32))


def _chunks(cp: int, rank: int, values: list) -> list:
    """The rank's two of 2 cp equal chunks."""
    size = len(values) // (2 * cp)
    cut = [values[i * size : (i + 1) * size] for i in range(2 * cp)]
    return cut[rank] + cut[2 * cp - 1 - rank]


@pytest.mark.parametrize(("cp", "rank"), [(cp, rank) for cp in (1, 2, 4) for rank in range(cp)])
def test_every_rank_gets_its_chunks_of_a_window(cp, rank):
    rows = _rows(0, 3, 16)
    whole, part = make_batch(rows, CPU), make_batch(rows, CPU, part=ContextParallelPart(cp, rank))
    for name in _FIELDS:
        expected = [_chunks(cp, rank, row) for row in getattr(whole, name).tolist()]
        assert getattr(part, name).tolist() == expected
    assert part.packed_seq_params is None
    assert part.padding_mask is None


def test_a_window_that_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match="2 x 2 = 4 equal chunks, but the sequence has 6"):
        make_batch(_rows(0, 1, 6), CPU, part=ContextParallelPart(2, 0))


def _padded_by_hand(rows: torch.Tensor, cp: int, tp: int) -> list[list[dict]]:
    """Slots of (token, label, position, mask) of the whole pack, one token after the other."""
    tokens, labels = rows[0, :-1].tolist(), rows[0, 1:].tolist()
    slots: list[list[dict]] = [[]]
    for token, label in zip(tokens, labels):
        here = slots[-1]
        here.append({"token": token, "label": label, "mask": float(token != EOD), "padding": False})
        if token == EOD:
            slots.append([])
    slots = [slot for slot in slots if slot]
    padding = {"token": EOD, "label": EOD, "mask": 0.0, "padding": True}
    for slot in slots:
        while len(slot) % (2 * cp):
            slot.append(dict(padding))
    while sum(map(len, slots)) % (2 * cp * tp):
        slots[-1].append(dict(padding))
    for slot in slots:
        for position, entry in enumerate(slot):
            entry["position"] = position
    return slots


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (2, 2), (3, 1), (4, 3)])
def test_padded_packs_token_by_token(seed, cp, tp):
    rows = _rows(seed, 1, 37)
    slots = _padded_by_hand(rows, cp, tp)
    for rank in range(cp):
        batch = make_batch(rows, CPU, EOD, ContextParallelPart(cp, rank, tp))
        mine = [entry for slot in slots for entry in _chunks(cp, rank, slot)]
        found = zip(*(getattr(batch, name)[0].tolist() for name in (*_FIELDS, "padding_mask")))
        assert [dict(zip(_ENTRY, values)) for values in found] == mine
        packed = batch.packed_seq_params
        lengths = [sum(not entry["padding"] for entry in slot) for slot in slots]
        assert packed.cu_seqlens_q.diff().tolist() == lengths
        assert packed.cu_seqlens_q_padded.diff().tolist() == [len(slot) for slot in slots]
        assert packed.cu_seqlens_kv is packed.cu_seqlens_q
        assert packed.cu_seqlens_kv_padded is packed.cu_seqlens_q_padded
        assert packed.max_seqlen_q == packed.max_seqlen_kv == max(map(len, slots))
        assert batch.tokens.shape[1] % tp == 0


@pytest.mark.parametrize("cp", [2, 4])
def test_real_tokens_of_all_ranks_are_those_of_one(cp):
    rows = _rows(3, 1, 50)
    whole = make_batch(rows, CPU, EOD)
    parts = [make_batch(rows, CPU, EOD, ContextParallelPart(cp, rank)) for rank in range(cp)]
    columns = []
    for batch in (whole, *parts):
        fields = torch.stack([getattr(batch, name)[0].double() for name in _FIELDS], dim=1)
        columns.append(fields if batch.padding_mask is None else fields[~batch.padding_mask[0]])
    assert sorted(torch.cat(columns[1:]).tolist()) == sorted(columns[0].tolist())


def test_labels_are_the_next_tokens():
    batch = make_batch(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), CPU)
    assert batch.tokens.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert batch.labels.tolist() == [[2, 3, 4], [6, 7, 8]]
    assert batch.loss_mask.sum() == 6


def test_packed_documents_are_sequences_of_their_own():
    batch = make_batch(torch.tensor([[5, 6, 9, 7, 9, 9, 8]]), CPU, packed_eod=9)
    assert batch.packed_seq_params.cu_seqlens_q.tolist() == [0, 3, 5, 6]
    assert batch.packed_seq_params.max_seqlen_q == 3
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0]]
    # What follows an end token is another document's first token: nothing to learn from.
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 0, 0]]
    # Without context parallelism nothing is padded.
    assert batch.padding_mask is None
    assert batch.packed_seq_params.cu_seqlens_q_padded is None


@pytest.mark.parametrize(
    ("sequence_parallel", "first_stage", "expected"),
    [(False, False, [1, 0, 0, 1]), (True, True, [1, 0, 0, 1]), (True, False, [0, 1])],
)
def test_only_the_first_pipeline_stage_cuts_padding_itself(
    monkeypatch, sequence_parallel, first_stage, expected
):
    monkeypatch.setattr(parallel_state, "is_pipeline_first_stage", lambda: first_stage)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    mask = torch.tensor([[1, 0, 0, 1]]).bool()
    assert stage_padding(mask, sequence_parallel).tolist() == [[bool(x) for x in expected]]
    assert stage_padding(None, sequence_parallel) is None
