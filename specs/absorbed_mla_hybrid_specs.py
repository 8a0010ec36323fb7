"""Specs of Megatron's HybridModel with absorbed MLA as its MLA layer, ``+`` in a layer pattern."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayerSubmodules,
)

from absorbed_mla.checkpoint.hybrid_names import KDA_SYMBOL, MLA_SYMBOL
from absorbed_mla.moe_layer import with_moe_options
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.packed_roll import require_packed_roll
from absorbed_mla.unsupported import refuse_unsupported_config
from specs.absorbed_mla_layers import AbsorbedMLAAttentionLayer, spec_by_config
from specs.absorbed_mla_parts import LayerParts

_MLA_LAYER = "mla_layer" if hasattr(Symbols, "MLA") else "attention_layer"
# What there are layers for without TransformerEngine; Megatron's own all need it.
_LOCAL = (MLA_SYMBOL, Symbols.MLP, Symbols.MOE, *filter(None, [KDA_SYMBOL]))


class AbsorbedMLAHybridStack(HybridStack):
    """Megatron's stack of layers, also without TransformerEngine.

    Args:
        config: Megatron's MLA config.
        submodules: The specs of the layers.
        parts: What the final norm is taken from.
        layer_type_list: Symbols of the layers of this pipeline stage.
        post_layer_norm: Whether the last stage ends with a norm.
        host: The other arguments of Megatron's stack.

    Raises:
        ValueError: If a layer is asked for that the backend does not have, something that
            absorbed MLA does not support, or MTP that cannot be corrected for padded packs.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: HybridStackSubmodules,
        *,
        parts: LayerParts,
        layer_type_list: list[str] | None = None,
        post_layer_norm: bool = True,
        **host: Any,
    ) -> None:
        _refuse_layers_of_their_own(config)
        if config.mtp_num_layers:
            require_packed_roll()
        if parts.backend == "local":
            _refuse_layers_of_transformer_engine(layer_type_list or [])
        # Megatron's final norm is TransformerEngine's in any case.
        super().__init__(
            config, submodules, layer_type_list=layer_type_list, post_layer_norm=False, **host
        )
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = parts.norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )


def get_absorbed_mla_hybrid_stack_spec(
    config: MLATransformerConfig,
    *,
    backend: str | None = None,
    options: AbsorbedMLAOptions | None = None,
) -> ModuleSpec:
    """Spec of a HybridModel's stack whose MLA layers (``+``) are absorbed MLA.

    Also those of its multi-token prediction. With TransformerEngine all other kinds of layers are
    Megatron's own; without it there are dense (``-``) and MoE (``E``) layers, which are those of
    :func:`~specs.absorbed_mla_layer_specs.get_absorbed_mla_decoder_block_spec`, and, where Megatron
    has it, Kimi Delta Attention (``K``).

    Args:
        config: Megatron's MLA config; ``num_layers`` counts the symbols of the pattern.
        backend: ``"local"`` or ``"transformer_engine"``; None takes TransformerEngine if installed.
        options: Execution options of the attention.

    Raises:
        ValueError: If the backend, the options or the config are not usable.
    """
    refuse_unsupported_config(config)
    _refuse_layers_of_their_own(config)
    parts = LayerParts(backend, options)
    parts.require_experts(config)
    return _stack_spec(parts)


class NeedsTransformerEngine:
    """In the place of a layer that the local backend does not have.

    Raises:
        ValueError: When it is built.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "hybrid_layer_pattern has a layer that needs backend='transformer_engine'; "
            f"backend='local' has {', '.join(_LOCAL)}"
        )


def _stack_spec(parts: LayerParts) -> ModuleSpec:
    mla_layer = spec_by_config(AbsorbedMLAAttentionLayer, parts)
    # With mla_down_proj_fusion, Megatron's stack exchanges its attention for a fused one: it writes
    # into the submodules of this layer. This layer uses none of them, and its own attention fuses.
    unused = ModuleSpec(IdentityOp, submodules=SimpleNamespace())
    mla_layer = replace(mla_layer, submodules=TransformerLayerSubmodules(self_attention=unused))
    others = _local_layers(parts) if parts.backend == "local" else _moe_layer(parts)
    submodules = replace(hybrid_stack_spec.submodules, **{_MLA_LAYER: mla_layer}, **others)
    return ModuleSpec(module=AbsorbedMLAHybridStack, params={"parts": parts}, submodules=submodules)


def _moe_layer(parts: LayerParts) -> dict[str, ModuleSpec]:
    """Megatron's layer of experts, if the options ask for what Megatron's does not have."""
    if not parts.options.of_experts:
        return {}
    layer = hybrid_stack_spec.submodules.moe_layer
    mlp = with_moe_options(layer.submodules.mlp, parts.options)
    return {"moe_layer": replace(layer, submodules=replace(layer.submodules, mlp=mlp))}


def _local_layers(parts: LayerParts) -> dict[str, ModuleSpec | type]:
    """The fields of ``HybridStackSubmodules`` that work without TransformerEngine."""
    mtp = MultiTokenPredictionBlockSubmodules([parts.mtp_layer(None)])
    kda = {"kda_layer": _local_kda_layer(parts)} if KDA_SYMBOL else {}
    others = {f.name for f in fields(HybridStackSubmodules) if f.name.endswith("_layer")}
    return dict.fromkeys(others - {_MLA_LAYER}, NeedsTransformerEngine) | {
        **kda,
        "mlp_layer": ModuleSpec(
            module=MLPLayer, submodules=TransformerLayerSubmodules(**parts.mlp(moe=False))
        ),
        "moe_layer": ModuleSpec(
            module=MoETransformerLayer, submodules=TransformerLayerSubmodules(**parts.mlp(moe=True))
        ),
        "mtp_block_spec": ModuleSpec(module=MultiTokenPredictionBlock, submodules=mtp),
    }


def _local_kda_layer(parts: LayerParts) -> ModuleSpec:
    """Megatron's layer of Kimi Delta Attention with the norms and linear layers of ``parts``."""
    layer = hybrid_stack_spec.submodules.kda_layer
    kda, column = layer.submodules.self_attention, parts.provider.column_parallel_linear()
    linear = {"in_proj": column, "beta_proj": column, "out_norm": parts.norm}
    linear["out_proj"] = parts.provider.row_parallel_linear()
    kda = replace(kda, submodules=replace(kda.submodules, **linear))
    own = replace(layer.submodules, input_layernorm=parts.norm, self_attention=kda)
    return replace(layer, submodules=own)


def _refuse_layers_of_their_own(config: MLATransformerConfig) -> None:
    """Refuse a config with others for some layers, which Megatron's stack would not ask for."""
    if config.heterogeneous_block_specs:
        raise ValueError(
            "a HybridModel has one config for all layers, got a "
            f"{type(config).__name__} (per_layer_config); use a GPTModel"
        )


def _refuse_layers_of_transformer_engine(symbols: list[str]) -> None:
    others = sorted({symbol for symbol in symbols if symbol not in _LOCAL})
    if others:
        raise ValueError(
            f"hybrid_layer_pattern has {', '.join(others)}, which need backend='transformer_engine'"
            f"; backend='local' has {', '.join(_LOCAL)}"
        )


# For --spec: every builder of a HybridModel takes what it imports as the spec itself. Options are
# the defaults.
absorbed_mla_hybrid_stack_spec = _stack_spec(LayerParts())
