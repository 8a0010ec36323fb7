"""Benchmarks, one file each, and the kit that they share."""
