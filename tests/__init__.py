"""Tests, in layers by cost: unit (one process), distributed (torchrun)."""
