"""Context-parallel groups of real ranks: those that are not the first of the job, and inference.

Run as ``torchrun --nproc-per-node N -m pytest tests/distributed`` with N = 2, 4.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext

from tests.support import needs, world
from tests.support.cases import TINY
from tests.support.execution import execute
from tests.support.harness import Setup, build_attention
from tests.support.layouts import cut_layout
from tests.support.refusal import refusal


@needs.processes(4)
@pytest.mark.parametrize("cp_comm_type", ["all_gather", "p2p"])
def test_groups_that_are_not_the_first_ranks(cp_comm_type):
    """At TP=2 and CP=2 the groups are {0, 2} and {1, 3}: a group's rank is no rank of the job."""
    with world.parallel(tp=2, cp=2):
        ranks = dist.get_process_group_ranks(world.cp_group())
        assert ranks == [world.rank() % 2, world.rank() % 2 + 2]
        setup = Setup(sequence_parallel=True, cp_comm_type=cp_comm_type)
        execute(TINY, setup, cut_layout("thd_padded", 2)).check()


@needs.processes(2, 4)
@pytest.mark.parametrize("cp_comm_type", ["all_gather", "p2p"])
@torch.inference_mode()
def test_inference_is_refused(cp_comm_type):
    """Each rank would cache its own part and attend to nothing else."""
    with world.parallel(cp=world.size()):
        attention = build_attention(TINY, Setup(cp_comm_type=cp_comm_type)).eval()
        x = torch.zeros(4, 1, TINY.hidden, dtype=torch.float64, device=world.device())
        context = StaticInferenceContext(1, 8)
        with refusal("inference_context", f"context_parallel_size=1, got {world.size()}"):
            attention(x, None, inference_context=context)
        assert not context.key_value_memory_dict
