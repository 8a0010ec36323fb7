"""Decode context parallelism: ranks keep shares of one latent cache and merge outputs by LSE."""
