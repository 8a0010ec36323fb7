"""Implementations of the attention over chosen keys: one file each, named as the option."""
