"""Which exchange ``cp_comm_type="auto"`` takes."""

from dataclasses import replace

import pytest
import torch

from absorbed_mla import MLADims
from absorbed_mla.context_parallel.choice import choose
from absorbed_mla.context_parallel.strategy import ContextParallel
from tests.support.backends import V3_DIMS

K = 1024


def dims(heads: int) -> MLADims:
    """DeepSeek-V3's with some of the heads on this rank."""
    return replace(V3_DIMS, num_heads_per_rank=heads)


@pytest.mark.parametrize(
    ("heads", "tokens", "cp_size", "expected"),
    [
        (128, 128 * K, 2, ("all_gather", True)),
        (128, 128 * K, 64, ("all_gather", True)),
        (128, 128 * K, 128, ("all_gather", False)),
        # Sixteen heads keep 5120 numbers of a token of theirs; gathered latents have 576 of each.
        (16, 128 * K, 8, ("all_gather", True)),
        (16, 128 * K, 16, ("all_gather", False)),
        # 5760 bytes of a token, 4 GiB at most.
        (128, 704 * K, 32, ("all_gather", True)),
        (128, 768 * K, 32, ("p2p", False)),
        # Or those of 163,840 numbers of this rank's.
        (128, 1024 * K, 28, ("all_gather", True)),
        (16, 1024 * K, 4, ("p2p", False)),
    ],
)
def test_choice(heads, tokens, cp_size, expected):
    bf16 = torch.bfloat16
    assert choose(dims(heads), tokens // cp_size, cp_size, bf16, keep=True) == expected
    again = expected[0], False
    assert choose(dims(heads), tokens // cp_size, cp_size, bf16, keep=False) == again


def test_wider_latents_take_more_memory():
    assert choose(dims(16), 64 * K, 8, torch.float32, keep=True)[0] == "all_gather"
    assert choose(dims(16), 88 * K, 8, torch.float32, keep=True)[0] == "p2p"


@pytest.mark.parametrize(
    ("given", "whole", "taken"),
    [
        (None, False, "auto"),
        ("auto", False, "auto"),
        ("allgather", False, "all_gather"),
        ("p2p", False, "p2p"),
        # Sparse attention: a query may choose keys of any rank.
        (None, True, "all_gather"),
        ("auto", True, "all_gather"),
        ("p2p", True, "p2p"),
    ],
)
def test_what_is_given_is_taken(given, whole, taken):
    assert ContextParallel(None, given, dims(128), whole).cp_comm_type == taken
