"""RMSNorm that works under sequence parallelism without TransformerEngine or apex."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from absorbed_mla.batch_invariant import is_enabled, parts
from absorbed_mla.batch_invariant.norms import rms_norm, scaled
from absorbed_mla.graph_capture import SaveForBackward

# Tokens of a step that decodes, at most; PyTorch's kernel takes 6 us for one.
_FEW_ROWS = 512


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim (arXiv:1910.07467).

    It has the constructor of Megatron's norms. Under sequence parallelism a rank normalises its
    own tokens only, so its gradient of the weight is partial: the weight's attribute
    ``sequence_parallel`` tells Megatron's ``finalize_model_grads`` to sum it over the
    tensor-parallel group. Megatron's own local norm does not set the attribute and refuses
    sequence parallelism.

    Args:
        config: Read for ``normalization``, ``params_dtype``, ``sequence_parallel``,
            ``layernorm_zero_centered_gamma`` and ``cuda_graph_impl``.
        hidden_size: Width of the last dim.
        eps: Added to the mean square.

    Raises:
        ValueError: If ``config.normalization`` is not ``"RMSNorm"``.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_host_kwargs
    ) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(
                f"the local backend has RMSNorm only, got normalization={config.normalization!r}"
            )
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self._in_graphs = config.cuda_graph_impl == "local"
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(initial(hidden_size, dtype=config.params_dtype, device=device))
        mark_parameter(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., hidden_size] in fp32 (fp64 for fp64).

        The result has the weight's dtype, which differs from that of ``x`` where Megatron keeps the
        residual stream in fp32 (``fp32_residual_connection``).
        """
        if self._in_graphs and torch.is_grad_enabled():
            x = SaveForBackward.apply(x)
        plain = x.dtype == self.weight.dtype != torch.float64 and not self.zero_centered
        invariant = x.is_cuda and is_enabled(x.device)
        # Not in training without gradients, which may be computed again with them, to the same bit.
        few = not self.training and has_few_rows(x)
        if (invariant or few) and x.dtype != torch.float64:
            return rms_norm(x, self.weight, self.eps, self.zero_centered, self.weight.dtype)
        if plain and x.is_cuda and not invariant:
            # PyTorch's fused kernel, which computes in fp32 too.
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        compute = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(compute)
        if self.zero_centered:
            weight = weight + 1
        normed = x.to(compute)
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + self.eps)
        by_parts = parts.fixed.count is not None
        normed = scaled(normed, weight, self.weight) if by_parts else normed * weight
        return normed.to(self.weight.dtype)

    def extra_repr(self) -> str:
        """Width and epsilon, for ``print(model)``."""
        return f"{self.weight.numel()}, eps={self.eps}"


def has_few_rows(x: Tensor) -> bool:
    """Whether a step of generation has so few that this package's kernel is the faster."""
    return not torch.is_grad_enabled() and few_rows(x)


def few_rows(x: Tensor) -> bool:
    """Whether there are as few on a GPU as in a step of generation."""
    return x.is_cuda and x.numel() <= _FEW_ROWS * x.shape[-1]


def is_plain(norm: nn.Module, x: Tensor) -> bool:
    """Whether calling a norm with ``x`` does what an :class:`RMSNorm` does and nothing else.

    A kernel may then compute it among other things. Hooks would miss their call: activation
    patching has some, and Megatron's parameter gather waits in one.
    """
    return (
        type(norm) is RMSNorm
        and norm.weight.dtype == x.dtype != torch.float64
        and "forward" not in vars(norm)
        and not (norm._forward_hooks or norm._forward_pre_hooks)
        and not (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
    )


def mark_parameter(parameter: nn.Parameter, **marks: bool) -> None:
    """Set attributes of a parameter that tell Megatron how to reduce its gradient over ranks."""
    for name, value in marks.items():
        setattr(parameter, name, value)
