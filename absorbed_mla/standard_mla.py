"""Megatron's own ``MLASelfAttention``, buildable without TransformerEngine.

Megatron's local core attention and norm refuse multi-latent attention and sequence parallelism.
The factories here take Megatron's local layer specs and put plain-PyTorch ones in those two slots;
everything else, ``MLASelfAttention`` included, is Megatron's, but for the shift of padded packs in
multi-token prediction (``packed_roll.py``). Tests compare with it, and the quickstart writes a
standard checkpoint with it.

With column-parallel down-projections, which the local spec builds, Megatron's gradients of the
k_rope rows and of the input are wrong at tensor-parallel size above 1. Compare at size 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from absorbed_mla.norm import RMSNorm
from absorbed_mla.packed_roll import correct_packed_roll

BACKENDS = ("local", "transformer_engine")
_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


def get_standard_mla_layer_spec(
    config: MLATransformerConfig, *, backend: str | None = None
) -> ModuleSpec:
    """Spec of a dense TransformerLayer with Megatron's ``MLASelfAttention``.

    Args:
        config: Read for ``qk_layernorm``, ``q_lora_rank``, ``normalization``, ``transformer_impl``.
        backend: ``"local"`` or ``"transformer_engine"``; None takes TransformerEngine where it is
            installed and ``config.transformer_impl`` is not ``"local"``.

    Raises:
        ValueError: If the backend is unknown, missing, or cannot build this config.
    """
    correct_packed_roll()
    if _checked_backend(config, backend) == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, multi_latent_attention=True
        )
    return _with_plain_parts(
        get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=True,
            normalization=config.normalization,
        )
    )


def get_standard_mla_decoder_block_spec(
    config: MLATransformerConfig, *, backend: str | None = None, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Block submodules with dense and MoE layers of this pipeline stage.

    Args:
        config: As for :func:`get_standard_mla_layer_spec`, and ``num_moe_experts`` and
            ``moe_layer_freq`` for the pattern of MoE layers.
        backend: As for :func:`get_standard_mla_layer_spec`.
        vp_stage: Virtual pipeline stage.

    Raises:
        ValueError: If the backend is unknown, missing, or cannot build this config.
    """
    correct_packed_roll()
    use_te = _checked_backend(config, backend) == "transformer_engine"
    _require_experts(config)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=use_te, normalization=config.normalization, vp_stage=vp_stage
    )
    if use_te:
        return block
    return TransformerBlockSubmodules(
        layer_specs=[_with_plain_parts(layer) for layer in block.layer_specs], layer_norm=RMSNorm
    )


