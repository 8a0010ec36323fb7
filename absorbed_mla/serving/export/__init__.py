"""Weights of a live model under Hugging Face's names, for the inference engines of RL."""

from absorbed_mla.own_packages import require_own_packages

require_own_packages("checkpoint_conversion")

from absorbed_mla.serving.export.resharding import WeightResharding  # noqa: E402
from absorbed_mla.serving.export.sender import LiveWeights, WeightSender, weight_buckets  # noqa: E402
from absorbed_mla.serving.export.weights import hf_weight_shapes, hf_weights  # noqa: E402
from absorbed_mla.serving.parallel_groups import ParallelGroups  # noqa: E402

__all__ = [
    "LiveWeights",
    "ParallelGroups",
    "WeightResharding",
    "WeightSender",
    "hf_weight_shapes",
    "hf_weights",
    "weight_buckets",
]
