"""The parts of scripts/make_synthetic_checkpoint.py."""
