"""``hf_weights`` and ``hf_weight_shapes`` under their public name: see ``serving/export``."""

from absorbed_mla.serving.export import hf_weight_shapes, hf_weights

__all__ = ["hf_weight_shapes", "hf_weights"]
