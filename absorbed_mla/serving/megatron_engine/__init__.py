"""Megatron's dynamic inference engine: the only files that know its private names."""
