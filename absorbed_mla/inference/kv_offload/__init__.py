"""KV offload: a latent cache with more blocks than the device has memory for."""
