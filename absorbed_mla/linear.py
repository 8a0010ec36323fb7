"""The linear layers that Megatron's local backend lacks or that MLA uses in its own way."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as torch_module

from absorbed_mla.norm import mark_parameter


class DuplicatedLinear(nn.Module):
    """A linear layer held whole by every tensor-parallel rank, without bias.

    Under sequence parallelism a rank sees its own tokens only, so the weight's gradient is partial
    and marked for Megatron's sum over the tensor-parallel group, as TransformerEngine's layers do.
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
            # The default generator is in step on all tensor-parallel ranks, so they agree.
            init_method(self.weight)
        mark_parameter(
            self.weight,
            allreduce=True,
            sequence_parallel=config.sequence_parallel,
            tensor_model_parallel=False,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Map ``x`` [..., input_size] to [..., output_size]; the second value is no bias."""
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """One tensor, replicated over tensor- and data-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def get_extra_state(self) -> None:
        """Empty, as in Megatron's own linear layers: standard MLA asks checkpoints for one."""

    def set_extra_state(self, state: object) -> None:
        """Nothing to restore."""

    def backward_dw(self) -> None:
        """Nothing is delayed: autograd computes the weight's gradient."""


class HeadwiseUpProjection(nn.Module):
    """W_UK or W_UV, sharded by heads, handed out as a weight instead of being applied.

    Where it multiplies depends on the form: the query (absorbed), the latent (expanded), or the
    output. It is still called like a module, because Megatron's overlapped parameter gather waits
    in the forward hooks of the module that owns the parameter.

    Megatron's ColumnParallelLinear makes the parameter, but is not a base class: wrappers that look
    for that class (FSDP) free its weight after the call, while the view handed out is still in use.
    """

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
        # Autograd accumulates this weight's gradient, so the fused accumulation of the host's GEMMs
        # must not be demanded; it may be on for the other layers.
        maker_config = copy.copy(config)
        maker_config.gradient_accumulation_fusion = False
        maker = ColumnParallelLinear(
            input_size, output_size, config=maker_config, tp_group=tp_group, **host_kwargs
        )
        self.weight = maker.weight
        self.tp_group = maker.tp_group
        self.head_dim = head_dim

    def forward(self) -> Tensor:
        """The live weight as [N, head_dim, C], a view of the parameter."""
        return self.weight.unflatten(0, (-1, self.head_dim))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """One tensor, its rows sharded over the tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def refuse_sharded_alone(*layers: nn.Module) -> None:
    """Refuse ``fully_shard`` of layers whose weight is used after their call, when it is freed.

    Raises:
        ValueError: Naming the layers and what to shard instead.
    """
    if any(isinstance(layer, FSDPModule) for layer in layers):
        raise ValueError(
            "fully_shard cannot be applied to a HeadwiseUpProjection (linear_k_up_proj, "
            "linear_v_up_proj), which hands out its weight; apply it to the "
            "AbsorbedMLASelfAttention or to the layer around it"
        )


def own_output(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of a linear layer as a tensor that nobody else holds, so that it can be reused.

    A copy is made where somebody might: a forward hook may keep what it is shown, or return what it
    kept (activation patching), and so may a layer of a class that is not Megatron's.
    """
    output, _ = layer(x)
    return output if _makes_its_output(layer) else output.clone()


def _makes_its_output(layer: nn.Module) -> bool:
    package = type(layer).__module__.partition(".")[0]
    return (
        package in ("absorbed_mla", "megatron", "transformer_engine")
        and "forward" not in vars(layer)
        and not layer._forward_hooks
        and not torch_module._global_forward_hooks
    )
