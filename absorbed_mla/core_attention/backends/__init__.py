"""Attention backends: one file each, named as the backend."""
