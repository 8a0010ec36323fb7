"""Generation from the live module: the latent cache and the attention over it."""

from absorbed_mla.inference.cached_attention import CachedAttention
from absorbed_mla.inference.contexts import open_step
from absorbed_mla.inference.host_buffers import drop_inference_buffers

__all__ = ["CachedAttention", "drop_inference_buffers", "open_step"]
