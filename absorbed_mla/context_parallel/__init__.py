"""Context parallelism: ranks hold parts of every sequence and exchange latents."""
