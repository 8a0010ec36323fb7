"""Megatron's own ``DSAttention`` in the core slot of this layer, so that both can be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from absorbed_mla.core_attention.attend import AttentionPlan
from absorbed_mla.core_attention.forms.absorbed import AbsorbedForm
from absorbed_mla.core_attention.forms.base import Query
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.module import CAUSAL_MASKS
from absorbed_mla.dims import MLADims
from absorbed_mla.dsa.unsupported import refuse_unsupported_dsa
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.sequences import SequenceLayout
from absorbed_mla.unsupported import refuse_other_variant


@dataclass
class MegatronCoreAttentionSubmodules:
    """``core_attention`` is the spec of a ``DSAttention``."""

    core_attention: ModuleSpec


@dataclass(frozen=True)
class MegatronPlan(AttentionPlan):
    """The plan of one call, with what ``DSAttention`` takes beside query and key.

    Attributes:
        x: Hidden states, [S or S / tp, B, hidden_size].
        qr: The normalised latent of the query, of the same tokens.
    """

    x: Tensor | None = None
    qr: Tensor | None = None


class MegatronCoreAttention(nn.Module):
    """``DSAttention`` with this package's query and latent; it reports its own loss.

    For comparisons, on one context-parallel rank and dense batches.

    Args:
        config: Megatron's MLA config with ``dsa_indexer_*``.
        submodules: The spec of the core attention.
        dims: Dimensions of the layer on this rank.
        attn_mask_type: A causal one.
        softmax_scale: Multiplies the scores.
        options: ``form`` is absorbed or auto.
        layer_number: Counted from 1.
        cp_comm_type: ``"all_gather"``.
        pg_collection: Process groups.
        name: Not used.

    Raises:
        ValueError: If there are several context-parallel ranks, or the config asks for something
            unsupported.
    """

    variant = "dsa"
    causal = True
    current_max_attn_logits: Tensor | None = None
    softmax_offset: Tensor | None = None

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MegatronCoreAttentionSubmodules,
        dims: MLADims,
        attn_mask_type: AttnMaskType,
        softmax_scale: float,
        options: AbsorbedMLAOptions,
        *,
        layer_number: int,
        cp_comm_type: str,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__()
        refuse_other_variant(config, self)
        causal = attn_mask_type in CAUSAL_MASKS
        refuse_unsupported_dsa(config, options, causal=causal, cp_comm_type=cp_comm_type)
        if options.batch_invariant:
            raise ValueError(
                "batch_invariant must be False for MegatronCoreAttention, got True: DSAttention "
                "has no parity mode"
            )
        if config.softmax_type != "vanilla":
            raise ValueError(
                "softmax_type must be vanilla for MegatronCoreAttention, got "
                f"{config.softmax_type!r}: DSAttention has no sinks"
            )
        if pg_collection.cp.size() > 1:
            raise ValueError(
                "MegatronCoreAttention needs context_parallel_size=1, got "
                f"{pg_collection.cp.size()}: DSAttention exchanges keys by itself"
            )
        self.scale = softmax_scale
        self.attn_mask_type = attn_mask_type
        self.attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=softmax_scale,
            k_channels=dims.kv_down_dim,
            v_channels=dims.kv_lora_rank,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )

    def plan(
        self,
        keys: Any,
        layout: SequenceLayout,
        cp_size: int,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
    ) -> MegatronPlan:
        """See ``LatentCoreAttention``.

        Raises:
            ValueError: If there is a mask or a pack.
        """
        if attention_mask is not None or layout.packed or cp_size > 1:
            raise ValueError(
                "MegatronCoreAttention takes dense batches without attention_mask on one "
                "context-parallel rank"
            )
        rules = ScoreRules(scale=self.scale, spans=keys.spans())
        return MegatronPlan(AbsorbedForm(), None, keys, rules)  # type: ignore[arg-type]

    def choose_keys(
        self,
        plan: MegatronPlan,
        hidden_states: Tensor,
        query_latent: Callable[[], Tensor],
        cos: Tensor,
        sin: Tensor,
        *,
        trained: bool,
    ) -> MegatronPlan:
        """See ``LatentCoreAttention``; it chooses in :meth:`forward`."""
        return replace(plan, x=hidden_states, qr=query_latent())

    def choose_cached_keys(self, *_: Any) -> None:
        """See ``SparseCoreAttention``.

        Raises:
            ValueError: ``DSAttention`` keeps no index keys.
        """
        raise ValueError(
            "MegatronCoreAttention does not support inference_context: Megatron's DSAttention "
            "keeps no index keys; generate with the specs' own SparseCoreAttention"
        )

    def forward(
        self,
        plan: MegatronPlan,
        query: Query,
        kv: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``LatentCoreAttention``; there is no LSE: an empty tensor."""
        out = self.attention(
            torch.cat(query, dim=-1),
            kv.unsqueeze(2),
            None,
            None,
            x=plan.x,
            qr=plan.qr,
            up_v_weight=w_uv,
            attn_mask_type=self.attn_mask_type,
        )
        return out.unflatten(-1, (w_uv.shape[0], -1)), out.new_empty(0)

    def learn_choice(
        self, plan: MegatronPlan, core_out: Tensor, lse: Tensor, query: Query, kv: Tensor
    ) -> Tensor:
        """``core_out``, which carries Megatron's loss already."""
        return core_out
