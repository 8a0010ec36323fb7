"""The multi-head backward for Hopper with its kernels emulated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.backends import interpret_kernel
from tests.support.gluon_emulation import Emulation


def emulate_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ``multi_head_backward.backward`` on a CPU until the test ends."""
    from absorbed_mla.kernels.hopper import multi_head_backward, multi_head_backward_rows

    kernel = Emulation().load("multi_head_backward_kernel").attend_multi_head_backward
    monkeypatch.setitem(kernel.function.__globals__, "add_fragments", add_fragments)
    monkeypatch.setattr(multi_head_backward, "attend_multi_head_backward", kernel)
    monkeypatch.setattr(multi_head_backward, "starts", starts)
    interpret_kernel(monkeypatch, multi_head_backward_rows, "_query_gradient_kernel")


def add_fragments(part: Tensor, target) -> None:
    """``add_fragments`` in PyTorch: groups of 8 columns, warpgroups, warps, rows, pairs, .."""
    # warp, half of its rows, row, warpgroup, group, pair, column
    numbers = part.view(4, 2, 8, 2, -1, 4, 2).permute(4, 3, 0, 2, 5, 1, 6).flatten()
    (target + torch.arange(len(numbers))).add(numbers, torch.tensor(True))


def starts(grad_out, grad_lse, out, lse, scale, sink=None):
    """What the function of this name computes."""
    products = out.float() * grad_out.float()
    delta = (products if sink is None else products.where(out != 0, 0)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    seen = lse != -torch.inf
    both = torch.where(seen, -lse / scale, -torch.inf), torch.where(seen, -delta, 0)
    rows = (torch.nn.functional.pad(x.flatten(1), (0, 0, 0, -len(x) % 4)) for x in both)
    of_sink = None
    if sink is not None:
        of_sink = -((sink - lse).exp() * delta).where(seen, 0).sum((0, 1))
    return *(x.t().contiguous()[:, : len(lse)] for x in rows), of_sink
