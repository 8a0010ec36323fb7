"""Building the projections and norms of an MLA layer from its submodule specs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.spec_utils import build_module
from torch import nn

from absorbed_mla.norm import mark_parameter

if TYPE_CHECKING:
    from absorbed_mla.attention import AbsorbedMLASelfAttention, AbsorbedMLASelfAttentionSubmodules


def build_projections(
    attention: AbsorbedMLASelfAttention,
    submodules: AbsorbedMLASelfAttentionSubmodules,
    name: str | None,
) -> dict[str, nn.Module]:
    """Build every linear layer and norm; the keys are the attention's attribute names.

    Raises:
        ValueError: If the down-projections are not sharded as ``options.down_projection`` says, or
            do not divide by the tensor-parallel size.
    """
    dims, config = attention.dims, attention.config
    built: dict[str, nn.Module] = {}

    def linear(
        child: str,
        inputs: int,
        outputs: int,
        *,
        init_method=config.init_method,
        bias: bool = False,
        skip_bias_add: bool = False,
        **extra,
    ) -> None:
        built[child] = build_module(
            getattr(submodules, child),
            inputs,
            outputs,
            config=config,
            is_expert=False,
            skip_bias_add=skip_bias_add,
            bias=bias,
            init_method=init_method,
            tp_comm_buffer_name=child.removeprefix("linear_"),
            tp_group=attention.tp_group,
            name=f"{name}.{child}" if name is not None else None,
            **extra,
        )

    def down(child: str, outputs: int) -> None:
        _check_divisible(attention, child, outputs)
        linear(child, dims.hidden_size, outputs, gather_output=False)
        _check_sharding(attention, child, built[child], outputs)

    def norm(child: str, width: int) -> None:
        eps = attention.options.latent_norm_eps
        built[child] = build_module(
            getattr(submodules, child),
            config=config,
            hidden_size=width,
            eps=config.layernorm_epsilon if eps is None else eps,
        )
        _mark_replicated(built[child], attention)

    if dims.q_lora_rank is None:
        linear(
            "linear_q_proj",
            dims.hidden_size,
            dims.num_heads * dims.qk_head_dim,
            gather_output=False,
        )
    else:
        down("linear_q_down_proj", dims.q_lora_rank)
        norm("q_layernorm", dims.q_lora_rank)
        linear(
            "linear_q_up_proj",
            dims.q_lora_rank,
            dims.num_heads * dims.qk_head_dim,
            gather_output=False,
        )
    down("linear_kv_down_proj", dims.kv_down_dim)
    norm("kv_layernorm", dims.kv_lora_rank)
    for child, head_dim in (
        ("linear_k_up_proj", dims.qk_nope_head_dim),
        ("linear_v_up_proj", dims.v_head_dim),
    ):
        linear(child, dims.kv_lora_rank, dims.num_heads * head_dim, head_dim=head_dim)
    linear(
        "linear_proj",
        dims.num_heads * dims.v_head_dim,
        dims.hidden_size,
        init_method=config.output_layer_init_method,
        bias=config.add_bias_linear,
        skip_bias_add=True,
        input_is_parallel=True,
    )
    return built


def _mark_replicated(norm: nn.Module, attention: AbsorbedMLASelfAttention) -> None:
    """Keep Megatron from summing a latent norm's gradient, which every rank has whole.

    Its finalize_model_grads takes any parameter with ``q_layernorm`` in its name for the per-head
    norm of ordinary attention and sums it over tensor-parallel ranks, also without sequence
    parallelism (0.19.2). Asked for the average instead, it leaves equal gradients as they are.
    """
    if not attention.sequence_parallel:
        for parameter in norm.parameters():
            mark_parameter(parameter, average_gradients_across_tp_domain=True)


def _check_divisible(attention: AbsorbedMLASelfAttention, child: str, outputs: int) -> None:
    tp_size = attention.pg_collection.tp.size()
    if attention.options.down_projection == "column_parallel" and outputs % tp_size:
        raise ValueError(
            f"down_projection='column_parallel' needs the {outputs} rows of {child} to divide by "
            f"tensor_model_parallel_size={tp_size}; use down_projection='duplicated'"
        )


def _check_sharding(
    attention: AbsorbedMLASelfAttention, child: str, module: Any, outputs: int
) -> None:
    if attention.pg_collection.tp.size() == 1:
        return
    found = "duplicated" if module.weight.shape[0] == outputs else "column_parallel"
    asked = attention.options.down_projection
    if found != asked:
        raise ValueError(
            f"down_projection={asked!r}, but the spec's {child} ({type(module).__name__}) is "
            f"{found}; build the spec with the same options"
        )
