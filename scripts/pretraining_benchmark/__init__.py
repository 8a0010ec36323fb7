"""The parts of scripts/bench_pretraining.py."""
