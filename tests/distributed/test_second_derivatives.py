"""Second derivatives raise under tensor and context parallelism too, for every strategy."""

import pytest
import torch

from tests.support import needs, world
from tests.support.cases import TINY, random_weights
from tests.support.harness import Setup, build_attention, load_weights, own_tokens
from tests.support.layouts import cut_layout

pytestmark = needs.processes(2)
MESSAGE = "has first derivatives only"
WAYS = {
    "all_gather": ({"cp": 2}, {"cp_comm_type": "all_gather"}),
    "p2p": ({"cp": 2}, {"cp_comm_type": "p2p"}),
    "tp": ({"tp": 2}, {}),
    "tp with sp": ({"tp": 2}, {"sequence_parallel": True}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_raises(way, form, layout):
    """A collective's gradient is a constant to autograd unless it is told otherwise."""
    sizes, fields = WAYS[way]
    with world.parallel(**sizes):
        setup = Setup(form=form, **fields)
        attention = build_attention(TINY, setup)
        load_weights(attention, TINY, setup, random_weights(TINY))
        tokens = cut_layout(layout, 2)
        x = own_tokens(
            tokens.random_rows(TINY.hidden, 1), tokens, setup, world.cp_group()
        ).requires_grad_()
        packed = tokens.packed_seq_params(world.device())
        output, _ = attention(x, None, packed_seq_params=packed)
        [found] = torch.autograd.grad(output.sum(), x, create_graph=True)
        for towards in (x, attention.linear_q_up_proj.weight, attention.linear_k_up_proj.weight):
            with pytest.raises(RuntimeError, match=MESSAGE):
                torch.autograd.grad(found.sum(), towards, retain_graph=True, allow_unused=True)
