"""The fused write of new latents: norms, RoPE and cache in one launch, for few tokens."""

from __future__ import annotations

from torch import Tensor, nn

from absorbed_mla.dims import MLADims
from absorbed_mla.inference.attention import CachedAttention
from absorbed_mla.inference.step import InferenceStep
from absorbed_mla.norm import is_plain


class LatentWriter:
    """Both norms of a layer, RoPE and the cache in one launch, for the latents of new tokens.

    It is the faster way for the few tokens of a step that decodes on a GPU, with the bits of the
    launches in whose place it is, so in parity mode, too.

    Args:
        dims: Dimensions of the layer on this rank.
        cached_attention: Says what the cache holds of a latent.
    """

    def __init__(self, dims: MLADims, cached_attention: CachedAttention) -> None:
        self.dims = dims
        self.cached_attention = cached_attention

    def may_run(self, q_norm: nn.Module | None, kv_norm: nn.Module, kv_down: Tensor) -> bool:
        """Whether the kernel does all that a layer's norms do.

        Args:
            q_norm: Of the compressed query; None if the layer has none.
            kv_norm: Of the latent.
            kv_down: [latent | k_rope] [S, B, C + R], not normalised.
        """
        rope = self.dims.qk_rope_head_dim
        return (
            q_norm is not None
            and rope > 1
            and not rope & (rope - 1)
            and is_plain(q_norm, kv_down)
            and is_plain(kv_norm, kv_down)
        )

    def write(
        self,
        step: InferenceStep,
        q_norm: nn.Module,
        kv_norm: nn.Module,
        q_down: Tensor,
        kv_down: Tensor,
        cos_sin: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Write the latents of new tokens.

        Args:
            step: The cache, opened for the new tokens.
            q_norm: Of the compressed query.
            kv_norm: Of the latent.
            q_down: [S, B, q_lora_rank].
            kv_down: [latent | k_rope] [T, 1, C + R].
            cos_sin: Of the new tokens' positions, [T, R / 2] each.

        Returns:
            ``q_down`` normalised, and ``kv_down`` normalised and rotated.
        """
        # Imported here, because machines without a GPU need not have Triton.
        from absorbed_mla.kernels.paged.new_latents import Normed, new_latents

        slots = step.slots() if self.cached_attention.fp8 is None else None
        query, keys = (
            Normed(rows.flatten(0, 1), norm.weight, norm.eps)
            for rows, norm in ((q_down, q_norm), (kv_down, kv_norm))
        )
        query_latent, kv = new_latents(query, keys, *cos_sin, kv_norm.zero_centered, slots)
        kv = kv.unsqueeze(1)
        if slots is None:
            step.write(self.cached_attention.rows(kv))
        return query_latent.view(q_down.shape), kv
