"""Building the projections and norms of an MLA layer from its submodule specs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import nn

from absorbed_mla.norm import mark_parameter

if TYPE_CHECKING:
    from absorbed_mla.attention import AbsorbedMLASelfAttention


@dataclass
class AbsorbedMLASelfAttentionSubmodules:
    """What :class:`AbsorbedMLASelfAttention` is built of.

    ``linear_q_proj`` is built when ``q_lora_rank`` is None, else ``linear_q_down_proj`` and
    ``linear_q_up_proj``. The norms are identities when ``qk_layernorm`` is off.
    """

    linear_kv_down_proj: ModuleSpec | type
    linear_k_up_proj: ModuleSpec | type
    linear_v_up_proj: ModuleSpec | type
    core_attention: ModuleSpec | type
    linear_proj: ModuleSpec | type
    q_layernorm: ModuleSpec | type
    kv_layernorm: ModuleSpec | type
    linear_q_proj: ModuleSpec | type | None = None
    linear_q_down_proj: ModuleSpec | type | None = None
    linear_q_up_proj: ModuleSpec | type | None = None


class ProjectionBuilder:
    """Builds an attention's linear layers and norms, and makes them its children.

    Args:
        attention: Read for dimensions, config, options and process groups.
        submodules: What to build.
        name: Name of the attention, or None; the layers' names begin with it.
    """

    def __init__(
        self,
        attention: AbsorbedMLASelfAttention,
        submodules: AbsorbedMLASelfAttentionSubmodules,
        name: str | None,
    ) -> None:
        self.attention = attention
        self.submodules = submodules
        self.name = name
        self.tp_size = attention.pg_collection.tp.size()

    def build(self) -> None:
        """Build all.

        Raises:
            ValueError: If the down-projections are not sharded as ``options.down_projection`` says,
                or do not divide by the tensor-parallel size.
        """
        dims, config = self.attention.dims, self.attention.config
        query_size = dims.num_heads * dims.qk_head_dim
        if dims.q_lora_rank is None:
            self._linear("linear_q_proj", dims.hidden_size, query_size, gather_output=False)
        else:
            self._down_projection("linear_q_down_proj", dims.q_lora_rank)
            self._norm("q_layernorm", dims.q_lora_rank)
            self._linear("linear_q_up_proj", dims.q_lora_rank, query_size, gather_output=False)
        self._down_projection("linear_kv_down_proj", dims.kv_down_dim)
        self._norm("kv_layernorm", dims.kv_lora_rank)
        self._up_projection("linear_k_up_proj", dims.qk_nope_head_dim)
        self._up_projection("linear_v_up_proj", dims.v_head_dim)
        self._linear(
            "linear_proj",
            dims.num_heads * dims.v_head_dim,
            dims.hidden_size,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            skip_bias_add=True,
            input_is_parallel=True,
        )

    def _linear(
        self,
        child: str,
        inputs: int,
        outputs: int,
        *,
        init_method: Any = None,
        bias: bool = False,
        skip_bias_add: bool = False,
        **extra: Any,
    ) -> Any:
        config = self.attention.config
        module = build_module(
            getattr(self.submodules, child),
            inputs,
            outputs,
            config=config,
            is_expert=False,
            skip_bias_add=skip_bias_add,
            bias=bias,
            init_method=init_method or config.init_method,
            tp_comm_buffer_name=child.removeprefix("linear_"),
            tp_group=self.attention.tp_group,
            name=f"{self.name}.{child}" if self.name is not None else None,
            **extra,
        )
        setattr(self.attention, child, module)
        return module

    def _down_projection(self, child: str, outputs: int) -> None:
        asked = self.attention.options.down_projection
        if asked == "column_parallel" and outputs % self.tp_size:
            raise ValueError(
                f"down_projection='column_parallel' needs the {outputs} rows of {child} to divide "
                f"by tensor_model_parallel_size={self.tp_size}; use down_projection='duplicated'"
            )
        hidden_size = self.attention.dims.hidden_size
        module = self._linear(child, hidden_size, outputs, gather_output=False)
        found = "duplicated" if module.weight.shape[0] == outputs else "column_parallel"
        if self.tp_size > 1 and found != asked:
            raise ValueError(
                f"down_projection={asked!r}, but the spec's {child} ({type(module).__name__}) is "
                f"{found}; build the spec with the same options"
            )

    def _up_projection(self, child: str, head_dim: int) -> None:
        dims = self.attention.dims
        self._linear(child, dims.kv_lora_rank, dims.num_heads * head_dim, head_dim=head_dim)

    def _norm(self, child: str, width: int) -> None:
        attention, eps = self.attention, self.attention.options.latent_norm_eps
        norm: nn.Module = build_module(
            getattr(self.submodules, child),
            config=attention.config,
            hidden_size=width,
            eps=attention.config.layernorm_epsilon if eps is None else eps,
        )
        setattr(attention, child, norm)
        # Megatron's finalize_model_grads takes any parameter with q_layernorm in its name for the
        # per-head norm of ordinary attention, and sums its gradient over tensor-parallel ranks,
        # also without sequence parallelism (0.19.2). Averaging leaves equal gradients as they are.
        if not attention.sequence_parallel:
            for parameter in norm.parameters():
                mark_parameter(parameter, average_gradients_across_tp_domain=True)
