"""Ways of exchanging latents between context-parallel ranks: one file each, named as the option."""
