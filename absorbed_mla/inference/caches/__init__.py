"""Where latents are kept in Megatron's inference contexts, one file per kind of context."""
