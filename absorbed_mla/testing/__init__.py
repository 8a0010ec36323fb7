"""Helpers shared by tests/ and scripts/: running Megatron without a GPU, comparing numbers."""
