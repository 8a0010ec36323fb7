"""Muon as its authors describe it (Jordan 2024; Moonlight, arXiv:2502.16982), on one rank."""

import torch
from torch import Tensor
from torch.optim import Optimizer

# Of the quintic iteration, whose steps push every singular value towards 1.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalized(x: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of ``x`` = U S V^T, by Newton-Schulz iteration."""
    a, b, c = QUINTIC
    wide = x.mT if x.shape[0] > x.shape[1] else x
    wide = wide / wide.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if x.shape[0] > x.shape[1] else wide


def update_of(gradient: Tensor) -> Tensor:
    """Moonlight's update: the root mean square of its elements does not depend on the shape."""
    return 0.2 * max(gradient.shape) ** 0.5 * orthogonalized(gradient)


class ReferenceMuon(Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay."""

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95, decay: float = 0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        """Update every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, group)
        return loss

    def _update(self, matrix: Tensor, group: dict) -> None:
        state = self.state[matrix]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["momentum"] = torch.zeros_like(matrix)
        state["step"] += 1
        assert state["step"] == group["steps"], "a step of the optimizer is one of every matrix"
        state["momentum"].mul_(group["momentum"]).add_(matrix.grad)
        ahead = matrix.grad + group["momentum"] * state["momentum"]
        matrix.mul_(1 - group["lr"] * group["decay"])
        matrix.sub_(group["lr"] * update_of(ahead))
