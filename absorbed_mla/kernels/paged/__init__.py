"""Absorbed attention over a paged latent cache, in Triton, for any GPU that it knows."""
