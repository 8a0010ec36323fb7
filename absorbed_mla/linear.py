"""Linear layers: one that is whole on every rank, one that returns its weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as torch_module

from absorbed_mla.batch_invariant import parts
from absorbed_mla.batch_invariant.parallel_linear import duplicated_linear
from absorbed_mla.norm import mark_parameter


class _OneWeight(nn.Module):
    """Base of layers whose entry of a distributed checkpoint is their weight."""

    tp_group: torch.distributed.ProcessGroup
    # The axis of the weight that tensor-parallel ranks share out; none: each has all of it.
    _sharded_axes: ClassVar[dict[str, int]] = {}

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Checkpoint entry of the weight."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self._sharded_axes,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class DuplicatedLinear(_OneWeight):
    """Linear layer without bias whose whole weight is on every tensor-parallel rank.

    Under sequence parallelism a rank sees its own tokens only, so its gradient of the weight is
    partial. The weight is marked for Megatron to sum that over the tensor-parallel group, as
    TransformerEngine's duplicated layers are.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], object],
        tp_group: torch.distributed.ProcessGroup | None = None,
        **_host_kwargs,
    ) -> None:
        super().__init__()
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        )
        if config.perform_initialization:
            # PyTorch's default generator has the same state on all tensor-parallel ranks.
            init_method(self.weight)
        mark_parameter(
            self.weight,
            allreduce=True,
            sequence_parallel=config.sequence_parallel,
            tensor_model_parallel=False,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map ``x`` [..., input_size] to [..., output_size]; None stands for the bias."""
        if parts.fixed.count is not None:
            return duplicated_linear(x, self.weight), None
        return F.linear(x, self.weight), None

    def get_extra_state(self) -> None:
        """None, as in Megatron's own linear layers: its checkpoints have an entry for it."""

    def set_extra_state(self, state: object) -> None:
        """Nothing to restore."""

    def backward_dw(self) -> None:
        """Do nothing: the weight's gradient is never delayed, autograd computes it."""


class HeadwiseUpProjection(_OneWeight):
    """The up-projection W_UK or W_UV, sharded by heads; calling it returns the weight itself.

    What the weight is multiplied with depends on the form: the query (absorbed), the latent
    (expanded), or the output. It is a module that is called, because Megatron's overlapped
    parameter gather waits in the forward hooks of the module that owns a parameter.

    Megatron's ColumnParallelLinear creates the parameter, but is not a base class: FSDP wrappers
    that look for that class free its weight after the call, when the view is still in use.
    """

    _sharded_axes: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        head_dim: int,
        tp_group: torch.distributed.ProcessGroup | None = None,
        **host_kwargs,
    ) -> None:
        super().__init__()
        # Autograd accumulates this weight's gradient, so the constructor must not demand the fused
        # accumulation of Megatron's GEMMs, which may be on for the other layers.
        maker_config = copy.copy(config)
        maker_config.gradient_accumulation_fusion = False
        maker = ColumnParallelLinear(
            input_size, output_size, config=maker_config, tp_group=tp_group, **host_kwargs
        )
        self.weight = maker.weight
        self.tp_group = maker.tp_group
        self.head_dim = head_dim

    def forward(self) -> Tensor:
        """The weight as [N, head_dim, C], a view of the parameter."""
        weight = self.weight
        return weight.view(-1, self.head_dim, weight.shape[1])


def refuse_other_up_projections(*layers: nn.Module) -> None:
    """Refuse up-projections that are wrapped by ``fully_shard`` or by an adapter.

    The first frees their weight while it is in use; the second has no input to multiply.

    Raises:
        ValueError: Naming the layers and what to do instead.
    """
    for layer in layers:
        if not isinstance(layer, HeadwiseUpProjection):
            raise ValueError(
                "linear_k_up_proj and linear_v_up_proj must be a HeadwiseUpProjection, got "
                f"{type(layer).__name__}: an adapter around one has no input to multiply; "
                "absorbed_mla.lora.add_lora trains them, too"
            )
    if any(isinstance(layer, FSDPModule) for layer in layers):
        raise ValueError(
            "fully_shard cannot be applied to a HeadwiseUpProjection (linear_k_up_proj, "
            "linear_v_up_proj), which hands out its weight; apply it to the "
            "AbsorbedMLASelfAttention or to the layer around it"
        )


# Attribute of a forward hook that without gradient keeps no output, and returns it or a new tensor.
HOLDS_NO_OUTPUT = "holds_no_output"


def own_output(layer: nn.Module, x: Tensor) -> Tensor:
    """Output of a linear layer as a tensor that the caller may overwrite.

    It is copied if something else may hold it: a forward hook can store the output or replace it by
    a stored one (activation patching), and so can a layer that is not of a known package.
    """
    output, _ = layer(x)
    return output if _makes_its_output(layer) else output.clone()


def _holds_nothing(hook: Callable) -> bool:
    return getattr(hook, HOLDS_NO_OUTPUT, False) and not torch.is_grad_enabled()


def _makes_its_output(layer: nn.Module) -> bool:
    """Whether every call of the layer returns a new tensor that nothing else holds."""
    package = type(layer).__module__.partition(".")[0]
    return (
        package in ("absorbed_mla", "megatron", "transformer_engine")
        and "forward" not in vars(layer)
        and all(map(_holds_nothing, layer._forward_hooks.values()))
        and not torch_module._global_forward_hooks
    )
