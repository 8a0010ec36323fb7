"""Megatron layer specs and decoder-block specs with absorbed MLA, like its ``gpt_layer_specs``."""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, get_backend
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.core_attention.module import LatentCoreAttention
from absorbed_mla.linear import DuplicatedLinear, HeadwiseUpProjection
from absorbed_mla.norm import RMSNorm
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.projections import AbsorbedMLASelfAttentionSubmodules

BACKENDS = ("local", "transformer_engine")


def get_absorbed_mla_layer_spec(
    config: MLATransformerConfig,
    *,
    backend: str | None = None,
    options: AbsorbedMLAOptions | None = None,
) -> ModuleSpec:
    """Spec of a TransformerLayer with absorbed MLA; MoE if the config has experts, else dense.

    A block or model that gets this spec uses the same layer at every depth, and Megatron's own
    final norm, which without TransformerEngine refuses sequence parallelism. For that case, and for
    dense and MoE layers in one model, use :func:`get_absorbed_mla_decoder_block_spec`.

    Args:
        config: Megatron's MLA config (or the model config that ``--spec`` passes).
        backend: ``"local"`` or ``"transformer_engine"``; None takes TransformerEngine if installed.
        options: Execution options of the attention.

    Raises:
        ValueError: If the backend is unknown or not installed, or the options are invalid.
    """
    return _layer_spec(config, _provider(backend), options, moe=bool(config.num_moe_experts))


def get_absorbed_mla_decoder_block_spec(
    config: MLATransformerConfig,
    *,
    backend: str | None = None,
    options: AbsorbedMLAOptions | None = None,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Spec of a decoder block: the layers of this pipeline stage and the final norm.

    Args:
        config: Read for ``num_layers``, ``moe_layer_freq`` and the pipeline layout.
        backend: As in :func:`get_absorbed_mla_layer_spec`.
        options: Execution options of the attention.
        vp_stage: Virtual pipeline stage, or None.

    Raises:
        ValueError: If the backend, the options or ``moe_layer_freq`` are not usable.
    """
    provider = _provider(backend)
    by_kind = {False: _layer_spec(config, provider, options, moe=False)}
    if config.num_moe_experts:
        by_kind[True] = _layer_spec(config, provider, options, moe=True)
    layers = [by_kind[is_moe] for is_moe in _moe_layers(config)]
    return TransformerBlockSubmodules(
        layer_specs=[layers[i] for i in _layers_of_this_stage(config, vp_stage)],
        layer_norm=_norm(provider),
    )


def _provider(backend: str | None) -> BackendSpecProvider:
    if backend is None:
        backend = "transformer_engine" if HAVE_TE else "local"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend == "transformer_engine" and not HAVE_TE:
        raise ValueError(
            "backend='transformer_engine' needs TransformerEngine, which is not installed; "
            "use backend='local'"
        )
    return get_backend(backend)


def _norm(provider: BackendSpecProvider) -> type:
    return provider.layer_norm(rms_norm=True) if provider.fuse_layernorm_and_linear() else RMSNorm


def _layer_spec(
    config: MLATransformerConfig,
    provider: BackendSpecProvider,
    options: AbsorbedMLAOptions | None,
    moe: bool,
) -> ModuleSpec:
    norm = _norm(provider)
    # A fused norm + linear layer of the dense MLP brings its own norm.
    norm_in_mlp = provider.fuse_layernorm_and_linear() and not moe
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=_attention_spec(config, provider, options),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if norm_in_mlp else norm,
            mlp=get_mlp_module_spec_for_backend(
                backend=provider,
                num_experts=config.num_moe_experts if moe else None,
                moe_grouped_gemm=config.moe_grouped_gemm,
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention_spec(
    config: MLATransformerConfig,
    provider: BackendSpecProvider,
    options: AbsorbedMLAOptions | None,
) -> ModuleSpec:
    options = AbsorbedMLAOptions.coerce(options)
    column = provider.column_parallel_linear()
    down = column if options.down_projection == "column_parallel" else _duplicated_linear(provider)
    # Our norm is one PyTorch operator, which takes less CPU time than TransformerEngine's module.
    # PyTorch has none for zero-centered gammas, where TransformerEngine's is the fused one.
    rms_norm = _norm(provider) if config.layernorm_zero_centered_gamma else RMSNorm
    latent_norm = rms_norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=AbsorbedMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "options": options},
        submodules=AbsorbedMLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=down,
            q_layernorm=latent_norm,
            linear_q_up_proj=column,
            linear_kv_down_proj=down,
            kv_layernorm=latent_norm,
            linear_k_up_proj=HeadwiseUpProjection,
            linear_v_up_proj=HeadwiseUpProjection,
            core_attention=LatentCoreAttention,
            linear_proj=provider.row_parallel_linear(),
        ),
    )


def _duplicated_linear(provider: BackendSpecProvider) -> type:
    if provider.column_parallel_linear() is ColumnParallelLinear:
        return DuplicatedLinear
    from absorbed_mla.te_linear import TEDuplicatedLinear

    return TEDuplicatedLinear


def _moe_layers(config: MLATransformerConfig) -> list[bool]:
    """Whether each layer of the model is a mixture of experts, by ``moe_layer_freq``."""
    if not config.num_moe_experts:
        return [False] * config.num_layers
    freq = config.moe_layer_freq
    if isinstance(freq, int) and not isinstance(freq, bool) and freq >= 1:
        return [i % freq == 0 for i in range(config.num_layers)]
    if isinstance(freq, list) and len(freq) == config.num_layers and set(freq) <= {0, 1}:
        return [bool(x) for x in freq]
    raise ValueError(
        "moe_layer_freq must be an integer of at least 1 or a list of "
        f"num_layers={config.num_layers} zeros (dense) and ones (MoE), got {freq!r}"
    )


def _layers_of_this_stage(config: MLATransformerConfig, vp_stage: int | None) -> list[int]:
    if config.pipeline_model_parallel_layout is not None:
        layout = config.pipeline_model_parallel_layout
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))
