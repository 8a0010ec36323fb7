"""Generation from the live module: the latent cache and the attention over it."""

from absorbed_mla.inference.cached_attention import CachedAttention
from absorbed_mla.inference.contexts import open_step

__all__ = ["CachedAttention", "open_step"]
