"""State dicts and distributed checkpoints in every layout that Megatron's MLA writes."""
