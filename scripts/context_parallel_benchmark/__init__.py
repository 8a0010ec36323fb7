"""The parts of scripts/bench_context_parallel.py."""
