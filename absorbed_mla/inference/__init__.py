"""Generation from the live module: the latent caches and the attention over them."""
