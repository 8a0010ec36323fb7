"""Latent caches: one file for each of Megatron's inference contexts."""
