"""Weights of a checkpoint in a live model, and fused operators of models that only generate."""
