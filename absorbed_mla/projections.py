"""Building one projection or norm of an MLA layer from its submodule spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import nn

from absorbed_mla.dims import MLADims
from absorbed_mla.norm import mark_parameter
from absorbed_mla.options import AbsorbedMLAOptions


@dataclass
class AbsorbedMLASelfAttentionSubmodules:
    """The layers that :class:`AbsorbedMLASelfAttention` is built of.

    ``linear_q_proj`` is built when ``q_lora_rank`` is None, else ``linear_q_down_proj`` and
    ``linear_q_up_proj``. With ``mla_down_proj_fusion``, ``linear_qkv_down_proj`` takes the place of
    both down-projections. The norms are identities when ``qk_layernorm`` is off, but for
    ``k_rope_layernorm``, which like ``linear_gate`` is built where the options ask for it.
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
    linear_qkv_down_proj: ModuleSpec | type | None = None
    linear_gate: ModuleSpec | type | None = None
    k_rope_layernorm: ModuleSpec | type | None = None


def down_layers(config: MLATransformerConfig, dims: MLADims) -> dict[str, tuple[int, ...]]:
    """The layers that project hidden states down, with the widths of what each returns.

    The query's and that of K and V, or one for both with ``mla_down_proj_fusion``; names and order
    are those of Megatron's ``MLASelfAttention`` and ``FusedMLASelfAttention``.

    Raises:
        ValueError: If ``mla_down_proj_fusion`` is on for a query that has no down-projection.
    """
    fused = config.mla_down_proj_fusion
    if dims.q_lora_rank is None:
        if fused:
            raise ValueError(
                "mla_down_proj_fusion=True needs a q_lora_rank, got None: the query has no "
                "down-projection; set mla_down_proj_fusion=False"
            )
        return {"linear_kv_down_proj": (dims.kv_down_dim,)}
    if fused:
        return {"linear_qkv_down_proj": (dims.q_lora_rank, dims.kv_down_dim)}
    return {"linear_q_down_proj": (dims.q_lora_rank,), "linear_kv_down_proj": (dims.kv_down_dim,)}


class ProjectionBuilder:
    """Builds linear layers and norms with what all of them have in common.

    Args:
        submodules: The specs, by name.
        config: Megatron's MLA config.
        options: Read for ``down_projection`` and ``latent_norm_eps``.
        pg_collection: Process groups; ``tp`` is used.
        name: Name of the attention, or None; the names of the layers begin with it.
    """

    def __init__(
        self,
        submodules: AbsorbedMLASelfAttentionSubmodules,
        config: MLATransformerConfig,
        options: AbsorbedMLAOptions,
        pg_collection: ProcessGroupCollection,
        name: str | None,
    ) -> None:
        self.submodules = submodules
        self.config = config
        self.options = options
        self.tp_group = pg_collection.tp
        self.name = name

    def linear(
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
        """A linear layer; ``extra`` is passed on to its class."""
        return build_module(
            self._spec(child),
            inputs,
            outputs,
            config=self.config,
            is_expert=False,
            skip_bias_add=skip_bias_add,
            bias=bias,
            init_method=init_method or self.config.init_method,
            tp_comm_buffer_name=child.removeprefix("linear_"),
            tp_group=self.tp_group,
            name=f"{self.name}.{child}" if self.name is not None else None,
            **extra,
        )

    def down_projection(self, child: str, widths: Sequence[int]) -> Any:
        """A projection of the hidden states to latents of these widths, in one layer.

        Raises:
            ValueError: If it is not sharded as ``options.down_projection`` says, or does not divide
                by the tensor-parallel size.
        """
        asked, tp_size = self.options.down_projection, self.tp_group.size()
        outputs = sum(widths)
        if asked == "column_parallel" and any(width % tp_size for width in widths):
            rows = " + ".join(map(str, widths))
            raise ValueError(
                f"down_projection='column_parallel' needs the {rows} rows of {child} to divide "
                f"by tensor_model_parallel_size={tp_size}; use down_projection='duplicated'"
            )
        module = self.linear(child, self.config.hidden_size, outputs, gather_output=False)
        built = "duplicated" if module.weight.shape[0] == outputs else "column_parallel"
        if tp_size > 1 and built != asked:
            raise ValueError(
                f"down_projection={asked!r}, but the spec's {child} ({type(module).__name__}) is "
                f"{built}; build the spec with the same options"
            )
        return module

    def norm(self, child: str, width: int) -> nn.Module:
        """The norm of a latent, or of ``k_rope``.

        Raises:
            ValueError: If there is nothing to normalise.
        """
        if not width:
            raise ValueError(f"{child}=True needs qk_pos_emb_head_dim above 0, got {width}")
        eps = self.options.latent_norm_eps
        norm: nn.Module = build_module(
            self._spec(child),
            config=self.config,
            hidden_size=width,
            eps=self.config.layernorm_epsilon if eps is None else eps,
        )
        # Megatron's finalize_model_grads takes any parameter with q_layernorm in its name for the
        # per-head norm of ordinary attention, and sums its gradient over tensor-parallel ranks,
        # also without sequence parallelism (0.19.2). Averaging leaves equal gradients as they are.
        if not (self.config.sequence_parallel and self.tp_group.size() > 1):
            for parameter in norm.parameters():
                mark_parameter(parameter, average_gradients_across_tp_domain=True)
        return norm

    def _spec(self, child: str) -> ModuleSpec | type:
        spec = getattr(self.submodules, child)
        if spec is None:
            raise ValueError(f"the spec has no {child}; build it with the same config and options")
        return spec
