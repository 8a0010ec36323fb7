"""The parts of scripts/benchmarks/serving.py."""
