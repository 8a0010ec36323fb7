"""Weights of a live model under Hugging Face's names, for the inference engines of RL."""

from absorbed_mla.export.weights import hf_weight_shapes, hf_weights

__all__ = ["hf_weight_shapes", "hf_weights"]
