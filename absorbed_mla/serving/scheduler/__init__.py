"""Decode steps without Megatron's scheduler, while nothing but the next token changes."""
