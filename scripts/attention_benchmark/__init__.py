"""The parts of scripts/bench_attention.py."""
