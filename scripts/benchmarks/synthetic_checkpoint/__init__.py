"""The parts of scripts/benchmarks/make_synthetic_checkpoint.py."""
