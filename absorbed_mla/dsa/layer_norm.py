"""LayerNorm with a bias, for the keys of an indexer, without TransformerEngine or apex."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim (arXiv:1607.06450).

    It has the constructor of Megatron's norms.

    Args:
        config: Read for ``normalization``, ``params_dtype`` and ``layernorm_zero_centered_gamma``.
        hidden_size: Width of the last dim.
        eps: Added to the variance.

    Raises:
        ValueError: If ``config.normalization`` is not ``"LayerNorm"``.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_host_kwargs
    ) -> None:
        super().__init__()
        if config.normalization != "LayerNorm":
            raise ValueError(
                "the indexer's keys have a LayerNorm, got "
                f"normalization={config.normalization!r} for it"
            )
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        like = {"dtype": config.params_dtype, "device": device}
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(initial(hidden_size, **like))
        self.bias = nn.Parameter(torch.zeros(hidden_size, **like))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., hidden_size] in fp32 (fp64 for fp64), in the weight's dtype."""
        compute = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(compute)
        if self.zero_centered:
            weight = weight + 1
        normed = F.layer_norm(x.to(compute), weight.shape, weight, self.bias.to(compute), self.eps)
        return normed.to(self.weight.dtype)

    def extra_repr(self) -> str:
        """Width and epsilon, for ``print(model)``."""
        return f"{self.weight.numel()}, eps={self.eps}"
