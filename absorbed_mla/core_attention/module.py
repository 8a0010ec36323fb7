"""The module in Megatron's ``core_attention`` slot."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from absorbed_mla.core_attention.attend import attend
from absorbed_mla.core_attention.backend import AttentionBackend, AttentionRequest
from absorbed_mla.core_attention.cost import Work
from absorbed_mla.core_attention.forms.forms import AbsorbedForm, ExpandedForm, Form, Query
from absorbed_mla.core_attention.key_source import KeyBlock, KeySource
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.selection import choose, choose_batch_invariant
from absorbed_mla.dims import MLADims
from absorbed_mla.options import FORMS, AbsorbedMLAOptions
from absorbed_mla.sequences import SequenceLayout

# Types of mask in which a token sees itself and earlier tokens only.
CAUSAL_MASKS = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class LatentCoreAttention(nn.Module):
    """Attention that sees the query, the latent and the up-projection weights.

    It therefore decides itself whether to absorb W_UK into the query or to expand keys and values,
    and when.

    Args:
        config: Read for ``attention_dropout``.
        dims: Dimensions of the layer on this rank.
        attn_mask_type: Which keys a token may see.
        softmax_scale: Multiplies the scores.
        options: Form, backend and chunk sizes.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        dims: MLADims,
        attn_mask_type: AttnMaskType,
        softmax_scale: float,
        options: AbsorbedMLAOptions,
    ) -> None:
        super().__init__()
        self.dims = dims
        self.attn_mask_type = attn_mask_type
        self.causal = attn_mask_type in CAUSAL_MASKS
        self.softmax_scale = softmax_scale
        self.attention_dropout = config.attention_dropout
        self.options = options
        self._forms: dict[str, Form] = {
            "absorbed": AbsorbedForm(),
            "expanded": ExpandedForm(options.expansion_chunk_size),
        }

    def plan(
        self,
        keys: KeySource,
        layout: SequenceLayout,
        cp_size: int,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
    ) -> AttentionPlan:
        """Check and settle everything about one call that needs no tensor of the model.

        Args:
            keys: Where keys come from.
            layout: The whole sequences.
            cp_size: Ranks they are cut over.
            hidden_states: [S or S / tp, B, hidden_size], for its batch, dtype and device.
            attention_mask: As in the layer's ``forward``.

        Raises:
            ValueError: If the mask does not fit ``attn_mask_type``, the layout or the batch, or the
                backend cannot do what is asked.
        """
        device = hidden_states.device
        self._check_mask(layout, cp_size, hidden_states.shape[1], attention_mask, device)
        dropout = self.attention_dropout if self.training else 0.0
        rules = ScoreRules(
            scale=self.softmax_scale,
            spans=(),
            attention_mask=attention_mask,
            dropout=dropout,
            dropout_seed=_draw_dropout_seed(device) if dropout else 0,
            query_tokens=keys.query_tokens(device) if dropout else None,
            query_chunk_size=self.options.query_chunk_size,
        )
        # Not whether gradients are on: recomputation runs the first forward without them, and must
        # repeat it.
        batch = hidden_states.shape[1]
        work = _work(layout, batch, cp_size, self.causal, self.training)
        # Under context parallelism a rank has two pieces of each sequence.
        packed = layout.packed or (cp_size > 1 and batch == 1)
        described = (hidden_states, attention_mask, bool(dropout), packed)
        requests = {
            name: self._request(self._forms[name], *described)
            for name in (FORMS[1:] if self.options.form == "auto" else (self.options.form,))
        }
        asked = self.options.core_attention_backend
        if not hidden_states.numel():
            asked = "reference"  # kernels are not launched over nothing
        if self.options.batch_invariant:
            form = "absorbed"
            backend = choose_batch_invariant(requests[form], asked, keys.num_blocks)
        else:
            form, backend = choose(requests, asked, self.dims, work)
        return AttentionPlan(self._forms[form], backend, keys, rules, layout.max_position)

    def _request(
        self,
        form: Form,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        dropout: bool,
        packed: bool,
    ) -> AttentionRequest:
        key_width, value_width, latent = form.widths(self.dims)
        return AttentionRequest(
            device=hidden_states.device,
            dtype=hidden_states.dtype,
            key_width=key_width,
            value_width=value_width,
            latent=latent,
            masked=attention_mask is not None,
            dropout=dropout,
            packed=packed,
        )

    def forward(
        self, plan: AttentionPlan, query: Query, kv: Tensor, w_uk: Tensor, w_uv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            plan: From :meth:`plan`.
            query: From ``plan.form.query``.
            kv: What ``plan.keys.start`` returned for [latent | k_rope].
            w_uk: [N, nope, C].
            w_uv: [N, v, C].

        Returns:
            Output [S, B, N, v] and LSE [S, B, N] (fp32; fp64 for fp64 inputs).
        """
        weights = plan.form.weights(w_uk, w_uv)
        out, lse = attend(plan.form, plan.backend, plan.keys, plan.rules_on, query, kv, weights)
        return plan.form.output(out, w_uv), lse

    def _check_mask(
        self,
        layout: SequenceLayout,
        cp_size: int,
        batch: int,
        mask: Tensor | None,
        device: torch.device,
    ) -> None:
        if mask is None:
            if self.attn_mask_type is AttnMaskType.arbitrary:
                raise ValueError("attn_mask_type=arbitrary needs an attention_mask, got None")
            return
        if layout.packed:
            raise ValueError(
                "attention_mask must be None with packed sequences, whose cu_seqlens say what is "
                f"hidden; got a tensor of shape {tuple(mask.shape)}"
            )
        if self.attn_mask_type is AttnMaskType.no_mask:
            raise ValueError(
                "attention_mask must be None for attn_mask_type=no_mask; "
                f"got a tensor of shape {tuple(mask.shape)}"
            )
        keys = layout.num_tokens
        queries = keys // cp_size
        accepted = [(b, 1, rows, keys) for b in {1, batch} for rows in {1, queries}]
        if mask.dtype != torch.bool or tuple(mask.shape) not in accepted:
            raise ValueError(
                f"attention_mask must be bool (True hides a key) of shape [{batch} or 1, 1, "
                f"{queries} or 1, {keys}], got {mask.dtype} {tuple(mask.shape)}"
            )
        if mask.device != device:
            raise ValueError(
                f"attention_mask must be on {device} like hidden_states, got {mask.device}"
            )


_work = functools.lru_cache(maxsize=64)(Work.of)


@dataclass(frozen=True)
class AttentionPlan:
    """One call of the core attention, settled.

    Attributes:
        form: Absorbed or expanded.
        backend: Computes the attention.
        keys: Where keys come from.
        rules: The score rules, less what depends on the block of keys.
        max_position: One more than the largest position of any token.
    """

    form: Form
    backend: AttentionBackend
    keys: KeySource
    rules: ScoreRules
    max_position: int

    def rules_on(self, block: KeyBlock) -> ScoreRules:
        """The score rules on one block of keys."""
        return self.rules.on_keys(block.spans, block.tokens)


def _draw_dropout_seed(device: torch.device) -> int:
    """A seed from Megatron's model-parallel generator: ranks hold different heads."""
    with get_cuda_rng_tracker().fork():
        return int(torch.randint(2**62, (), device=device))
