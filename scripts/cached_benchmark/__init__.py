"""What ``scripts/bench_cached_attention.py`` is made of."""
