"""The module in Megatron's ``core_attention`` slot."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from absorbed_mla.core_attention.backend import select_backend
from absorbed_mla.core_attention.forms import select_form
from absorbed_mla.core_attention.scores import ScoreRules
from absorbed_mla.dims import MLADims
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.sequences import SequenceLayout

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class LatentCoreAttention(nn.Module):
    """Attention that sees the query, the latent and the up-projection weights.

    It therefore decides itself whether to absorb W_UK into the query or to expand keys and values,
    and when. :meth:`up_project` and :meth:`attend` are its two halves, because Megatron's
    ``mla_up_proj`` and ``core_attn`` recomputation cut between them.

    Args:
        config: Read for ``attention_dropout``.
        dims: Dimensions of the layer on this rank.
        attn_mask_type: Which keys a token may see.
        softmax_scale: Multiplies the scores.
        options: Form, backend and chunk size.
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
        self.softmax_scale = softmax_scale
        self.attention_dropout = config.attention_dropout
        self.options = options
        self.backend = select_backend(options.core_attention_backend)

    def forward(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        rules: ScoreRules,
    ) -> tuple[Tensor, Tensor]:
        """Attend in one go.

        Args:
            q_nope: [S, B, N, nope].
            q_rope: [S, B, N, rope], rotated.
            latent: [S, B, C], normalised.
            k_rope: [S, B, rope], rotated.
            w_uk: [N, nope, C].
            w_uv: [N, v, C].
            rules: From :meth:`rules`.

        Returns:
            Output [S, B, N, v] and LSE [S, B, N] (fp32; fp64 for fp64 inputs).
        """
        per_head = self.up_project(q_nope, latent, w_uk, w_uv)
        return self.attend(per_head, q_rope, latent, k_rope, w_uv, rules)

    def up_project(
        self, q_nope: Tensor, latent: Tensor, w_uk: Tensor, w_uv: Tensor
    ) -> tuple[Tensor, ...]:
        """Large per-head tensors of the chosen form, for :meth:`attend`."""
        form = self._form(q_nope.shape[0], latent.shape[0])
        return form.up_project(q_nope, latent, w_uk, w_uv)

    def attend(
        self,
        per_head: tuple[Tensor, ...],
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        w_uv: Tensor,
        rules: ScoreRules,
    ) -> tuple[Tensor, Tensor]:
        """Output [S, B, N, v] and LSE [S, B, N] from the tensors of :meth:`up_project`."""
        form = self._form(q_rope.shape[0], latent.shape[0])
        return form.attend(per_head, q_rope, latent, k_rope, w_uv, self.backend, rules)

    def _form(self, q_tokens: int, kv_tokens: int):
        return select_form(self.options.form, self.dims, q_tokens, kv_tokens)

    def rules(
        self,
        layout: SequenceLayout,
        batch: int,
        attention_mask: Tensor | None,
        device: torch.device,
    ) -> ScoreRules:
        """The score rules of one call, checked.

        The dropout seed is drawn here, once, so that recomputation repeats the pattern.

        Raises:
            ValueError: If the mask does not fit ``attn_mask_type``, the layout or the batch.
        """
        self._check_mask(layout, batch, attention_mask, device)
        dropout = self.attention_dropout if self.training else 0.0
        return ScoreRules(
            scale=self.softmax_scale,
            layout=layout,
            causal=self.attn_mask_type in _CAUSAL,
            attention_mask=attention_mask,
            dropout=dropout,
            dropout_seed=_draw_dropout_seed(device) if dropout else 0,
            query_chunk_size=self.options.query_chunk_size,
        )

    def _check_mask(
        self, layout: SequenceLayout, batch: int, mask: Tensor | None, device: torch.device
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
        s = layout.num_tokens
        accepted = [(b, 1, rows, s) for b in {1, batch} for rows in {1, s}]
        if mask.dtype != torch.bool or tuple(mask.shape) not in accepted:
            raise ValueError(
                f"attention_mask must be bool (True hides a key) of shape [{batch} or 1, 1, "
                f"{s} or 1, {s}], got {mask.dtype} {tuple(mask.shape)}"
            )
        if mask.device != device:
            raise ValueError(
                f"attention_mask must be on {device} like hidden_states, got {mask.device}"
            )


def _draw_dropout_seed(device: torch.device) -> int:
    """A seed from Megatron's model-parallel generator: ranks hold different heads."""
    with get_cuda_rng_tracker().fork():
        return int(torch.randint(2**62, (), device=device))
