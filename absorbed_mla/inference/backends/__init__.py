"""Backends for absorbed attention over a paged latent cache, one file each."""
