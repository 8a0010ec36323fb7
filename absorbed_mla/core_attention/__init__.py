"""Core attention over the latent: the module, its two forms, masks, and the backends."""
