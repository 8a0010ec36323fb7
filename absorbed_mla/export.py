"""Weights of a live model for inference engines, under public names: see ``serving/export``."""

from absorbed_mla.serving.export import LiveWeights, WeightSender, hf_weight_shapes, hf_weights

__all__ = ["LiveWeights", "WeightSender", "hf_weight_shapes", "hf_weights"]
