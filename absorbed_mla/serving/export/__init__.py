"""Weights of a live model under Hugging Face's names, for the inference engines of RL."""

from absorbed_mla.own_packages import require_own_packages

require_own_packages("checkpoint_conversion")

from absorbed_mla.serving.export.sender import LiveWeights, WeightSender  # noqa: E402
from absorbed_mla.serving.export.weights import hf_weight_shapes, hf_weights  # noqa: E402

__all__ = ["LiveWeights", "WeightSender", "hf_weight_shapes", "hf_weights"]
