"""Parts of Megatron layers with absorbed MLA, which every spec of this folder puts together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import get_mtp_layer_spec_for_backend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.core_attention.module import LatentCoreAttention
from absorbed_mla.dsa.core_attention import SparseCoreAttention, SparseCoreAttentionSubmodules
from absorbed_mla.dsa.indexer import Indexer, IndexerSubmodules
from absorbed_mla.dsa.layer_norm import LayerNorm
from absorbed_mla.linear import DuplicatedLinear, HeadwiseUpProjection
from absorbed_mla.moe_layer import with_moe_options
from absorbed_mla.norm import RMSNorm
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.packed_roll import correct_packed_roll
from absorbed_mla.projections import AbsorbedMLASelfAttentionSubmodules

BACKENDS = ("local", "transformer_engine")


class LayerParts:
    """What layers of one backend are made of, with absorbed MLA in the place of attention.

    Args:
        backend: ``"local"`` or ``"transformer_engine"``; None takes TransformerEngine if installed.
        options: Of the layers.

    Raises:
        ValueError: If the backend is unknown or not installed, or the options are invalid.
    """

    def __init__(
        self, backend: str | None = None, options: AbsorbedMLAOptions | None = None
    ) -> None:
        self.backend = _checked(backend)
        self.options = AbsorbedMLAOptions.coerce(options)
        self.provider = _provider(self.backend)
        correct_packed_roll()  # Here, because every stage of a model with these layers comes by.

    @property
    def norm(self) -> type:
        """The norm of hidden states. Megatron's local one refuses sequence parallelism."""
        if self.provider.fuse_layernorm_and_linear():
            return self.provider.layer_norm(rms_norm=True)
        return RMSNorm

    @property
    def metainfo(self) -> dict[str, LayerParts]:
        """Of a ModuleSpec, for :func:`parts_of`."""
        return {_PARTS: self}

    def layer(self, config: MLATransformerConfig, *, moe: bool, mtp: bool = False) -> ModuleSpec:
        """Attention and MLP as one layer, dense or a mixture of experts.

        Args:
            config: Of the model.
            moe: Whether it is a mixture of experts.
            mtp: Whether it is inside of a layer of multi-token prediction.

        Raises:
            ValueError: If options of experts are given for a model without any.
        """
        self.require_experts(config)
        return ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                **self.attention(config, mtp=mtp),
                **self.mlp(moe=moe, grouped_gemm=config.moe_grouped_gemm),
            ),
            metainfo=self.metainfo,
        )

    def require_experts(self, config: MLATransformerConfig) -> None:
        """Check that options of experts are for a model that has some.

        Raises:
            ValueError: If there are none.
        """
        given = self.options.of_experts
        if given and not config.num_moe_experts:
            raise ValueError(f"num_moe_experts is None, and options of experts are given: {given}")

    def attention(self, config: MLATransformerConfig, *, mtp: bool = False) -> dict[str, Any]:
        """The fields of ``TransformerLayerSubmodules`` up to the first residual connection."""
        return {
            "input_layernorm": self.norm,
            "self_attention": self._self_attention(config, self._core_attention(config, mtp)),
            "self_attn_bda": get_bias_dropout_add,
        }

    def mlp(self, *, moe: bool, grouped_gemm: bool = False) -> dict[str, Any]:
        """The fields of ``TransformerLayerSubmodules`` behind the first residual connection.

        Args:
            moe: Whether it is a mixture of experts.
            grouped_gemm: Whether all experts are one module, where the backend has one.
        """
        # A fused norm + linear layer of the dense MLP brings its own norm.
        norm_in_mlp = self.provider.fuse_layernorm_and_linear() and not moe
        return {
            "pre_mlp_layernorm": IdentityOp if norm_in_mlp else self.norm,
            "mlp": with_moe_options(self._mlp(moe, grouped_gemm), self.options),
            "mlp_bda": get_bias_dropout_add,
        }

    def _mlp(self, moe: bool, grouped_gemm: bool) -> Any:
        return get_mlp_module_spec_for_backend(
            backend=self.provider,
            # How many there are is the config's.
            num_experts=1 if moe else None,
            moe_grouped_gemm=grouped_gemm,
        )

    def mtp_layer(self, inner: ModuleSpec | None) -> ModuleSpec:
        """A layer of multi-token prediction.

        Args:
            inner: The transformer layer inside of it; None where the host builds it.
        """
        spec = get_mtp_layer_spec_for_backend(inner, self.provider)
        norms = {"enorm": self.norm, "hnorm": self.norm, "layer_norm": self.norm}
        return replace(spec, submodules=replace(spec.submodules, **norms))

    def _self_attention(
        self, config: MLATransformerConfig, core_attention: ModuleSpec | type
    ) -> ModuleSpec:
        column = self.provider.column_parallel_linear()
        one_per_rank = self.options.down_projection == "column_parallel"
        down = column if one_per_rank else self._duplicated_linear()
        # Our norm is one PyTorch operator, which takes less CPU time than TransformerEngine's
        # module. PyTorch has none for zero-centered gammas, where TransformerEngine's is fused.
        rms_norm = self.norm if config.layernorm_zero_centered_gamma else RMSNorm
        latent_norm = rms_norm if config.qk_layernorm else IdentityOp
        return ModuleSpec(
            module=AbsorbedMLASelfAttention,
            params={"attn_mask_type": AttnMaskType.causal, "options": self.options},
            submodules=AbsorbedMLASelfAttentionSubmodules(
                linear_q_proj=column,
                linear_q_down_proj=down,
                q_layernorm=latent_norm,
                linear_q_up_proj=column,
                linear_kv_down_proj=down,
                linear_qkv_down_proj=down,
                kv_layernorm=latent_norm,
                k_rope_layernorm=rms_norm,
                linear_k_up_proj=HeadwiseUpProjection,
                linear_v_up_proj=HeadwiseUpProjection,
                core_attention=core_attention,
                linear_gate=column,
                linear_proj=self.provider.row_parallel_linear(),
            ),
        )

    def _core_attention(self, config: MLATransformerConfig, mtp: bool) -> ModuleSpec | type:
        if config.experimental_attention_variant != "dsa":
            return LatentCoreAttention
        linear = self._duplicated_linear()
        layers = IndexerSubmodules(linear, linear, LayerNorm, linear)
        indexer = ModuleSpec(module=Indexer, submodules=layers)
        return ModuleSpec(
            module=SparseCoreAttention,
            params={"is_mtp_layer": mtp},
            submodules=SparseCoreAttentionSubmodules(indexer),
        )

    def _duplicated_linear(self) -> type:
        if self.provider.column_parallel_linear() is ColumnParallelLinear:
            return DuplicatedLinear
        from absorbed_mla.te_linear import TEDuplicatedLinear

        return TEDuplicatedLinear


def parts_of(spec: object) -> LayerParts | None:
    """The parts that a layer spec was made of; None if it is not one of this folder."""
    return getattr(spec, "metainfo", {}).get(_PARTS)


def moe_layers(config: MLATransformerConfig) -> list[bool]:
    """Whether each layer of the model is a mixture of experts, by ``moe_layer_freq``.

    Raises:
        ValueError: If ``moe_layer_freq`` is no such pattern.
    """
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


# Key of a ModuleSpec's metainfo.
_PARTS = "absorbed_mla_parts"


def _checked(backend: str | None) -> str:
    if backend is None:
        return "transformer_engine" if HAVE_TE else "local"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend == "transformer_engine" and not HAVE_TE:
        raise ValueError(
            "backend='transformer_engine' needs TransformerEngine, which is not installed; "
            "use backend='local'"
        )
    return backend


def _provider(backend: str) -> BackendSpecProvider:
    """Megatron's layers of a backend, whose ``get_backend`` not every branch of it has."""
    if backend == "local":
        return LocalSpecProvider()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()
