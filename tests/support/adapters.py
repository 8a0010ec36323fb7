"""A low-rank adapter around a linear layer, as programs for fine-tuning put them into models."""

import torch
from torch import Tensor, nn


class LoRA(nn.Module):
    """The layer's output and that of two small matrices, which are all that is trained.

    The layer is a child, so its parameters have other names; its weight can be had as before.
    """

    def __init__(self, layer: nn.Module, rank: int = 2) -> None:
        super().__init__()
        layer.requires_grad_(False)
        self.to_wrap = layer
        rows, columns = layer.weight.shape
        self.down = nn.Parameter(torch.randn(rank, columns).to(layer.weight))
        self.up = nn.Parameter(torch.randn(rows, rank).to(layer.weight))

    @property
    def weight(self) -> Tensor:
        """Of the layer."""
        return self.to_wrap.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """As Megatron's linear layers."""
        out, bias = self.to_wrap(x)
        return out + x @ self.down.t() @ self.up.t(), bias


def wrap(module: nn.Module, name: str) -> None:
    """Put an adapter around the layer of this name."""
    setattr(module, name, LoRA(getattr(module, name)))