class PlainCoreAttention(nn.Module):
    """Multi-head attention in plain PyTorch, with the host's core-attention interface.

    It holds the whole S x S score matrix of a sequence: for small sizes only.

    Args:
        config: Read for ``attention_dropout`` and ``sequence_parallel``.
        attn_mask_type: Used where ``forward`` gets none.
        softmax_scale: Multiplies the scores; None for 1/sqrt of the key width.
        k_channels: Width of a key head; the host's base constructor passes none.
        v_channels: Width of a value head; the host's base constructor passes none.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection=None,
    ) -> None:
        super().__init__()
        _refuse_unsupported(config)
        self.config = config
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.k_channels = k_channels
        self.v_channels = v_channels
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: [s, b, n, d_k], or [t, n, d_k] with packed sequences.
            key: Like ``query``.
            value: [s, b, n, d_v], or [t, n, d_v] with packed sequences.
            attention_mask: Bool, True where a key is hidden, broadcastable to
                [b, n, s, s]; or None.
            attn_mask_type: Whether attention is causal; None takes the constructor's.
            attention_bias: Not supported.
            packed_seq_params: Boundaries of the packed sequences, or None.

        Returns:
            [s, b, n * d_v], or [t, n * d_v] with packed sequences; zeros on padding between them.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported by PlainCoreAttention, got a tensor")
        causal = (self.attn_mask_type if attn_mask_type is None else attn_mask_type) in _CAUSAL
        if packed_seq_params is None:
            return self._attend(query, key, value, attention_mask, causal).flatten(2)
        if attention_mask is not None:
            raise ValueError("attention_mask must be None with packed sequences, got a tensor")
        pieces, tokens = [], 0
        for start, end in _sequence_bounds(packed_seq_params, query.shape[0]):
            pieces.append(value.new_zeros(start - tokens, *value.shape[1:]))
            q, k, v = (x[start:end].unsqueeze(1) for x in (query, key, value))
            pieces.append(self._attend(q, k, v, None, causal).squeeze(1))
            tokens = end
        pieces.append(value.new_zeros(query.shape[0] - tokens, *value.shape[1:]))
        return torch.cat(pieces).flatten(1)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, causal: bool
    ) -> Tensor:
        """[s, b, n, d] tensors to [s, b, n, d_v]."""
        compute = torch.promote_types(query.dtype, torch.float32)
        scale = self.softmax_scale
        if scale is None:
            scale = 1 / math.sqrt(query.shape[-1])
        scores = torch.einsum("qbnd,kbnd->bnqk", query.to(compute), key.to(compute)) * scale
        # A finite fill leaves rows without any visible key uniform, as Megatron does, not NaN.
        lowest = torch.finfo(compute).min
        if causal:
            num_q, num_k = scores.shape[-2:]
            future = torch.ones(num_q, num_k, dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(future.triu(num_k - num_q + 1), lowest)
        if hidden is not None:
            scores = scores.masked_fill(hidden, lowest)
        probs = self._drop(scores.softmax(-1))
        return torch.einsum("bnqk,kbnd->qbnd", probs, value.to(compute)).to(value.dtype)

    def _drop(self, probs: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return probs
        if self.config.sequence_parallel:
            return nn.functional.dropout(probs, self.dropout)
        # Heads differ between tensor-parallel ranks, so their dropout must too.
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return nn.functional.dropout(probs, self.dropout)


def _checked_backend(config: MLATransformerConfig, backend: str | None) -> str:
    if backend is None:
        use_te = HAVE_TE and config.transformer_impl != "local"
        backend = "transformer_engine" if use_te else "local"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None; got {backend!r}")
    if backend == "transformer_engine" and not HAVE_TE:
        raise ValueError(
            "backend='transformer_engine' needs transformer-engine, not installed here"
        )
    if backend != config.transformer_impl:
        raise ValueError(
            f"backend={backend!r} needs config.transformer_impl={backend!r}, "
            f"got {config.transformer_impl!r}"
        )
    if backend == "local" and config.qk_layernorm and config.q_lora_rank is None:
        raise ValueError(
            "Megatron's MLASelfAttention cannot be built with qk_layernorm=True and "
            "q_lora_rank=None by the local backend: it would need a norm fused into linear_q_proj. "
            "Set q_lora_rank, qk_layernorm=False, or use backend='transformer_engine'"
        )
    return backend


def _require_experts(config: MLATransformerConfig) -> None:
    """A list that asks for MoE layers without experts would silently build dense ones."""
    pattern = config.moe_layer_freq
    if config.num_moe_experts is None and isinstance(pattern, list) and any(pattern):
        raise ValueError(f"moe_layer_freq={pattern} needs num_moe_experts, got None")


def _with_plain_parts(layer: ModuleSpec) -> ModuleSpec:
    """The local layer spec with a core attention and norms that support MLA."""
    attention = layer.submodules.self_attention
    parts = attention.submodules
    norms = {
        name: RMSNorm
        for name in ("q_layernorm", "kv_layernorm")
        if getattr(parts, name) is not IdentityOp
    }
    parts = dataclasses.replace(parts, core_attention=PlainCoreAttention, **norms)
    submodules = dataclasses.replace(
        layer.submodules,
        input_layernorm=RMSNorm,
        pre_mlp_layernorm=RMSNorm,
        self_attention=dataclasses.replace(attention, submodules=parts),
    )
    return dataclasses.replace(layer, submodules=submodules)


def _refuse_unsupported(config: MLATransformerConfig) -> None:
    for name, accepted in (
        ("context_parallel_size", 1),
        ("softmax_type", "vanilla"),
        ("apply_query_key_layer_scaling", False),
        ("window_size", None),
        ("qk_clip", False),
    ):
        value = getattr(config, name, accepted)
        if value != accepted:
            raise ValueError(f"PlainCoreAttention supports {name}={accepted!r} only, got {value!r}")


def _sequence_bounds(params: PackedSeqParams, num_tokens: int) -> list[tuple[int, int]]:
    """(start, end) of each packed sequence along the token axis, padding excluded."""
    if params.qkv_format != "thd" or params.cu_seqlens_q is None:
        raise ValueError(
            "packed_seq_params needs qkv_format='thd' and cu_seqlens_q, "
            f"got {params.qkv_format!r} and {params.cu_seqlens_q!r}"
        )
    bounds = params.cu_seqlens_q.tolist()
    slots = bounds
    if params.cu_seqlens_q_padded is not None:
        slots = params.cu_seqlens_q_padded.tolist()
    if len(slots) != len(bounds) or slots[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens {slots} do not fit {len(bounds)} entries, {num_tokens} tokens"
        )
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    return [(start, start + length) for start, length in zip(slots, lengths)]
