"""What scripts/bench_decode.py is made of."""
