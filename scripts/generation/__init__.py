"""Text from a live model, by Megatron's own inference engine."""
