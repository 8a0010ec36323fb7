"""Latent attention in plain Triton: any GPU that Triton compiles for, and its interpreter."""
