"""Checkpoint conversion between Hugging Face and Megatron models.

Conversion is not implemented yet: this package has no function and no command. Megatron's own
checkpoints need none; ``absorbed_mla`` loads those of standard MLA as they are, and
``absorbed_mla.to_standard_state_dict`` writes one.
"""
