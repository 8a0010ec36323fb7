"""The parts of scripts/bench_conversion.py."""
